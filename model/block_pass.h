// What the parts of a block (attention_layer.h, mlp.h) work on in a pass.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "device/stream.h"
#include "kernels/attention/attention.h"
#include "kernels/rope.h"
#include "model/activations.h"
#include "model/context_attention.h"
#include "model/fp8_scales.h"
#include "model/registry.h"
#include "model/residual_stream.h"
#include "model/router_counts.h"
#include "model/spec.h"
#include "parallel/state/parameters.h"

namespace train_gpt {

/// The experts of a layer have a unit of their own. Their weights are gathered while attention
/// computes. Their gradients are reduced before the block's other gradients are written.
struct ExpertUnit {
    std::function<UnitLease(Stream&)> lease = {};
    /// Called in a backward pass. released: the experts' lease has ended. ready: all gradients of
    /// the experts' weights have been written for the micro-batch.
    std::function<void(Stream&)> released = {}, ready = {};
};

/// What a router counts in training, and what its losses need.
struct Routing {
    RouterCounts* counts = nullptr;  // null: nothing is counted
    int router = 0;                  // this router's number in the model
    RouterLosses losses = {};
    int64_t capacity = 0;             // routes that an expert takes of a sequence; 0: all
    ContextGroup* context = nullptr;  // whose ranks share the sequences
    Tensor counts_of_ranks = {};      // of context-parallel ranks: int32 [ranks·B, E]
};

/// A block and the micro-batch, or the tokens, that it works on.
struct Block {
    LayerSpec layer;  // of this rank's part
    const ResidualStream& residual;
    const UnitLease& weights;
    const BlockParameters& parameters;
    const BlockActivations& activations;
    RopeShape rope = {};  // with rotary positions
    AttentionShape attention = {};
    Addends input = {};                   // where the block computes its x
    ContextAttention* context = nullptr;  // of context-parallel ranks
    ExpertUnit experts = {};
    Routing routing = {};
    const Fp8Scales* fp8 = nullptr;  // null: no product is in fp8
    /// Once scales are known, kernels round their results for products in fp8: the MLP's activation
    /// function (rounds_hidden), and norms (rounds_norms).
    bool rounds_hidden = false, rounds_norms = false;

    Tensor weight(int i) const { return weights.weight(i); }
    /// A weight of products, and how they are computed.
    Operand operand(int i) const { return weights.operand(i); }
    const ProductScales* scales(int i) const { return fp8 ? fp8->of(i) : nullptr; }
    /// Where a kernel writes its result, the input of a weight's products, in fp8: in the memory of
    /// the result's values. Empty: the kernel writes the values.
    Fp8Output rounded_norm1() const;
    Fp8Output rounded_norm2() const;
    Fp8Output rounded_hidden() const;
    /// Whether rounded_hidden() is there once scales are known. The answer does not depend on
    /// whether the host knows already that the scales are known: a resumed run learns that some
    /// steps later, and must compute the same bits. Which products are refused is known before the
    /// first step (Trainer::warm_up()).
    bool will_round_hidden() const;
    /// The norms; without their weights in a pass that computes only weights' gradients.
    StreamNorm norm1() const;
    StreamNorm norm2() const;

  private:
    Fp8Output rounded_input(int weight, Tensor values) const;
    Tensor weight_if_leased(int i) const { return weights ? weight(i) : Tensor{}; }
};

/// Gradients in the backward pass:
///
///   dres [M, C]            of the residual stream
///   dy [M, C]              of a norm's output; temporary
///   datt [M, H·D]          of attention's output; temporary
///   dhidden [M, F]         of hidden, with SwiGLU; temporary
///   dup, dqkv              of the outputs of `up` and `qkv`; with SwiGLU dup may be preact
///   dout, dmid [M, C]      copies of dres at the block's output and middle
///   early                  fp32: of weights, where computed with the inputs' gradients
///                          (early_gradients())
///   qk_dots [M, 2]         fp32: sums for a norm over the whole width of q and k
///                          (kernels/rope.h)
///
/// In a mixture of experts dhidden and dup are [R, …], and there are more gradients:
///
///   dexpert_out [R, C]     of the experts' output; in the memory of expert_out
///   dgrouped [R, C]        of the experts' inputs
///   dweights [M, k]        of the weights of each token's experts, fp32
///   dlogits [M, E]         of the router's logits
///   dshared_…              of the shared expert's activations; dshared_input [M, C]: of its input
///
/// Among tensor-parallel ranks dres, dy, dout and dmid have this rank's rows.
///
/// All blocks share these gradients, unless the two halves of the backward pass are called apart.
/// Then dout, dmid, `early` and the gradients that the second half reads (PartGradient::read_by)
/// keep their values from one half to the other. If `early` is absent, its gradients go to their
/// sinks at once.
struct BlockGradients {
    Tensor dres, dy, datt, dhidden, dup, dqkv;
    Tensor dout = {}, dmid = {}, early = {};
    Tensor qk_dots = {};
    Tensor dexpert_out = {}, dgrouped = {}, dweights = {}, dlogits = {};
    /// The gradient of a product's output, where products are in fp8 on a GPU, rounded for both
    /// gradients that read it (BackwardPass::rounded_gradient()); uint8.
    Tensor rounded = {};
    Tensor dshared_out = {}, dshared_hidden = {}, dshared_up = {}, dshared_input = {},
           dshared_weight = {}, dshared_logit = {};
};

/// An entry of a part's list of the gradients that it needs memory for: M rows, or several for each
/// token.
struct PartGradient {
    /// The memory of a gradient, which all blocks share and gradients take in turn: the memory of
    /// dy; a wide tensor; memory of its own; or an activation, which has been read by then.
    enum class Shares : uint8_t { dy, wide, own, activation };

    Tensor BlockGradients::*member;
    int64_t width = 0;  // columns
    Shares shares = Shares::wide;
    Tensor BlockActivations::*activation = nullptr;
    int64_t each = 1;                 // rows for each token
    std::optional<DType> dtype = {};  // nothing: the compute dtype
    /// Where the halves of the backward pass are called apart, what the second half reads has
    /// memory of its own.
    ReadBy read_by = ReadBy::inputs;
};
using PartGradients = std::vector<PartGradient>;

/// The bytes of BlockGradients::rounded for a gradient [rows, cols].
size_t rounded_gradient_bytes(int64_t rows, int64_t cols);

/// Which gradients a backward pass computes: the inputs', the weights', or both. A pass of `inputs`
/// and one of `weights` after it do the same as `both`. Gradients that norms sum up (their own, and
/// the bias of the projection before) come with the inputs.
enum class Backward { both, inputs, weights };

/// A parameter whose gradient comes with the inputs', and its place in BlockGradients::early.
struct EarlyGradient {
    int parameter = -1;
    int64_t offset = 0, numel = 0;

    int64_t end() const { return offset + numel; }
};

/// The early gradients of a block.
std::vector<EarlyGradient> early_gradients(const LayerSpec& layer,
                                           const BlockParameters& parameters);

/// One block's backward pass, and the steps that its parts have in common.
class BackwardPass {
  public:
    BackwardPass(Stream& stream, Gradients& gradients, const Block& block, const BlockGradients& g,
                 Recompute recompute, Backward part);

    Stream& stream;
    Gradients& gradients;
    const Block& block;
    const BlockGradients& g;
    const Recompute recompute;
    const bool inputs, weights, apart;

    bool recomputes_elementwise() const { return recompute == Recompute::elementwise; }

    /// The gradient of the residual stream, all rows, for products. The second half finds it in
    /// `copy`, where keep_dres() has kept it.
    Tensor gather_dres(Tensor copy) const;
    /// If the halves are called apart, the first half copies dres to `copy`.
    void keep_dres(Tensor copy) const;
    /// A norm's output of all rows for weight gradients, unless it was kept.
    void restore(const StreamNorm& of) const;
    /// dy of a product in fp8 on a GPU, rounded in one pass for both gradients that read it; valid
    /// until the next call. Empty where each gradient rounds dy itself: where the halves of the
    /// pass are called apart, among tensor-parallel ranks, and if a product was refused.
    Fp8Matrix rounded_gradient(Tensor dy, int weight) const;
    /// dx from dy of all rows, of a product into the stream.
    void input_gradient(Tensor dx, Tensor dy, int weight, Tensor preact = {},
                        const Fp8Matrix& rounded_dy = {}) const;
    /// g.dy from dy, of a product that reads a norm's output.
    void norm_output_gradient(Tensor dy, int weight, const Fp8Matrix& rounded_dy = {}) const;
    /// The gradients of a product into the stream. rounded: x in fp8, if it has no values.
    void weight_gradient(int weight, int bias, Tensor x, Tensor dy, const Fp8Matrix& rounded = {},
                         const Fp8Matrix& rounded_dy = {}) const;
    /// The gradients of a product that reads a norm's output. They are computed while its input's
    /// gradients are added up.
    void weight_gradient_of_norm(int weight, int bias, Tensor x, Tensor dy,
                                 const Fp8Matrix& rounded = {},
                                 const Fp8Matrix& rounded_dy = {}) const;
    /// Later work finds all rows of a norm's output that restore() began to gather.
    void wait_for_norm() const;
    /// The gradient of a parameter that is updated in another way (Update::balance) is 0.
    void clear_gradient(int parameter) const;
    /// Where a weight's gradient that comes with the gradients of inputs goes.
    GradientSink early_sink(int parameter) const;
    /// Adds dy's gradient to dres. `of` is the norm; w, b: its parameters; bias: the bias of the
    /// product whose output the norm's x has been added to.
    void norm_gradients(const StreamNorm& of, int w, int b, int bias) const;
    /// In the second half: adds the gradients that the first half kept.
    void add_early_gradients() const;

  private:
    TensorGroup& tensor() const { return block.residual.tensor(); }
    void add_weight_gradient(int weight, int bias, Tensor x, Tensor dy, const Fp8Matrix& rounded,
                             const Fp8Matrix& rounded_dy) const;

    std::vector<EarlyGradient> early_;  // the gradients in g.early
};

}  // namespace train_gpt
