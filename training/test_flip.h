// For tests of fingerprints and replays: a bit of a rank's state that flips, as in faulty memory.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "device/stream.h"
#include "model/token_batch.h"
#include "parallel/state/parameters.h"

namespace train_gpt {

/// The variable TRAIN_GPT_TEST_FLIP=KIND:TENSOR:ELEMENT:STEP flips a bit of one element of a tensor
/// on the ranks that hold it, with :RANK after it only on that rank: of a gradient's sum before the
/// step's update, of a master or an optimizer's slot after it. With KIND input it is one of the
/// step's tokens, of each micro-batch that a rank has; TENSOR is then empty.
class TestFlip {
  public:
    /// Nothing if the variable is not set. Throws Error for a text that it does not understand.
    static std::optional<TestFlip> from_environment(int rank);

    /// When a micro-batch of a step is on the device.
    void loaded(const Device& device, const TokenBatch& batch, int64_t step) const;
    /// Before and after the update of a step, which counts from 1.
    void before_update(ParameterStore& parameters, int64_t step) const;
    void after_update(ParameterStore& parameters, int64_t step) const;

  private:
    void flip(ParameterStore& parameters) const;

    std::string kind_, tensor_;
    int64_t element_ = 0, step_ = 0;
    bool here_ = true;
};

}  // namespace train_gpt
