// A TokenGenerator that computes whole forward passes of a model and caches nothing. If ranks split
// the weights, all of them call it with the same tokens and get the same logits.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.h"
#include "model/pipeline.h"
#include "model/token_generator.h"

namespace train_gpt {

class PassGenerator final : public TokenGenerator {
  public:
    /// `model` must live longer. The passes use the first slots of its stages. Takes memory for a
    /// batch from the arena.
    PassGenerator(const Pipeline& model, Arena& arena);

    /// The length of the run's sequences, which may be shorter than the model's context.
    int context() const override { return model_.sequence_length(); }
    int64_t vocab_size() const override { return model_.spec().vocab_size; }
    void reset() override { position_ = 0; }
    int position() const override { return position_; }
    void feed(Stream& stream, std::span<const int32_t> tokens) override;
    std::span<const float> logits() const override {
        return {host_logits_.as<float>(), static_cast<size_t>(vocab_size())};
    }
    size_t scratch_bytes(const Stream& stream) const override {
        return model_.scratch_bytes(stream);
    }

  private:
    const Pipeline& model_;
    // A batch of one document each, whose first sequence begins with the tokens; the rest is zeros.
    Tensor tokens_, doc_start_;
    DeviceBatch batch_;
    Tensor host_logits_, logits_;
    int position_ = 0;
};

}  // namespace train_gpt
