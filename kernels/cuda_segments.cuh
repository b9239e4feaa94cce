// Kernels over many ranges of tensors, by blocks of norm_block elements. One launch processes many
// segments. Their addresses are passed by value as kernel parameters. Each thread block processes
// one block of elements and finds its segment by its block number.
#pragma once
#include <cstdint>
#include <span>

#include "kernels/adamw.h"
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda {

// The limit on kernel parameters for sm_70 and newer, less 256 bytes for the other parameters.
constexpr size_t max_parameter_bytes = 32764 - 256;

/// As many segments as fit into the kernel parameters, and the number of each one's first thread
/// block.
template <class Segment>
struct Group {
    static constexpr int capacity =
        static_cast<int>(max_parameter_bytes / (sizeof(Segment) + sizeof(unsigned)));

    Segment segments[capacity];
    unsigned first_block[capacity];
    int count = 0;
    unsigned blocks = 0;
};

/// The elements that a thread block works on.
struct Range {
    int segment;
    int64_t first;
    int count;
};

template <class Segment>
__device__ __forceinline__ Range range_of(const Group<Segment>& group, unsigned block) {
    int segment = 0;  // the last one whose first block is not after this block
    for (int beyond = group.count; beyond - segment > 1;) {
        const int middle = (segment + beyond) / 2;
        (group.first_block[middle] <= block ? segment : beyond) = middle;
    }
    const int64_t first = int64_t{block - group.first_block[segment]} * norm_block;
    return {segment, first, static_cast<int>(min(norm_block, group.segments[segment].n - first))};
}

/// Calls launch(group) for all segments, with as many at a time as a group holds. Segments without
/// elements are skipped.
template <class Segment, class F>
void for_each_group(std::span<const Segment> segments, F&& launch) {
    Group<Segment> group;
    for (const Segment& segment : segments) {
        if (segment.n == 0) continue;
        group.segments[group.count] = segment;
        group.first_block[group.count++] = group.blocks;
        group.blocks += static_cast<unsigned>(ceil_div(segment.n, norm_block));
        if (group.count == Group<Segment>::capacity) {
            launch(group);
            group.count = 0;
            group.blocks = 0;
        }
    }
    if (group.count) launch(group);
}

/// How many of the first `count` elements are moved in packs of 4: all whole packs if the addresses
/// allow it, else none.
template <class... T>
__device__ __forceinline__ int packed(int count, const T*... addresses) {
    const bool aligned = ((reinterpret_cast<uintptr_t>(addresses) % (4 * sizeof(T)) == 0) && ...);
    return aligned ? count / 4 * 4 : 0;
}

}  // namespace train_gpt::cuda
