// GPT-2 (Radford et al. 2019) as a composition of kernels: learned positions, pre-LayerNorm blocks,
// tanh-GELU, tied head. The forward and backward passes are written by hand with kernels/*.h;
// weights and gradients belong to a ParameterStore.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/memory.h"
#include "model/block.h"
#include "parallel/parameters.h"

namespace train_gpt {

struct GPTShape {
    int n_layer = 0, n_head = 0, n_embd = 0, n_ctx = 0;
    int64_t vocab_size = 0;

    int head_size() const { return n_embd / n_head; }
    /// Rows of wte in memory: a multiple of 128, for the matrix products. The loss ignores the
    /// padding.
    int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
    /// Training FLOPs per token: 6·N + 6·L·C·T, where N is the number of parameters in matrix
    /// products and causal attention counts half.
    double flops_per_token(int T) const;
};

/// The parameter registry: wte and wpe (unit 0), the blocks (units 1 … n_layer), and ln_f (the
/// last unit). Initial values as in GPT-2: normal(0, 0.02), positions normal(0, 0.01), residual
/// projections scaled by 1/√(2·n_layer), norms 1, biases 0.
std::vector<Parameter> gpt_parameters(const GPTShape& shape);

/// Token ids of a micro-batch on the model's device, each [B, T]; target −1 is ignored.
struct TokenBatch {
    const int32_t *tokens = nullptr, *targets = nullptr,
                  *doc_start = nullptr;  // doc_start null: no document masks
};

struct GPTOptions {
    int B = 1, T = 1;
    Recompute recompute = Recompute::none;
    ParameterStore::Use use = ParameterStore::Use::training;
    bool document_mask = false;  // batches will have doc_start
};

class GPT {
  public:
    /// Takes activations for micro-batches of B·T tokens from the arena. In inference all blocks
    /// share them.
    GPT(const GPTShape& shape, const GPTOptions& options, ParameterStore& parameters, Arena& arena);

    const GPTShape& shape() const { return shape_; }
    const GPTOptions& options() const { return options_; }

    /// Embedding, all blocks, final norm.
    void forward(Stream& stream, const TokenBatch& batch);
    /// Loss per token (nats) of the last forward(): fp32 [B·T], 0 where the target is −1.
    void evaluate_head(Stream& stream, const TokenBatch& batch);
    /// The same, then the backward pass of the head and of everything before it. Gradients of the
    /// *sum* of losses go to the store's sinks.
    void backward(Stream& stream, const TokenBatch& batch);

    const float* losses() const { return losses_.as<float>(); }
    /// The largest scratch memory that any kernel of this model needs.
    size_t scratch_bytes(const Stream& stream) const;

    // The parts, for callers that run them separately (pipelines).
    void embed(Stream& stream, const TokenBatch& batch);
    void forward_blocks(Stream& stream, const TokenBatch& batch, int first, int last);
    void backward_blocks(Stream& stream, const TokenBatch& batch, int first, int last);
    void backward_embedding(Stream& stream, const TokenBatch& batch);

  private:
    AttentionShape attention_shape(const TokenBatch& batch) const;
    void head(Stream& stream, const TokenBatch& batch, bool backward);

    GPTShape shape_;
    GPTOptions options_;
    ParameterStore& parameters_;
    int wte_, wpe_, lnf_w_, lnf_b_;
    std::vector<BlockParameters> block_parameters_;

    std::vector<BlockActivations> blocks_;
    Tensor x_out_;            // after the last block [M, C]
    Tensor lnf_, stats_f_;    // final norm
    Tensor logits_, losses_;  // [chunk, Vp], [M]
    BlockGradients gradients_;
};

}  // namespace train_gpt
