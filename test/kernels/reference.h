// The kernels' contracts computed from their formulas, one element at a time, to judge results by.
// In double they are the reference. In float, with stored = bf16 where tensors are bf16, they are
// what a plain implementation gives, whose errors show which errors are normal. Tensors are dense
// vectors of the elements as stored, with the shapes of the contracts.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "kernels/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/linear/gemm.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"

namespace train_gpt {

using Values = std::vector<double>;

/// The larger of two errors. Keeps a NaN, which std::max drops.
inline double worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

/// ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
double gelu_reference(double x);
double gelu_derivative_reference(double x);

/// c [m, n] = A∘B as GemmOp says: c_ij = Σ_k a_ik·b_kj, summed term by term in Real.
template <class Real>
Values product_reference(GemmOp op, const Values& a, const Values& b, int64_t m, int64_t n,
                         int64_t k);

struct SwigluReference {
    Values out, dgate_up;
};
/// gate_up [M, 2F], dout [M, F]: out = silu(gate) ⊙ up, dgate = dout ⊙ up ⊙ silu'(gate),
/// dup = dout ⊙ silu(gate), silu(x) = x / (1 + e^−x). Or the clamped form (ClampedSwiglu).
template <class Real>
SwigluReference swiglu_reference(int64_t F, const Values& gate_up, const Values& dout,
                                 DType stored = DType::fp32,
                                 const std::optional<ClampedSwiglu>& clamped = {});

struct NormProblem {
    Norm norm = Norm::layer;
    int64_t M = 0, C = 0;
    Values x, w, b;             // b empty: none
    Values dy = {}, dres = {};  // dy empty: only the forward pass; dres empty: it is overwritten
    double epsilon = 1e-5;
};
struct NormReference {
    Values out, stats, dres, dw, db;
};
/// With x̂ = (x − μ)·ρ and g = dy ⊙ w: out = x̂ ⊙ w + b, stats = (μ, ρ) of each row,
/// dres += ρ·(g − mean(g) − x̂·mean(g ⊙ x̂)), dw = Σ_rows dy ⊙ x̂, db = Σ_rows dy.
/// With Norm::rms, μ = 0 and there is no mean(g).
template <class Real>
NormReference norm_reference(const NormProblem& p, DType stored = DType::fp32);

struct RopeProblem {
    RopeShape shape;                      // except for its table and doc_start
    std::vector<double> frequencies;      // [D/2]
    std::vector<int32_t> doc_start = {};  // empty: all 0
    Values q, k;                          // [B, T, heads, D]
    Values q_w = {}, k_w = {};            // empty: no norm
    Values dq = {}, dk = {};  // the gradients of the results; empty: only the forward pass
    double epsilon = 1e-6;
    bool whole_width = false;  // the norm is of all heads of a token together
};
struct RopeReference {
    Values q, k;                // the results
    Values dq, dk, dq_w, dk_w;  // the gradients of the operands
};
/// A head's elements i and i + D/2 are a complex number, which is multiplied by e^(iα), or its
/// gradient by e^(−iα); α is the frequency times the token's position. Before that, the norm is
/// norm_reference's.
template <class Real>
RopeReference rope_reference(const RopeProblem& p, DType stored = DType::fp32);

struct AttentionProblem {
    AttentionShape shape;            // except for its doc_start
    std::vector<int32_t> doc_start;  // empty: one document
    Values q, k, v;                  // [B, T or S, heads, D]
    Values dout;                     // empty: only the forward pass
    Values sinks = {};               // [H]; empty: none

    size_t q_at(int b, int t, int h) const {
        return ((static_cast<size_t>(b) * shape.T + t) * shape.H + h) * shape.D;
    }
    size_t k_at(int b, int s, int h) const {
        return ((static_cast<size_t>(b) * shape.S + s) * shape.H_kv + h) * shape.D;
    }
    size_t lse_at(int b, int h, int t) const {
        return (static_cast<size_t>(b) * shape.H + h) * shape.T + t;
    }
    /// The first and the last key that query t sees.
    int first(int b, int t) const {
        const int in_window = shape.window == 0 ? 0 : std::max(0, last(t) - shape.window + 1);
        return doc_start.empty()
                   ? in_window
                   : std::max(in_window, doc_start[static_cast<size_t>(b) * shape.T + t]);
    }
    int last(int t) const { return t + shape.S - shape.T; }
};
/// The *_terms are, for each element, the sums of the absolute values of the terms that are added:
/// rounding errors of the intermediate steps are relative to them.
struct AttentionReference {
    Values out, lse, dq, dk, dv, dsinks;
    Values out_terms, dq_terms, dk_terms, dv_terms, dsinks_terms;
    double score_terms = 0;  // the largest of any score
};
/// p = softmax(scale·q·kᵀ + mask), out = p·v, lse = log Σ exp of the scores;
/// with dp = dout·vᵀ, δ = Σ out ⊙ dout and ds = scale·p ⊙ (dp − δ):
/// dq = ds·k, dk = dsᵀ·q, dv = pᵀ·dout.
/// A sink is one more score of each row, with a value of zeros: dsinks = −Σ exp(sink − lse)·δ.
/// The backward pass reads out as stored; p and ds are rounded to `operands` before they are
/// multiplied, as matrix units require.
template <class Real>
AttentionReference attention_reference(const AttentionProblem& p, DType stored = DType::fp32,
                                       DType operands = DType::fp32);

/// The rows of w and positions that the tokens [B·T] select.
struct EmbeddingRows {
    int64_t T = 0, C = 0;
    std::vector<int32_t> tokens, doc_start = {};  // doc_start empty: all 0

    size_t token_at(size_t row) const { return static_cast<size_t>(tokens[row] * C); }
    size_t position_at(size_t row) const {
        return static_cast<size_t>(
            (static_cast<int64_t>(row) % T - (doc_start.empty() ? 0 : doc_start[row])) * C);
    }
};
/// out = w[token] + positions[position]
Values embedding_forward_reference(const EmbeddingRows& rows, const Values& w,
                                   const Values& positions);
/// dw[token] += dout and dpositions[position] += dout, in the order of the tokens.
template <class Real>
void embedding_backward_reference(const EmbeddingRows& rows, const Values& dout, Values& dw,
                                  Values& dpositions);

struct HeadLossProblem {
    int64_t R = 0, C = 0, V = 0;
    Values x, w;  // [R, C], [V or more, C]
    std::vector<int32_t> targets;
    double z_loss = 0;
    double softcap = 0;  // 0: none
};
struct HeadLossReference {
    Values losses, dx, dw;
};
/// With z = x·wᵀ, or c·tanh(x·wᵀ / c) with a soft-cap c, and lse = log Σ_j exp z_j: losses = lse −
/// z_target, dz = ∂(losses + z_loss·lse²)/∂z = softmax(z) − onehot(target) +
/// 2·z_loss·lse·softmax(z), with a soft-cap times 1 − tanh²; dx = dz·w, dw = dzᵀ·x. Rows whose
/// target is −1 contribute nothing. Logits, dz and dx are rounded to `stored`.
template <class Real>
HeadLossReference head_loss_reference(const HeadLossProblem& p, DType stored = DType::fp32);

/// Σ g² of each block of norm_block elements.
Values norm_partials_reference(const Values& gradient);

struct AdamWReference {
    double master = 0, m = 0, v = 0;
};
/// The update of one element, with g = multiplier·gradient:
///   m = β₁m + (1−β₁)g    v = β₂v + (1−β₂)g²
///   θ −= lr·( (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε) + decay·θ )
AdamWReference adamw_reference(const AdamWReference& before, double gradient, double multiplier,
                               bool decay, const AdamWStep& args);

}  // namespace train_gpt
