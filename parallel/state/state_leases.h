// Masters and optimizer slots that are in host memory (Sharding::state_on_host), leased to the GPU:
// a bucket's come into device memory, are updated there, and go back, while the buckets before and
// after it are on their way. Without state_on_host everything is where it is updated, and nothing
// is copied.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

class StateLeases {
  public:
    /// What an update needs of a bucket at the same time. An optimizer of whole matrices reads and
    /// writes the first slot of all matrices (their momentum) before it updates any element.
    enum class Part : uint8_t {
        momentum,  // the first slot of matrices
        elements,  // masters, and the slots of what is not a matrix
    };

    /// Takes device memory for two leases, which take turns. `buffers` must live longer.
    StateLeases(Arena& arena, const ParameterBuffers& buffers);

    /// A piece as an update finds it: with the device's addresses of its master and its slots.
    /// These addresses hold the piece's state between acquire() and release() of a part of the
    /// piece's bucket: the part that the master or slot belongs to.
    ParameterBuffers::Piece leased(const ParameterBuffers::Piece& piece) const;

    /// Begins to fetch what the first two leases of an update need, beside the step's other work.
    /// Until that update nothing else may write state.
    void begin_step();
    /// Between acquire() and release(), later work of the stream finds the part of the bucket's
    /// state at the addresses of leased(), and may change it. An update leases all buckets of
    /// `momentum`, if there are matrices, then all of `elements`, each in order.
    void acquire(Stream& stream, Part part, size_t bucket);
    void release(Stream& stream, Part part, size_t bucket);
    /// Makes later work of the stream wait until all that was released is in host memory.
    void settle(Stream& stream) const;

    /// Bytes that an update moves in each direction.
    int64_t bytes() const { return bytes_; }

  private:
    /// Memory that is copied at once.
    struct ByteRun {
        std::byte *on_host = nullptr, *leased = nullptr;
        size_t bytes = 0;
    };
    struct Lease {
        Part part = Part::elements;
        size_t bucket = 0;
        std::vector<ByteRun> runs;
    };

    static constexpr size_t turns = 2, none = SIZE_MAX;

    bool is_copied() const { return buffers_.sharding().state_on_host; }
    void find_leases();
    void place(std::byte* const (&memory)[turns]);
    /// The lease of a part of a bucket; none if nothing of it is in host memory.
    size_t lease_of(Part part, size_t bucket) const;
    void fetch(size_t lease);

    const ParameterBuffers& buffers_;
    size_t states_;  // masters and slots
    std::vector<Lease> leases_;
    std::vector<size_t> lease_of_bucket_[2];
    int64_t bytes_ = 0, largest_[turns] = {};
    std::vector<std::byte*> places_;  // [pieces, states]; null: where the buffers have it
    Stream in_, out_;
    Event used_;
    Event free_[turns];                     // what was in the memory of a turn has been written
    std::vector<Event> fetched_, written_;  // of each lease
    size_t next_ = 0;                       // the first lease of this step that is not fetched
};

}  // namespace train_gpt
