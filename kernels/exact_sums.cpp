#include "kernels/exact_sums.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "device/profile.h"
#include "kernels/blocks.h"
#include "kernels/exact_math.h"
#include "kernels/lanes.h"

namespace train_gpt {

namespace {

Cost cost_of(std::span<const ExactSegment> segments) {
    double bytes = 0;
    for (const ExactSegment& s : segments)
        bytes += static_cast<double>(s.n) * (s.accumulate ? 12 : 8);
    return {"round_and_add", bytes, 0};
}

Cost cost_of(std::span<const ExactNormSegment> segments) {
    double n = 0;
    for (const ExactNormSegment& s : segments) n += static_cast<double>(s.n);
    return {"exact_norm", sizeof(int32_t) * n, 0};
}

/// Returns how many elements that are not 0 have become 0.
template <bool accumulate>
int64_t round_block(int32_t* sums, const float* g, int64_t n, float inverse) {
    int32_t lost = 0;
#pragma omp simd reduction(+ : lost)
    for (int64_t i = 0; i < n; ++i) {
        const float x = g[i];
        const int32_t q = rounded_to_grid(x, inverse);
        lost += q == 0 && x != 0 ? 1 : 0;
        sums[i] =
            accumulate
                ? static_cast<int32_t>(static_cast<uint32_t>(sums[i]) + static_cast<uint32_t>(q))
                : q;
    }
    return lost;
}

/// The largest of the bits of |g|, which are ordered as the numbers are, with NaN after ∞.
uint32_t largest_bits(const float* g, int64_t n) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude_bits(g[i]));
    return largest;
}

}  // namespace

void round_and_add(Stream& stream, std::span<const ExactSegment> segments) {
    const Profiled profiled(stream, cost_of(segments));
    TRAIN_GPT_ON_CUDA(stream.device, round_and_add(stream, segments));
    for_each_block(segments, [](const ExactSegment& segment, int64_t first, int64_t count) {
        const float* const g = segment.gradient + first;
        const float inverse = power_of_two(-segment.exponents[first / norm_block]);
        const uint32_t largest = largest_bits(g, count);
        segment.maxima[first / norm_block] += grid_units(std::bit_cast<float>(largest), inverse);
        if (largest >= infinity_bits) {
#pragma omp critical
            {
                *segment.not_finite += 1;
                *segment.first_not_finite = std::min(*segment.first_not_finite, segment.number);
            }
        }
        int32_t* const sums = segment.sums + first;
        const int64_t lost = segment.accumulate ? round_block<true>(sums, g, count, inverse)
                                                : round_block<false>(sums, g, count, inverse);
#pragma omp atomic
        *segment.lost += lost;
    });
}

void count_largest(Stream& stream, const LargestRow& row) {
    TRAIN_GPT_ON_CUDA(stream.device, count_largest(stream, row));
    const float largest = std::bit_cast<float>(*row.largest);
    const int64_t units = grid_units(largest, power_of_two(-*row.exponent));
    for (int64_t b = 0; b < row.blocks; ++b) row.maxima[b] += units;
    if (*row.largest >= infinity_bits) {
        ++*row.not_finite;
        *row.first_not_finite = std::min(*row.first_not_finite, row.number);
    }
    *row.largest = 0;
}

void add_integers(Stream& stream, int32_t* sums, const int32_t* added, int64_t n, bool accumulate) {
    TRAIN_GPT_ON_CUDA(stream.device, add_integers(stream, sums, added, n, accumulate));
    auto* const to = reinterpret_cast<uint32_t*>(sums);
    const auto* const from = reinterpret_cast<const uint32_t*>(added);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] + (accumulate ? to[i] : 0u);
}

void block_maxima(Stream& stream, std::span<const LargestSegment> segments) {
    TRAIN_GPT_ON_CUDA(stream.device, block_maxima(stream, segments));
    for_each_block(segments, [](const LargestSegment& segment, int64_t first, int64_t count) {
        const float* const g = segment.gradient + first;
        float& largest = segment.largest[first / norm_block];
        largest = std::max(largest, std::bit_cast<float>(largest_bits(g, count)));
    });
}

int headroom_bits(int64_t contributions) {
    const auto before = static_cast<uint64_t>(std::max<int64_t>(contributions, 1) - 1);
    const int doublings = std::bit_width(before) - 4;
    return std::clamp(6 - doublings, 2, 6);
}

void first_grids(Stream& stream, int32_t* exponents, const float* largest,
                 std::span<const TensorGrids> tensors, int64_t contributions) {
    TRAIN_GPT_ON_CUDA(stream.device,
                      first_grids(stream, exponents, largest, tensors, contributions));
    const int headroom = headroom_bits(contributions);
    int32_t coarsest_of_all = no_exponent;
    for (const TensorGrids& tensor : tensors) {
        int32_t coarsest = no_exponent;
        for (int64_t b = tensor.first; b < tensor.first + tensor.blocks; ++b) {
            exponents[b] = first_exponent(largest[b], contributions, headroom);
            coarsest = std::max(coarsest, exponents[b]);
        }
        for (int64_t b = tensor.first; b < tensor.first + tensor.blocks; ++b)
            exponents[b] = tensor.one_grid || exponents[b] == no_exponent
                               ? coarsest
                               : grid_of_block(exponents[b], coarsest);
        coarsest_of_all = std::max(coarsest_of_all, coarsest);
    }
    if (coarsest_of_all == no_exponent) coarsest_of_all = 0;
    for (const TensorGrids& tensor : tensors)
        for (int64_t b = tensor.first; b < tensor.first + tensor.blocks; ++b)
            if (exponents[b] == no_exponent) exponents[b] = coarsest_of_all;
}

void find_overflow(Stream& stream, int32_t* overflow, const int64_t* maxima, int64_t blocks) {
    TRAIN_GPT_ON_CUDA(stream.device, find_overflow(stream, overflow, maxima, blocks));
    if (std::any_of(maxima, maxima + blocks, [](int64_t s) { return s >= int_limit; }))
        *overflow = 1;
}

void update_grids(Stream& stream, const GridUpdate& args) {
    TRAIN_GPT_ON_CUDA(stream.device, update_grids(stream, args));
    if (*args.stale != 0) return;
    const int headroom = headroom_bits(args.contributions);
    for (const TensorGrids& tensor : args.tensors) {
        const int64_t* const maxima = args.maxima + tensor.first;
        const int64_t most = *std::max_element(maxima, maxima + tensor.blocks);
        const std::span<int32_t> exponents(args.exponents + tensor.first,
                                           static_cast<size_t>(tensor.blocks));
        for (size_t b = 0; b < exponents.size(); ++b)
            exponents[b] = next_exponent(exponents[b], tensor.one_grid ? most : maxima[b], headroom,
                                         *args.overflow != 0);
        const int32_t coarsest = std::ranges::max(exponents);
        for (int32_t& e : exponents) e = grid_of_block(e, coarsest);
    }
}

void norm_scales(Stream& stream, int32_t* scales, const int32_t* exponents,
                 std::span<const TensorGrids> tensors) {
    TRAIN_GPT_ON_CUDA(stream.device, norm_scales(stream, scales, exponents, tensors));
    for (size_t t = 0; t < tensors.size(); ++t) {
        int32_t coarsest = min_exponent;
        for (int64_t b = 0; b < tensors[t].blocks; ++b)
            coarsest = std::max(coarsest, exponents[tensors[t].first + b]);
        scales[t] = norm_scale(coarsest, tensors[t].blocks);
    }
}

void exact_norm(Stream& stream, std::span<const ExactNormSegment> segments) {
    const Profiled profiled(stream, cost_of(segments));
    TRAIN_GPT_ON_CUDA(stream.device, exact_norm(stream, segments));
    for_each_block(segments, [](const ExactNormSegment& segment, int64_t first, int64_t count) {
        const int32_t* const q = segment.sums + first;
        const auto squares = lane_sum<double>(count, [=](int64_t i) {
            const auto x = static_cast<float>(q[i]);
            return x * x;
        });
        const int64_t added =
            norm_units(squares, segment.exponents[first / norm_block], *segment.scale);
#pragma omp atomic
        *segment.total += added;
    });
}

void norm_sums(Stream& stream, double* sums, const int64_t* totals, const int32_t* scales,
               const int64_t* not_finite, int64_t tensors) {
    TRAIN_GPT_ON_CUDA(stream.device, norm_sums(stream, sums, totals, scales, not_finite, tensors));
    for (int64_t t = 0; t < tensors; ++t)
        sums[t] = not_finite[t] > 0
                      ? std::numeric_limits<double>::quiet_NaN()
                      : static_cast<double>(totals[t]) * double_power_of_two(scales[t]);
}

}  // namespace train_gpt
