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

/// The experts of a layer have a unit of their own: their weights are gathered while attention
/// computes, and their gradients are reduced before the others' of the block are written.
struct ExpertUnit {
    std::function<UnitLease(Stream&)> lease = {};
    /// In a backward pass: their lease has ended; all gradients of their weights have been written
    /// for the micro-batch.
    std::function<void(Stream&)> released = {}, ready = {};
};

/// What a router counts in training, and what its losses need.
struct Routing {
    RouterCounts* counts = nullptr;  // null: nothing is counted
    int router = 0;                  // of the model's routers
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
    /// Kernels round what products in fp8 read, once scales are known: the MLP's activation; norms.
    bool rounds_hidden = false, rounds_norms = false;

    Tensor weight(int i) const { return weights.weight(i); }
    /// A weight of products, and how they are computed.
    Operand operand(int i) const { return weights.operand(i); }
    const ProductScales* scales(int i) const { return fp8 ? fp8->of(i) : nullptr; }
    /// Where the kernel that computes the input of a weight's products writes it in fp8, in the
    /// memory of its values; empty: it writes the values.
    Fp8Output rounded_norm1() const;
    Fp8Output rounded_norm2() const;
    Fp8Output rounded_hidden() const;
    /// The norms; without their weights in a pass that computes only weights' gradients.
    StreamNorm norm1() const;
    StreamNorm norm2() const;

  private:
    Fp8Output rounded_input(int weight, Tensor values) const;
    Tensor weight_if_leased(int i) const { return weights ? weight(i) : Tensor{}; }
};

/// Gradients in the backward pass. dres is the gradient of the residual stream. dy [M, C], datt
/// [M, H·D] and, with SwiGLU, dhidden [M, F] are temporary. dup, which may be preact then, and dqkv
/// are the gradients of the outputs of `up` and `qkv`. In a mixture of experts dhidden and dup are
/// [R, …], dgrouped [R, C] is the gradient of the experts' inputs, and dexpert_out takes the place
/// of expert_out; dlogits and dweights are the router's, and a shared expert has the gradients of
/// its own. qk_dots [M, 2] are sums of a norm over the whole width (kernels/rope.h). Among
/// tensor-parallel ranks dres, dy, dout and dmid have this rank's rows.
///
/// All blocks share them, unless the two halves of the backward pass are called apart. Then dup,
/// dqkv, and dout and dmid, the copies of dres at the block's output and middle, keep their values
/// from one half to the other. So does `early`, fp32, with the weights' gradients that come with
/// the inputs' (early_gradients()); if it is absent, these go to their sinks at once.
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

    /// The stream's gradient of all rows, for products; `copy` has it for the second half, and gets
    /// it in the first.
    Tensor gather_dres(Tensor copy) const;
    void keep_dres(Tensor copy) const;
    /// A norm's output of all rows for weight gradients, unless it was kept.
    void restore(const StreamNorm& of) const;
    /// dy of a product in fp8 on a GPU, rounded in one pass for both gradients that read it; there
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
    /// Where a gradient goes that comes with the inputs'.
    GradientSink early_sink(int parameter) const;
    /// Adds dy's gradient to dres. `of` is the norm; w, b: its parameters; bias: the bias of the
    /// product whose output the norm's x has been added to.
    void norm_gradients(const StreamNorm& of, int w, int b, int bias) const;
    /// In the second half: what the first one kept.
    void add_early_gradients() const;

  private:
    TensorGroup& tensor() const { return block.residual.tensor(); }
    void add_weight_gradient(int weight, int bias, Tensor x, Tensor dy, const Fp8Matrix& rounded,
                             const Fp8Matrix& rounded_dy) const;

    std::vector<EarlyGradient> early_;  // what is kept
};

}  // namespace train_gpt
