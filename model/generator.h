// A TokenGenerator that caches the keys and values of all earlier tokens.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "model/block.h"
#include "model/registry.h"
#include "model/rotary_table.h"
#include "model/spec.h"
#include "model/token_generator.h"

namespace train_gpt {

class Generator final : public TokenGenerator {
  public:
    /// Takes from the arena the cache [n_layer, 2, n_ctx, H_kv·D] and the activations for `chunk`
    /// tokens at a time.
    Generator(const DecoderSpec& spec, const Registry& registry, ParameterStore& parameters,
              Arena& arena);

    int context() const override { return spec_.n_ctx; }
    int64_t vocab_size() const override { return spec_.vocab_size; }
    void reset() override { position_ = 0; }
    int position() const override { return position_; }
    void feed(Stream& stream, std::span<const int32_t> tokens) override;
    std::span<const float> logits() const override {
        return {host_logits_.as<float>(), static_cast<size_t>(spec_.vocab_size)};
    }
    const DecoderSpec& spec() const { return spec_; }
    size_t scratch_bytes(const Stream& stream) const override;

  private:
    /// Keys (part 0) or values (1) of a layer: [1, n_ctx, H_kv, D].
    Tensor cache(int layer, int part) const;
    void attend(Stream& stream, int layer, const Block& block);
    void feed_chunk(Stream& stream, std::span<const int32_t> tokens, bool with_logits);
    AttentionShape attention_shape(const LayerSpec& layer, int T) const;

    DecoderSpec spec_;
    Registry registry_;
    ParameterStore& parameters_;
    TensorGroup alone_;
    RotaryTable rotary_;
    ResidualStream residual_;
    std::vector<Tensor> caches_;    // of each layer: keys, then values [2·n_ctx, H_kv·D]
    BlockActivations activations_;  // [chunk, …]
    Tensor x_next_, final_norm_, tokens_, logits_, logits_scratch_;
    Tensor host_tokens_, host_logits_;
    int chunk_ = 0, position_ = 0;
};

}  // namespace train_gpt
