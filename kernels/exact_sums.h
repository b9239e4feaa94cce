// Sums of gradients that are the same in whatever order they are added. A micro-batch's gradient is
// rounded to multiples of a power of two, its grid, and added as integers. Each block of norm_block
// elements of a tensor has a grid; it follows from the sums of the block's largest elements, which
// are integers, too.
//
//   E           exponent of a block's grid, 2^E; −120 ≤ E ≤ 120
//   q = ⌊g / 2^E⌉   a gradient's element, rounded to nearest, ties to even
//   S           Σ over micro-batches of min(⌈max |g| / 2^E⌉, 2^40), so Σ |q| ≤ S
//
// A sum fits into int32 if S < 2^31. Whether it does depends on the step's micro-batches alone, not
// on how they are distributed over ranks.
#pragma once
#include <cstdint>
#include <span>

#include "device/stream.h"
#include "kernels/adamw.h"

namespace train_gpt {

/// A range of one tensor, which begins at a multiple of norm_block of the tensor. [blocks] stands
/// for ⌈n / norm_block⌉.
struct ExactSegment {
    const float* gradient = nullptr;  // of a micro-batch [n]
    int32_t* sums = nullptr;          // [n]; if nothing is added to, they may be in its place
    int64_t n = 0;
    const int32_t* exponents = nullptr;  // E [blocks]
    int64_t* maxima = nullptr;           // S [blocks]; each call adds to them
    int64_t* not_finite = nullptr;  // of the tensor: each call adds the blocks with NaN or ±∞
    // The least number of a call with such blocks, and this call's number.
    int64_t *first_not_finite = nullptr, number = 0;
    int64_t* lost = nullptr;  // each call adds the elements with g ≠ 0 and q = 0
    bool accumulate = false;  // sums are added to, instead of overwritten
};
/// sums = q, or sums + q modulo 2^32. q of an element that is not finite is undefined, and so are
/// the sums of a block with S ≥ 2^31. One pass over memory.
void round_and_add(Stream& stream, std::span<const ExactSegment> segments);

/// What a kernel that computes few rows of a tensor with one grid needs (GradientSink::exact). It
/// rounds each row when the row is complete, and adds it to the sums.
struct ExactRows {
    const int32_t* exponent = nullptr;  // E
    /// The bits of the largest |g|. The kernel replaces them by the bits of a larger one.
    uint32_t* largest = nullptr;
    bool looks_only = false;  // the kernel finds the largest |g|, and leaves the sums as they are
};
/// After such a kernel: S of each of the tensor's `blocks` blocks grows by min(⌈g / 2^E⌉, 2^40)
/// with the largest g; if g is not finite, not_finite grows by 1, and first_not_finite is this
/// call's number if that is less. `largest` becomes 0.
struct LargestRow {
    uint32_t* largest = nullptr;
    const int32_t* exponent = nullptr;
    int64_t* maxima = nullptr;
    int64_t blocks = 0;
    int64_t* not_finite = nullptr;
    int64_t *first_not_finite = nullptr, number = 0;
};
void count_largest(Stream& stream, const LargestRow& row);

/// sums[i] = added[i], or sums[i] + added[i] modulo 2^32 if `accumulate`, for i < n.
void add_integers(Stream& stream, int32_t* sums, const int32_t* added, int64_t n, bool accumulate);

/// A range as in ExactSegment: largest[block] becomes the maximum of what it was and the block's
/// |g|. Only for finite gradients.
struct LargestSegment {
    const float* gradient = nullptr;
    int64_t n = 0;
    float* largest = nullptr;  // [blocks]
};
void block_maxima(Stream& stream, std::span<const LargestSegment> segments);

/// The grids of a tensor. Functions that take several get all of a model's, one after the other.
struct TensorGrids {
    int64_t first = 0, blocks = 0;  // among all blocks of the model
    bool one_grid = false;          // for all blocks, as for a vocabulary, whose rows are rare
};

/// How many bits the sums of a step of so many contributions keep free, so that larger gradients in
/// a later step still fit: 6 up to 16 contributions, one less for each doubling, 2 at least. (Σ |g|
/// grows like the number of contributions, |Σ g| like its root.)
int headroom_bits(int64_t contributions);

/// The first grids: so that `contributions` times largest[block] leaves so much headroom, but at
/// most 4 bits finer than the tensor's coarsest (grid_of_block()). A block without gradient takes
/// its tensor's coarsest grid, and a tensor without gradient the coarsest of all. If there is no
/// gradient at all, E = 0.
void first_grids(Stream& stream, int32_t* exponents, const float* largest,
                 std::span<const TensorGrids> tensors, int64_t contributions);

/// overflow becomes 1 if S ≥ 2^31 in any of `blocks` blocks; else it stays as it is.
void find_overflow(Stream& stream, int32_t* overflow, const int64_t* maxima, int64_t blocks);

/// Grids for the next step from the sums S of all ranks in this one. A block's grid becomes coarser
/// by as many bits as its headroom lacks, or finer by one bit, unless there was an overflow. Where
/// S = 0, the block keeps its grid. No grid is more than 4 bits finer than the tensor's coarsest.
/// If `stale` is not 0, nothing changes: an earlier step has overflowed, and this one will be
/// computed again.
struct GridUpdate {
    int32_t* exponents = nullptr;
    const int64_t* maxima = nullptr;
    std::span<const TensorGrids> tensors = {};
    int64_t contributions = 1;
    const int32_t *overflow = nullptr, *stale = nullptr;
};
void update_grids(Stream& stream, const GridUpdate& args);

/// A range as in ExactSegment, whose sum of squares is added to its tensor's.
struct ExactNormSegment {
    const int32_t* sums = nullptr;
    int64_t n = 0;
    const int32_t* exponents = nullptr;
    const int32_t* scale = nullptr;  // F: norm_scales()
    int64_t* total = nullptr;        // of the tensor
};
/// scales[t] = F, so that a tensor's sum of squares in units of 2^F is less than 2^62:
/// F = 2·max E + 12 + ⌈log₂ blocks⌉.
void norm_scales(Stream& stream, int32_t* scales, const int32_t* exponents,
                 std::span<const TensorGrids> tensors);
/// total += ⌊Σ (sums·2^E)² / 2^F⌉ of each block; the block's sum is in fp32 lanes and then double.
/// Integers: the order of blocks does not matter. The order within a block, and so the last bits,
/// depends on whether `sums` is at a multiple of 16 bytes.
void exact_norm(Stream& stream, std::span<const ExactNormSegment> segments);
/// sums[t] = totals[t]·2^F of each tensor, or NaN if not_finite[t] > 0.
void norm_sums(Stream& stream, double* sums, const int64_t* totals, const int32_t* scales,
               const int64_t* not_finite, int64_t tensors);

namespace cuda {  // exact_sums.cu
void round_and_add(Stream& stream, std::span<const ExactSegment> segments);
void count_largest(Stream& stream, const LargestRow& row);
void add_integers(Stream& stream, int32_t* sums, const int32_t* added, int64_t n, bool accumulate);
void block_maxima(Stream& stream, std::span<const LargestSegment> segments);
void first_grids(Stream& stream, int32_t* exponents, const float* largest,
                 std::span<const TensorGrids> tensors, int64_t contributions);
void find_overflow(Stream& stream, int32_t* overflow, const int64_t* maxima, int64_t blocks);
void update_grids(Stream& stream, const GridUpdate& args);
void norm_scales(Stream& stream, int32_t* scales, const int32_t* exponents,
                 std::span<const TensorGrids> tensors);
void exact_norm(Stream& stream, std::span<const ExactNormSegment> segments);
void norm_sums(Stream& stream, double* sums, const int64_t* totals, const int32_t* scales,
               const int64_t* not_finite, int64_t tensors);
}  // namespace cuda

}  // namespace train_gpt
