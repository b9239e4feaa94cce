// Fingerprints of what a run has: of each tensor's gradient sums, masters and optimizer's slots,
// and of the tokens that a step has read. They depend on the values alone, not on how ranks along
// the data axis share the tensors, on ZeRO's stage or on buckets. Tensor-parallel ranks add up the
// fingerprints of their parts.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/fingerprint.h"
#include "model/token_batch.h"
#include "parallel/state/parameters.h"
#include "parallel/world.h"

namespace train_gpt {

class Fingerprints {
  public:
    /// names: of all of the model's tensors, by Parameter::id. Takes no memory if they are not
    /// `wanted`, and then has none.
    Fingerprints(const ParameterStore& parameters, const BatchShape& batch, Arena& arena,
                 std::vector<std::string> names, bool wanted);

    struct OfTensor {
        std::string name;
        std::vector<uint64_t> hashes;  // by kind
    };
    struct OfStep {
        uint64_t input = 0;
        std::vector<OfTensor> tensors;
        /// Where ranks hold copies of the same masters or slots that differ: a sentence without its
        /// end, the same on all ranks. Empty: all copies are equal.
        std::string differing_copies = {};
    };
    /// A step's tokens and targets, of each micro-batch after the step's begin. micro_batch: its
    /// number among the micro-batches of all ranks.
    void begin_step(Stream& stream);
    void add_input(Stream& stream, const TokenBatch& batch, int64_t micro_batch);

    /// "gradient", "master", then the optimizer's slots.
    const std::vector<std::string>& kinds() const { return kinds_; }
    /// The fingerprints of all tensors, in the order of the registry: of their state after the last
    /// update, and of the gradient sums that it read. All ranks call it between two steps; it waits
    /// for the device.
    OfStep take(Stream& stream, const World& world) const;

  private:
    void make_segments(const ParameterStore& parameters);
    size_t hashes_of_tensors() const { return names_.size() * kinds_.size(); }
    std::string compare_copies(const World& world, const std::vector<uint64_t>& of_all,
                               const std::vector<uint64_t>& of_this_rank) const;

    std::vector<std::string> names_, kinds_;
    std::vector<FingerprintSegment> segments_;
    // This rank's sums, in the device's memory. sums_ [tensors, kinds]: of the elements that this
    // rank holds first. copies_ [tensors, kinds]: of its copies of elements that an earlier rank
    // holds. input_ [1]: of the input.
    uint64_t *sums_ = nullptr, *copies_ = nullptr, *input_ = nullptr;
    std::vector<int64_t> held_, copied_;  // elements of this rank, by tensor
    BatchShape batch_;
    bool adds_input_ = false;  // true for one of the ranks that read the same tokens
};

}  // namespace train_gpt
