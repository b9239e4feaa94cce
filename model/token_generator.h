// Autoregressive inference: takes tokens and gives the logits of the next one.
#pragma once
#include <cstdint>
#include <span>

#include "device/stream.h"

namespace train_gpt {

class TokenGenerator {
  public:
    virtual ~TokenGenerator() = default;

    /// The most tokens that the generator can take.
    virtual int context() const = 0;
    virtual int64_t vocab_size() const = 0;
    /// Forgets all tokens.
    virtual void reset() = 0;
    /// How many tokens the generator has taken.
    virtual int position() const = 0;
    /// Appends at least one token, and computes the logits after the last token. position() +
    /// tokens.size() must not exceed context().
    virtual void feed(Stream& stream, std::span<const int32_t> tokens) = 0;
    /// The logits [V] for the next token. Valid after feed().
    virtual std::span<const float> logits() const = 0;
    virtual size_t scratch_bytes(const Stream& stream) const = 0;
};

}  // namespace train_gpt
