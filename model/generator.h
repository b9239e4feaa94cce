// A TokenGenerator that caches the keys and values of all earlier tokens.
#pragma once
#include <cassert>
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
    struct Options {
        int context = 0;      // the most tokens; 0: the model's n_ctx
        int chunk = 64;       // tokens of a prompt that go through the model together
        int scored_rows = 0;  // tokens whose losses are computed together; 0: score() is not called
    };
    /// Takes from the arena the cache [n_layer, 2, context, H_kv·D] and the activations for `chunk`
    /// tokens at a time.
    Generator(const DecoderSpec& spec, const Registry& registry, ParameterStore& parameters,
              Arena& arena, const Options& options);
    Generator(const DecoderSpec& spec, const Registry& registry, ParameterStore& parameters,
              Arena& arena)
        : Generator(spec, registry, parameters, arena, Options()) {}

    int context() const override { return spec_.n_ctx; }
    int64_t vocab_size() const override { return spec_.vocab_size; }
    void reset() override { position_ = 0; }
    int position() const override { return position_; }
    /// Forgets all tokens but the first `position`.
    void rewind(int position) {
        assert(0 <= position && position <= position_);
        position_ = position;
    }
    void feed(Stream& stream, std::span<const int32_t> tokens) override;
    std::span<const float> logits() const override {
        return {host_logits_.as<float>(), static_cast<size_t>(spec_.vocab_size)};
    }
    /// Whether a token was what the model expected.
    struct Score {
        float nats = 0;  // −log p of the token
        bool likeliest =
            false;  // no token had a higher probability, and none before it an equal one
    };
    /// Appends tokens, as feed() does. The last targets.size() of them are followed by `targets`:
    /// scores[i] is the score of targets[i]. Computes `likeliest` only if asked to. logits() are
    /// not valid afterwards.
    void score(Stream& stream, std::span<const int32_t> tokens, std::span<const int32_t> targets,
               std::span<Score> scores, bool with_likeliest);
    const DecoderSpec& spec() const { return spec_; }
    size_t scratch_bytes(const Stream& stream) const override;

  private:
    /// Keys (part 0) or values (1) of a layer: [1, n_ctx, H_kv, D].
    Tensor cache(int layer, int part) const;
    void attend(Stream& stream, int layer, const Block& block);
    /// Appends a chunk of tokens. Returns the activations after the last block.
    Tensor feed_chunk(Stream& stream, std::span<const int32_t> tokens);
    /// The final norm of a few rows of x, in memory that all rows share.
    Tensor final_norm(Stream& stream, Tensor x);
    void compute_logits(Stream& stream, Tensor normed);
    void score_rows(Stream& stream, Tensor x, std::span<const int32_t> targets,
                    std::span<Score> scores, bool with_likeliest);
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
    Tensor targets_, losses_, host_targets_, host_losses_;  // [scored_rows]
    int chunk_ = 0, position_ = 0;
};

}  // namespace train_gpt
