// A TokenGenerator that computes whole forward passes of a Stage and caches nothing. Where weights are
// split over ranks, these all call it with the same tokens and get the same logits.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.h"
#include "model/stage.h"
#include "model/token_generator.h"

namespace train_gpt {

class PassGenerator final : public TokenGenerator {
  public:
    /// `stage` is a whole model, in whose first slot the passes run. Takes a batch from the arena.
    PassGenerator(Stage& stage, Arena& arena);

    /// The stage's sequences are shorter than the model's context if a run trains on shorter ones.
    int context() const override { return stage_.sequence_length(); }
    int64_t vocab_size() const override { return stage_.spec().vocab_size; }
    void reset() override { position_ = 0; }
    int position() const override { return position_; }
    void feed(Stream& stream, std::span<const int32_t> tokens) override;
    std::span<const float> logits() const override {
        return {host_logits_.as<float>(), static_cast<size_t>(vocab_size())};
    }
    size_t scratch_bytes(const Stream& stream) const override {
        return stage_.scratch_bytes(stream);
    }

  private:
    TokenBatch upload(Stream& stream);

    Stage& stage_;
    // A batch whose first sequence begins with the tokens; the rest is zeros.
    Tensor host_tokens_, tokens_, doc_start_, host_logits_, logits_;
    SequencePart part_;  // of context-parallel ranks, instead of tokens_
    int position_ = 0;
};

}  // namespace train_gpt
