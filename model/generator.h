// A TokenGenerator that caches the keys and values of all earlier tokens.
//
// Its tokens come in chunks, not in a TokenBatch (token_batch.h). A chunk has any number of rows,
// up to the most, and a DeviceBatch copies whole batches. The rows may be parts of several texts
// that begin at any position, and only some rows have targets.
#pragma once
#include <cstdint>
#include <functional>
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
    void feed(Stream& stream, std::span<const int32_t> tokens) override;
    std::span<const float> logits() const override {
        return {host_logits_.as<float>(), static_cast<size_t>(spec_.vocab_size)};
    }
    /// Appends at least one token, as feed() does, without logits.
    void prefill(Stream& stream, std::span<const int32_t> tokens) { take(stream, tokens); }
    /// Functions that get what watch() computes.
    struct Watcher {
        /// After each block, with its activations of the tokens and its output [tokens, C]. q and k
        /// are in `qkv`, normalised and rotated. Activations and output are valid only during the
        /// call.
        std::function<void(Stream&, int layer, const Block&, Tensor out)> block;
        /// With the logits after each token, in the order of the tokens.
        std::function<void(std::span<const float>)> logits;
    };
    /// Appends at least one token, as feed() does, and shows what is computed.
    void watch(Stream& stream, std::span<const int32_t> tokens, const Watcher& watcher);
    /// Whether a token was what the model expected.
    struct Score {
        float nats = 0;  // −log p of the token
        /// No token had a higher probability, and no token with a lower number an equal one.
        bool likeliest = false;
    };
    /// Tokens that could follow, the last targets.size() of which are followed by `targets`.
    struct Continuation {
        std::span<const int32_t> tokens, targets;
        std::span<Score> scores;  // of the targets
    };
    /// Scores continuations of the tokens that feed() has taken; none of them sees another one.
    /// They go through the model together, as far as they fit into a chunk. Computes `likeliest`
    /// only if asked to. The generator's tokens stay what they are; logits() are not valid
    /// afterwards.
    void score(Stream& stream, std::span<const Continuation> continuations, bool with_likeliest);
    const DecoderSpec& spec() const { return spec_; }
    size_t scratch_bytes(const Stream& stream) const override;

  private:
    /// Keys (part 0) or values (1) of a layer: [1, n_ctx, H_kv, D].
    Tensor cache(int layer, int part) const;
    /// Rows of a chunk that follow each other in a text, the first of which is at a position.
    struct Segment {
        int first_row = 0, rows = 0, position = 0;
    };
    /// A row of a chunk whose next token is scored.
    struct ScoredRow {
        int row = 0;
        int32_t target = 0;
        Score* score = nullptr;
    };
    void attend(Stream& stream, int layer, const Block& block, std::span<const Segment> segments);
    /// Appends tokens. Returns the activations of the last chunk after the last block.
    Tensor take(Stream& stream, std::span<const int32_t> tokens, const Watcher* watcher = nullptr);
    /// Computes a chunk of tokens. Returns the activations after the last block.
    Tensor compute(Stream& stream, std::span<const int32_t> tokens,
                   std::span<const Segment> segments, const Watcher* watcher = nullptr);
    /// out = the final norm of x.
    void final_norm(Stream& stream, Tensor x, Tensor out);
    void compute_logits(Stream& stream, Tensor normed);
    void score_rows(Stream& stream, Tensor x, std::span<const ScoredRow> rows, bool with_likeliest);
    void score_normed(Stream& stream, std::span<const ScoredRow> rows, bool with_likeliest);
    AttentionShape attention_shape(const LayerSpec& layer, int T, int position) const;

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
    Tensor shifts_, host_shifts_;  // [chunk], of segments: each row's number less its position
    Tensor targets_, losses_, host_targets_, host_losses_;  // [scored_rows]
    int chunk_ = 0, position_ = 0;
};

}  // namespace train_gpt
