// How fast ranks exchange buckets.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/device.h"
#include "parallel/communicator.h"

namespace train_gpt {

/// The bytes per second that this rank sends when the group gathers `count` elements of each rank.
/// 0: the group has no other rank. All ranks of the group call it.
double measure_link(Communicator& group, const Device& device, int64_t count, DType dtype);

}  // namespace train_gpt
