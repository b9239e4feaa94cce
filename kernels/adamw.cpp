#include "kernels/adamw.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "base/random.h"
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

/// Elements [first, first + count) of a segment, and their moments in fp32.
struct Elements {
    const AdamWSegment& segment;
    int64_t first, count;
    float *m, *v;
};

/// gradient(i): of element `first` + i.
template <bool write_weights, bool cautious, class Gradient>
void update(const Elements& elements, const Constants& k, const Gradient& gradient) {
    const AdamWSegment& segment = elements.segment;
    bf16* weights = write_weights ? segment.weights + elements.first : nullptr;
    float *master = segment.master + elements.first, *m = elements.m, *v = elements.v;
    const int64_t count = elements.count;
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

/// At most code_block consecutive elements of a segment, whose moments are in fp32 while they are
/// updated.
struct Moments {
    const AdamWSegment& segment;
    int64_t first, count;
    alignas(64) float m[code_block], v[code_block];

    bf16* rounded(void* all) const { return static_cast<bf16*>(all) + first; }
    uint8_t* codes(void* all) const { return static_cast<uint8_t*>(all) + first; }

    void read_rounded() {
        const bf16 *from_m = rounded(segment.m), *from_v = rounded(segment.v);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            m[i] = to_float(from_m[i]);
            v[i] = to_float(from_v[i]);
        }
    }
    void write_rounded(const AdamWStep& args) {
        bf16 *to_m = rounded(segment.m), *to_v = rounded(segment.v);
        const RandomStream random(args.seed, RandomPurpose::rounding, segment.tensor,
                                  static_cast<uint64_t>(args.step));
        const auto block = static_cast<uint64_t>(segment.first + first) / 4;
        alignas(64) uint16_t low[code_block];
        random.low_halves<code_block / 4>(block, low);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            store(to_m[i], m[i]);
            to_v[i].bits = rounded_at_random(v[i], low[i]);
        }
    }

    void read_codes() {
        const int64_t block = first / code_block;
        decode_block<Coding::signs>(codes(segment.m), segment.m_scales[block], count, m);
        decode_block<Coding::roots>(codes(segment.v), segment.v_scales[block], count, v);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) v[i] *= v[i];
    }
    void write_codes() {
        const int64_t block = first / code_block;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            const float root = std::sqrt(v[i]);
            v[i] = root < largest_root ? root : largest_root;
        }
        encode_block<Coding::signs>(m, count, codes(segment.m), segment.m_scales[block]);
        encode_block<Coding::roots>(v, count, codes(segment.v), segment.v_scales[block]);
    }
};

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
    const Profiled profiled(stream, cost_of(segments, args.moments));
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
            const auto update_part = [&](const Elements& part) {
                const int64_t begin = part.first - first;
                const auto of_part = [&](int64_t i) { return gradient(begin + i); };
                const auto update_as = [&](auto cautious) {
                    if (segment.weights)
                        update<true, cautious>(part, constants, of_part);
                    else
                        update<false, cautious>(part, constants, of_part);
                };
                if (args.cautious_decay)
                    update_as(std::true_type());
                else
                    update_as(std::false_type());
            };
            if (args.moments == DType::fp32)
                return update_part({segment, first, count, static_cast<float*>(segment.m) + first,
                                    static_cast<float*>(segment.v) + first});
            for (int64_t at = first; at < first + count; at += code_block) {
                Moments part{segment, at, std::min(code_block, first + count - at), {}, {}};
                const bool has_codes = args.moments == DType::uint8;
                has_codes ? part.read_codes() : part.read_rounded();
                update_part({segment, at, part.count, part.m, part.v});
                has_codes ? part.write_codes() : part.write_rounded(args);
            }
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

Cost cost_of(std::span<const AdamWSegment> segments, DType moments) {
    const bool has_codes = moments == DType::uint8;
    const double of_element =
        3 * sizeof(float) + 4 * static_cast<double>(size_of(moments)) +
        (has_codes ? 4.0 * sizeof(float) / static_cast<double>(code_block) : 0);
    double bytes = 0;
    for (const AdamWSegment& s : segments)
        bytes += static_cast<double>(s.n) *
                 (of_element + (s.weights ? static_cast<double>(sizeof(bf16)) : 0.0));
    return {"adamw", bytes, 0};
}

void load_adamw(const Device& device) { TRAIN_GPT_ON_CUDA(device, load_adamw(device)); }

}  // namespace train_gpt
