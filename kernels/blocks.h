// Loops over the blocks of norm_block elements of many tensors (adamw.h, exact_sums.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include <omp.h>

#include "kernels/adamw.h"

namespace train_gpt {

/// Calls work(segment, first, count) for all blocks of norm_block elements of all segments. Each
/// thread takes one contiguous range of the blocks, counted over all segments, so that small
/// tensors do not leave threads idle.
template <class Segment, class F>
void for_each_block(std::span<const Segment> segments, F&& work) {
    int64_t total = 0;
    for (const Segment& segment : segments) total += (segment.n + norm_block - 1) / norm_block;

#pragma omp parallel
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t end = total * (thread + 1) / threads;
        int64_t block = total * thread / threads, passed = 0;
        for (const Segment& segment : segments) {
            const int64_t blocks = (segment.n + norm_block - 1) / norm_block;
            for (; block < std::min(end, passed + blocks); ++block) {
                const int64_t first = (block - passed) * norm_block;
                work(segment, first, std::min(norm_block, segment.n - first));
            }
            passed += blocks;
        }
    }
}

}  // namespace train_gpt
