// A copy of this rank's masters and optimizer slots in host memory. A checkpoint is written from it
// while training continues.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

class StateCopy {
  public:
    /// Other memory that is copied with the state.
    struct Other {
        const void* from = nullptr;
        size_t bytes = 0;
    };

    /// Takes host memory for all that ParameterState::saved() lists, and for `others`. `buffers`
    /// must live longer. The memory of `others` must be on the device of the arena.
    StateCopy(Arena& arena, const ParameterBuffers& buffers, const std::vector<Other>& others);

    /// Writes to each page of a CPU's memory until `ends`, so that the system provides the pages
    /// and the first copy does not wait for that. A GPU's host memory has all pages. Any thread may
    /// call it, before begin().
    void touch(const std::atomic<bool>& ends);
    /// Copies the state as it is after the work submitted to `compute` so far: on a GPU later and
    /// on a stream of its own, on a CPU at once. The copy before must be complete.
    void begin(Stream& compute);
    /// Makes later work of `compute` wait until the copy has read a bucket, or all of the others.
    /// An update of the bucket follows.
    void hold_bucket(Stream& compute, size_t bucket) const { read_[1 + bucket].hold(compute); }
    void hold_others(Stream& compute) const { read_[0].hold(compute); }
    void hold_all(Stream& compute) const { read_.back().hold(compute); }
    /// Waits until the copy is complete. Any thread may call it and what follows.
    void wait() const { read_.back().wait(); }

    /// The first n elements of a piece of a state, as ParameterState::host_view() gives them.
    std::span<const std::byte> view(const ParameterBuffers::Piece& piece, std::string_view state,
                                    int64_t n) const;
    /// The copy of others[i]; null if it has no bytes.
    const void* other(size_t i) const { return others_[i]; }

  private:
    /// Memory that is copied at once.
    struct ByteRun {
        const std::byte* from = nullptr;
        std::byte* to = nullptr;
        size_t bytes = 0;
    };

    static void copy_run(Stream& stream, const ByteRun& run);

    const ParameterBuffers& buffers_;
    Stream copies_;
    std::vector<std::vector<ByteRun>> runs_;  // of the others, then of each bucket
    std::vector<const void*> others_;
    std::vector<Event> read_;  // as runs_
    Event submitted_;
    size_t states_;                         // masters and slots
    std::vector<const std::byte*> places_;  // [pieces, states]; null: the piece has no such slot
};

}  // namespace train_gpt
