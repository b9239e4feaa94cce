// What an axis adds to the first collectives (parallel/first_collectives.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "device/device.h"
#include "parallel/communicator.h"

namespace train_gpt {

/// The memory that the first collectives exchange, and the stream in which they run.
struct FirstData {
    Stream& stream;
    char* data;
    DType weights;  // of weights and activations

    /// Where this rank's `count` elements are, among those of a group's ranks.
    char* own(const Communicator& group, int64_t count, DType dtype) const {
        return data + group.rank() * count * static_cast<int64_t>(size_of(dtype));
    }
};

/// The groups of an axis, and every operation of a step over these groups.
class FirstUse {
  public:
    virtual ~FirstUse() = default;

    /// How many ranks' shards exchange_shards() has in memory.
    virtual int64_t ranks() const { return 1; }
    /// The memory that exchange_rest() needs.
    virtual size_t bytes() const { return 0; }
    /// Operations whose sizes depend on a bucket's or a micro-batch's: each rank has `shard`
    /// elements.
    virtual void exchange_shards(const FirstData& /*on*/, int64_t /*shard*/) const {}
    /// All other operations, once.
    virtual void exchange_rest(const FirstData& /*on*/) const {}
};

}  // namespace train_gpt
