#include "kernels/adamw.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "device/profile.h"
#include "kernels/blocks.h"
#include "kernels/exact_math.h"
#include "kernels/lanes.h"

namespace train_gpt {

namespace {

/// The constants of one update step, including the bias corrections.
struct Constants {
    float multiplier, beta1, beta2, one_minus_beta1, one_minus_beta2;
    float m_correction, v_correction;  // 1 / (1 − β₁ᵗ), 1 / (1 − β₂ᵗ)
    float learning_rate, epsilon, weight_decay;
};

/// gradient(i): of element `first` + i.
template <bool write_weights, bool cautious, class Gradient>
void update(const AdamWSegment& segment, int64_t first, int64_t count, const Constants& k,
            const Gradient& gradient) {
    bf16* weights = write_weights ? segment.weights + first : nullptr;
    float *master = segment.master + first, *m = segment.m + first, *v = segment.v + first;
    const float decay = segment.decay ? k.weight_decay : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float g = k.multiplier * gradient(i);
        const float m_i = k.beta1 * m[i] + k.one_minus_beta1 * g;
        const float v_i = k.beta2 * v[i] + k.one_minus_beta2 * (g * g);
        const float direction =
            (m_i * k.m_correction) / (std::sqrt(v_i * k.v_correction) + k.epsilon);
        const float of_element = cautious && direction * master[i] < 0 ? 0.0f : decay;
        const float theta = master[i] - k.learning_rate * (direction + of_element * master[i]);
        m[i] = m_i;
        v[i] = v_i;
        master[i] = theta;
        if (write_weights) store(weights[i], theta);
    }
}

}  // namespace

void norm_partials(Stream& stream, std::span<const NormSegment> segments) {
    const Profiled profiled(stream, cost_of(segments));
    TRAIN_GPT_ON_CUDA(stream.device, norm_partials(stream, segments));
    for_each_block(segments, [](const NormSegment& segment, int64_t first, int64_t count) {
        const float* g = segment.gradient + first;
        segment.partials[first / norm_block] =
            lane_sum<double>(count, [=](int64_t i) { return g[i] * g[i]; });
    });
}

void add_partials(Stream& stream, double* sums, const double* partials,
                  std::span<const int64_t> counts) {
    TRAIN_GPT_ON_CUDA(stream.device, add_partials(stream, sums, partials, counts));
    for (const int64_t count : counts) {
        *sums++ = std::accumulate(partials, partials + count, 0.0);
        partials += count;
    }
}

void add_rows(Stream& stream, double* out, const double* in, int64_t rows, int64_t n) {
    TRAIN_GPT_ON_CUDA(stream.device, add_rows(stream, out, in, rows, n));
    for (int64_t i = 0; i < n; ++i) {
        double sum = 0;
        for (int64_t r = 0; r < rows; ++r) sum += in[r * n + i];
        out[i] = sum;
    }
}

void finish_norm(Stream& stream, StepState* state, const double* sums, int64_t n, float scale,
                 float clip) {
    TRAIN_GPT_ON_CUDA(stream.device, finish_norm(stream, state, sums, n, scale, clip));
    double total = 0;
    int32_t bad_segment = -1;
    for (int64_t i = 0; i < n; ++i) {
        total += sums[i];
        const bool finite = std::isfinite(static_cast<float>(scale * std::sqrt(total)));
        if (!finite && bad_segment < 0) bad_segment = static_cast<int32_t>(i);
    }
    state->norm = static_cast<float>(scale * std::sqrt(total));
    if (bad_segment >= 0) {
        if (!state->stop) state->bad_segment = bad_segment;
        state->stop = 1;
        state->multiplier = 0;
        return;
    }
    const float factor = clip > 0 && state->norm > clip ? clip / state->norm : 1.0f;
    state->multiplier = scale * factor;
}

void adamw(Stream& stream, std::span<const AdamWSegment> segments, const AdamWStep& args) {
    const Profiled profiled(stream, cost_of(segments));
    TRAIN_GPT_ON_CUDA(stream.device, adamw(stream, segments, args));
    if (args.state->stop || args.state->overflow || args.state->skip) return;
    const double t = static_cast<double>(args.step);
    const Constants constants{
        .multiplier = args.state->multiplier,
        .beta1 = args.beta1,
        .beta2 = args.beta2,
        .one_minus_beta1 = 1.0f - args.beta1,
        .one_minus_beta2 = 1.0f - args.beta2,
        .m_correction =
            static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(args.beta1), t))),
        .v_correction =
            static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(args.beta2), t))),
        .learning_rate = args.learning_rate,
        .epsilon = args.epsilon,
        .weight_decay = args.weight_decay,
    };
    for_each_block(segments, [&](const AdamWSegment& segment, int64_t first, int64_t count) {
        const auto update_with = [&](const auto& gradient) {
            const auto update_as = [&](auto cautious) {
                if (segment.weights)
                    update<true, cautious>(segment, first, count, constants, gradient);
                else
                    update<false, cautious>(segment, first, count, constants, gradient);
            };
            if (args.cautious_decay)
                update_as(std::true_type());
            else
                update_as(std::false_type());
        };
        if (segment.sums) {
            const int32_t* const sums = segment.sums + first;
            const float grid = power_of_two(segment.exponents[first / norm_block]);
            update_with([=](int64_t i) { return static_cast<float>(sums[i]) * grid; });
        } else {
            const float* const gradient = segment.gradient + first;
            update_with([=](int64_t i) { return gradient[i]; });
        }
    });
}

Cost cost_of(std::span<const NormSegment> segments) {
    double n = 0;
    for (const NormSegment& s : segments) n += static_cast<double>(s.n);
    return {"norm_partials", sizeof(float) * n, 0};
}

Cost cost_of(std::span<const AdamWSegment> segments) {
    double bytes = 0;
    for (const AdamWSegment& s : segments)
        bytes += static_cast<double>(s.n) * (7 * sizeof(float) + (s.weights ? sizeof(bf16) : 0));
    return {"adamw", bytes, 0};
}

}  // namespace train_gpt
