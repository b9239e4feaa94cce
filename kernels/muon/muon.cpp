#include "kernels/muon/muon.h"

#include <algorithm>
#include <type_traits>

#include "device/profile.h"
#include "kernels/blocks.h"
#include "kernels/exact_math.h"
#include "kernels/lanes.h"

namespace train_gpt {

namespace {

bool changes_nothing(const StepState& state) { return state.stop || state.overflow || state.skip; }

/// bytes: that a pass moves for each element, beside values and weights.
Cost cost_of(const char* kind, std::span<const MuonSegment> segments, DType dtype, double bytes,
             bool writes_weights) {
    double total = 0;
    for (const MuonSegment& s : segments)
        total += static_cast<double>(s.n) *
                 (bytes + static_cast<double>(size_of(dtype)) +
                  (writes_weights && s.weights ? static_cast<double>(sizeof(bf16)) : 0.0));
    return {kind, total, 0};
}

/// gradient(i): of element `first` + i.
template <class T, class M, class Gradient>
void add_momentum(const MuonSegment& segment, int64_t first, int64_t count, const MuonStep& args,
                  const Gradient& gradient) {
    M* const momentum = static_cast<M*>(segment.momentum) + first;
    T* const values = static_cast<T*>(segment.values) + first;
    const float mu = args.momentum, multiplier = args.state->multiplier;
    // The momentum's share, and the gradient's, in the direction.
    const float of_momentum = args.nesterov ? mu : 1.0f, of_gradient = args.nesterov ? 1.0f : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float g = multiplier * gradient(i), m = mu * to_float(momentum[i]) + g;
        store(momentum[i], m);
        store(values[i], of_gradient * g + of_momentum * m);
    }
}

template <bool write_weights, bool cautious, class T>
void update(const MuonSegment& segment, int64_t first, int64_t count, const MuonStep& args) {
    bf16* const weights = write_weights ? segment.weights + first : nullptr;
    float* const master = segment.master + first;
    const T* const values = static_cast<const T*>(segment.values) + first;
    const float decay = segment.decay ? args.weight_decay : 0.0f, rate = args.learning_rate,
                scale = segment.scale;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(values[i]),
                    of_element = cautious && value * master[i] < 0 ? 0.0f : decay,
                    theta = master[i] - rate * (scale * value + of_element * master[i]);
        master[i] = theta;
        if (write_weights) store(weights[i], theta);
    }
}

}  // namespace

void muon_momentum(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args) {
    const Profiled profiled(
        stream,
        cost_of("muon_momentum", segments, args.dtype,
                static_cast<double>(sizeof(float) + 2 * size_of(args.momentum_dtype)), false));
    TRAIN_GPT_ON_CUDA(stream.device, muon_momentum(stream, segments, args));
    const bool only_clears = changes_nothing(*args.state);
    with_float_type(args.dtype, [&]<class T>(T) {
        const auto add = [&](const MuonSegment& segment, int64_t first, int64_t count,
                             const auto& gradient) {
            if (args.momentum_dtype == DType::bf16)
                add_momentum<T, bf16>(segment, first, count, args, gradient);
            else
                add_momentum<T, float>(segment, first, count, args, gradient);
        };
        for_each_block(segments, [&](const MuonSegment& segment, int64_t first, int64_t count) {
            if (only_clears) {
                std::fill_n(static_cast<T*>(segment.values) + first, count, T(0.0f));
            } else if (segment.sums) {
                const int32_t* const sums = segment.sums + first;
                const float grid = power_of_two(segment.exponents[first / norm_block]);
                add(segment, first, count,
                    [=](int64_t i) { return static_cast<float>(sums[i]) * grid; });
            } else {
                const float* const gradient = segment.gradient + first;
                add(segment, first, count, [=](int64_t i) { return gradient[i]; });
            }
        });
    });
}

void muon_update(Stream& stream, std::span<const MuonSegment> segments, const MuonStep& args) {
    const Profiled profiled(stream,
                            cost_of("muon_update", segments, args.dtype, 2 * sizeof(float), true));
    TRAIN_GPT_ON_CUDA(stream.device, muon_update(stream, segments, args));
    if (changes_nothing(*args.state)) return;
    with_float_type(args.dtype, [&]<class T>(T) {
        for_each_block(segments, [&](const MuonSegment& segment, int64_t first, int64_t count) {
            const auto with = [&]<bool cautious>(std::bool_constant<cautious>) {
                if (segment.weights)
                    update<true, cautious, T>(segment, first, count, args);
                else
                    update<false, cautious, T>(segment, first, count, args);
            };
            if (args.cautious_decay)
                with(std::true_type());
            else
                with(std::false_type());
        });
    });
}

}  // namespace train_gpt
