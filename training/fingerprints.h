// Fingerprints of what a run has: of each tensor's gradient sums, masters and optimizer's slots.
// They depend on the values alone, not on how ranks share the tensors: of ranks along the data
// axis, ZeRO's stage and buckets. Tensor-parallel ranks add up those of their parts.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/fingerprint.h"
#include "parallel/state/parameters.h"
#include "parallel/world.h"

namespace train_gpt {

class Fingerprints {
  public:
    /// names: of all of the model's tensors, by Parameter::id. Takes no memory if they are not
    /// `wanted`, and then has none.
    Fingerprints(const ParameterStore& parameters, Arena& arena, std::vector<std::string> names,
                 bool wanted);

    struct OfTensor {
        std::string name;
        std::vector<uint64_t> hashes;  // by kind
    };
    /// "gradient", "master", then the optimizer's slots.
    const std::vector<std::string>& kinds() const { return kinds_; }
    /// Of all tensors, in the order of the registry: the state after the last update, and the
    /// gradient sums that it read. All ranks call it between two steps; it waits for the device.
    std::vector<OfTensor> take(Stream& stream, const World& world) const;

  private:
    void make_segments(const ParameterStore& parameters);

    std::vector<std::string> names_, kinds_;
    std::vector<FingerprintSegment> segments_;
    uint64_t* sums_ = nullptr;  // [tensors, kinds] of this rank, in the device's memory
};

}  // namespace train_gpt
