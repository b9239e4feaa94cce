// The optimizer's two passes over all parameters: the global gradient norm, and AdamW.
// Elements are processed in fixed blocks of a tensor's logical index, so results do not depend on
// how tensors are split over ranks or threads.
#pragma once
#include <span>

#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/dynamic_map.h"

namespace train_gpt {

/// Elements per block of norm_partials; shard boundaries are multiples of it.
constexpr int64_t norm_block = 4096;

/// A range of one tensor's gradient: partials[i] receives Σ g² of block i of the range, in fp32 or
/// better.
struct NormSegment {
    const float* gradient = nullptr;
    int64_t n = 0;               // elements; the last block may be short
    double* partials = nullptr;  // [ceil(n / norm_block)]
};
void norm_partials(Stream& stream, std::span<const NormSegment> segments);

/// sums[i] = Σ of the next counts[i] partials, in a fixed order.
void add_partials(Stream& stream, double* sums, const double* partials,
                  std::span<const int64_t> counts);

/// out[i] = Σ over rows r of in[r·n + i], in the order of rows; in [rows, n].
void add_rows(Stream& stream, double* out, const double* in, int64_t rows, int64_t n);

/// What a step decides on the device, so that the host need not wait.
struct StepState {
    float norm = 0;        // of the scaled gradient, before clipping
    float multiplier = 0;  // gradient scale · clip factor: AdamW multiplies gradients by it
    // Sticky: set when a norm was not finite. AdamW then changes nothing.
    int32_t stop = 0;
    int32_t bad_segment = -1;  // the first sum with which the norm was not finite
    // Sticky until the host clears it: exact sums overflowed, so that the step is computed again.
    // AdamW changes nothing until then.
    int32_t overflow = 0;
    int64_t lost = 0;    // elements of gradients that exact sums rounded to 0
    int64_t spikes = 0;  // of the run so far (spikes.h)
    int32_t spike = 0;   // this step is one
    int32_t skip = 0;    // because of which AdamW changes nothing
    int32_t taken = 0;   // the history of losses and norms has taken this step
};

/// norm = scale·√Σ sums (added in a fixed order, in double); sums [n], one of each tensor.
/// multiplier = scale·min(1, clip / norm), where clip = 0 means no clipping.
/// A norm that is not finite sets stop and bad_segment (which stay set).
void finish_norm(Stream& stream, StepState* state, const double* sums, int64_t n, float scale,
                 float clip);

/// One range of a parameter. In fp32 training weights is null: master is the weight itself.
struct AdamWSegment {
    bf16* weights = nullptr;  // receives master rounded to nearest
    float* master = nullptr;
    void *m = nullptr, *v = nullptr;  // of AdamWStep::moments
    const float* gradient = nullptr;
    int64_t n = 0;
    bool decay = false;
    uint32_t tensor = 0;  // whose random numbers round v in bf16
    // If set, the gradient is sums·2^E in place of `gradient` (exact_sums.h). exponents has one E
    // for each norm_block of the segment, which then begins at a multiple of norm_block of its
    // tensor.
    const int32_t *sums = nullptr, *exponents = nullptr;
    // With moments in 8 bits. Blocks of code_block elements begin with the segment.
    float *m_scales = nullptr, *v_scales = nullptr;
    int64_t first = 0;  // the first element's number in its tensor; a multiple of 4
};

/// Loshchilov & Hutter, arXiv 1711.05101, with g = multiplier·gradient, t = step (1 for the first
/// update):
///   m = β₁m + (1−β₁)g    v = β₂v + (1−β₂)g²
///   θ −= lr·( u + decay·θ ),  u = (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε)
/// With cautious_decay, decay is 0 for elements with u·θ < 0, which u moves away from 0 (Chen et
/// al. 2025, arXiv 2510.12402).
/// One pass over memory. If state->stop, overflow or skip is set, nothing changes.
///
/// θ is updated with m and v in fp32. Then they are rounded to the dtype in which they are kept:
///   bf16    m to nearest. v up or down at random, so that its mean is exact: in a step v shrinks
///           by at most its (1−β₂)th part, and where that is below half of bf16's spacing of 2⁻⁸,
///           rounding to nearest would let v grow but never shrink. (m changes by (1−β₁).) The
///           random bits of element i are the lower 16 of
///           RandomStream(seed, rounding, tensor, step).bits(first + i).
///   uint8   m, and √v in place of v, as codes (dynamic_map.h). Rounded to nearest: the root and
///           the scale, which changes with the block, leave v within a few percent on average.
struct AdamWStep {
    float learning_rate = 0, beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
    int64_t step = 1;
    bool cautious_decay = false;
    const StepState* state = nullptr;
    DType moments = DType::fp32;  // fp32, bf16 or uint8
    uint64_t seed = 0;
};
void adamw(Stream& stream, std::span<const AdamWSegment> segments, const AdamWStep& args);

/// The minimum bytes and FLOPs of a call (device/profile.h).
Cost cost_of(std::span<const NormSegment> segments);
Cost cost_of(std::span<const AdamWSegment> segments, DType moments);

/// Loads what adamw() keeps in a GPU's memory, so that no step takes memory.
void load_adamw(const Device& device);

namespace cuda {  // adamw.cu
void norm_partials(Stream& stream, std::span<const NormSegment> segments);
void add_partials(Stream& stream, double* sums, const double* partials,
                  std::span<const int64_t> counts);
void add_rows(Stream& stream, double* out, const double* in, int64_t rows, int64_t n);
void finish_norm(Stream& stream, StepState* state, const double* sums, int64_t n, float scale,
                 float clip);
void adamw(Stream& stream, std::span<const AdamWSegment> segments, const AdamWStep& args);
void load_adamw(const Device& device);
}  // namespace cuda

}  // namespace train_gpt
