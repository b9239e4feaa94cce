// A range of a decoder's layers with what stands before and after them: the embedding if the range
// begins the model; the final norm, head and loss if it ends it. A model on one device is a single
// stage. Forward and backward passes are written by hand with kernels/*.h; weights and gradients
// belong to a ParameterStore.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "model/block.h"
#include "model/block_inputs.h"
#include "model/context_attention.h"
#include "model/registry.h"
#include "model/rotary_table.h"
#include "model/spec.h"
#include "model/token_batch.h"
#include "parallel/state/parameters.h"

namespace train_gpt {

struct StageOptions {
    int B = 1, T = 1;  // sequences, and the tokens that the rank has of each
    /// Micro-batches whose activations are held at the same time.
    int slots = 1;
    Recompute recompute = Recompute::none;
    bool inputs_on_host = false;  // of blocks, in training (block_inputs.h)
    ParameterStore::Use use = ParameterStore::Use::training;
    bool document_mask = false;  // batches will have doc_start
    float z_loss = 0;            // see head_loss.h
    /// backward_inputs() and backward_weights() will be called apart. Each slot then also keeps
    /// what backward_weights() reads: the inputs of the linear layers and the gradients of their
    /// outputs.
    bool backward_apart = false;
    /// In training of a model with experts, where its routers count; and their losses.
    RouterCounts* routers = nullptr;
    RouterLosses router_losses = {};
    const Fp8Scales* fp8 = nullptr;  // of training passes; null: no product is in fp8
    /// The ranks that share the stage's products; null: this rank alone.
    TensorGroup* tensor = nullptr;
    /// The ranks that share the stage's sequences; null: this rank alone.
    ContextGroup* context = nullptr;
};

/// The head computes the logits of so many rows at a time: the rows in as few chunks as the memory
/// for logits allows. vocabulary: rows of the head in this rank's memory.
int64_t logits_rows(const Device& device, int64_t rows, int64_t vocabulary, DType dtype);

/// Work for micro-batches may be called in any order that computes what it needs first: forward(),
/// then backward() or backward_inputs() and some time later backward_weights(), of the same slot.
/// The gradients of a step are sums over its micro-batches. M = B·T. Tensor-parallel ranks call the
/// same methods for the same micro-batches; each then has the losses of all tokens, and `in`,
/// `out`, `dout` and `din` are of its rows [M / ranks, C]. Context-parallel ranks also call the
/// same methods, each with its part of the batches, and have the losses of its tokens.
class Stage {
  public:
    /// Takes activations for micro-batches of B·T tokens from the arena. In inference all blocks
    /// share them. `registry`: of the store's parameters, cut to this rank's part by
    /// registry_held_by(). Throws Error where tensor-parallel ranks cannot share the model, or the
    /// rows.
    Stage(const DecoderSpec& spec, const Registry& registry, const StageOptions& options,
          ParameterStore& parameters, Arena& arena);

    const DecoderSpec& spec() const { return spec_; }
    const StageOptions& options() const { return options_; }
    ContextGroup& context() const { return context_; }
    /// The tokens that all context-parallel ranks together have of each sequence.
    int sequence_length() const { return options_.T * context_.size(); }
    DType dtype() const { return parameters_.dtype(); }

    /// Embedding of batch.tokens, or `in` [M, C] if the stage does not begin the model; blocks; the
    /// final norm, or out [M, C] if the stage does not end the model. What a backward pass needs in
    /// host memory goes there only if one follows.
    void forward(Stream& stream, int slot, const TokenBatch& batch, Tensor in = {}, Tensor out = {},
                 bool backward_follows = true);
    /// Loss per token (nats) of a forward pass: fp32 [M], 0 where the target is −1. Only in a stage
    /// that ends the model.
    void evaluate_head(Stream& stream, int slot, const TokenBatch& batch);

    /// The backward pass. In a stage that ends the model, computes the losses as evaluate_head()
    /// does and starts from their sum; in others, starts from `dout` [M, C]. Gradients of weights
    /// go to the store's sinks. If the stage does not begin the model, din [M, C] receives the
    /// gradient of the stage's input.
    void backward(Stream& stream, int slot, const TokenBatch& batch, Tensor dout = {},
                  Tensor din = {});
    /// The two halves of backward(), with the option backward_apart. The first half also computes
    /// the weight gradients of the head and of norms.
    void backward_inputs(Stream& stream, int slot, const TokenBatch& batch, Tensor dout = {},
                         Tensor din = {});
    void backward_weights(Stream& stream, int slot, const TokenBatch& batch);

    /// For a rank with one micro-batch fewer than other ranks, instead of a pass: takes part in
    /// what the ranks that split the state exchange in the pass.
    void skip_forward(Stream& stream);
    void skip_backward(Stream& stream, Backward part);

    /// The logits of the token after a position of a forward pass, which counts over all sequences
    /// of the batch. Only in a stage that ends the model. out: fp32 [1, padded_vocabulary_of_all()]
    /// in the device's memory; entries past vocab_size are padding.
    void next_token_logits(Stream& stream, int slot, int64_t position, Tensor out);
    int64_t padded_vocabulary_of_all() const { return tensor_.size() * padded_vocabulary(); }

    /// The losses of the last evaluate_head() or backward pass.
    const float* losses() const { return losses_.as<float>(); }
    /// The largest scratch memory that any kernel of this stage needs.
    size_t scratch_bytes(const Stream& stream) const;

  private:
    /// What a micro-batch keeps from its forward to its backward pass.
    struct Slot {
        std::vector<BlockActivations> blocks;
        std::vector<BlockGradients> gradients;  // of each block
        Tensor out;                             // of the last block, if the stage ends the model
        Tensor final_norm, final_stats;
        Tensor dembedding;  // of the embedding's output, if the halves are called apart
    };

    Slot& slot(int i) { return slots_[static_cast<size_t>(i)]; }
    int layers() const { return static_cast<int>(registry_.blocks.size()); }
    /// Whether this part of a backward pass completes the gradients of a unit.
    bool completes(Backward part, int unit) const;
    /// Whether a unit is a layer's experts alone.
    bool is_of_experts(int unit) const;
    /// What this rank computes of the stage's layer l.
    LayerSpec layer(int l) const { return part_.layer(registry_.first_layer + l); }
    bool is_training() const { return options_.use == ParameterStore::Use::training; }
    AttentionShape attention_shape(const LayerSpec& layer, const TokenBatch& batch) const;
    ExpertUnit experts_of(int l, Weights::For use);
    Routing routing_of(int l, const TokenBatch& batch) const;
    Block block(Stream& stream, const UnitLease& weights, const Slot& slot, int l,
                const TokenBatch& batch);
    void take_activations(Arena& arena);
    void take_head(Arena& arena);
    void take_gradients(Arena& arena);
    Tensor take_rounded_gradient(Arena& arena) const;
    int64_t tokens() const { return int64_t{options_.B} * options_.T; }
    /// The rows of the vocabulary that this rank has, and how many there are in memory.
    Range vocabulary(int parameter) const;
    int64_t padded_vocabulary() const;
    void embed(Stream& stream, Tensor out, const TokenBatch& batch);
    StreamNorm final_norm_of(const Slot& slot, const UnitLease& weights) const;
    void final_norm(Stream& stream, const Slot& slot, const Addends& input);
    void head(Stream& stream, const Slot& slot, const TokenBatch& batch, bool backward);
    void backward_head(Stream& stream, const Slot& slot, const TokenBatch& batch);
    void backward_from_end(Stream& stream, int slot, const TokenBatch& batch, Tensor dout,
                           Backward part);
    void backward_blocks(Stream& stream, int slot, const TokenBatch& batch, Backward part);
    void backward_embedding(Stream& stream, Tensor dout, const TokenBatch& batch);

    DecoderSpec spec_, part_;  // of all tensor-parallel ranks, and of this one
    Registry registry_;
    StageOptions options_;
    ParameterStore& parameters_;
    TensorGroup alone_;
    TensorGroup& tensor_;
    ContextGroup alone_with_sequences_;
    ContextGroup& context_;

    std::vector<Slot> slots_;
    std::optional<BlockInputs> inputs_;  // in training
    RotaryTable rotary_;
    ResidualStream residual_;
    std::optional<ContextAttention> context_attention_;
    Tensor counts_of_ranks_;  // of experts, among context-parallel ranks
    Tensor logits_, losses_;  // [chunk, Vp], [M]
    Tensor dres_, dy_;  // [M / ranks, C]: gradients of the residual stream, and temporary ones
    // Among tensor-parallel ranks: statistics of the head's rows [chunk, 3], this rank's and all
    // ranks'.
    Tensor stats_, all_stats_;
};

}  // namespace train_gpt
