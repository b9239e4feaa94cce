// How fast ranks exchange buckets.
#pragma once
#include <cstdint>

#include "device/device.h"
#include "parallel/communicator.h"

namespace train_gpt {

/// The bytes per second that this rank sends when the group gathers a bucket of so many elements,
/// of up to 2^24. 0: the group has no other rank. All its ranks call it.
double measure_link(Communicator& group, const Device& device, int64_t bucket_elements);

}  // namespace train_gpt
