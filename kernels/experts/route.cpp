#include "kernels/experts/route.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "device/profile.h"
#include "kernels/exp_math.h"
#include "kernels/lanes.h"

namespace train_gpt {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// Integers in the order of the floats, with one zero; all are above INT32_MIN.
int32_t ordered_bits(float value) {
    const auto bits = std::bit_cast<int32_t>(value + 0.0f);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

/// σ(z)·e^−shift with shift <= 0, and where z is positive, shift = 0. The factor keeps scores that
/// are divided by their sum from vanishing.
float shifted_sigmoid(float z, float shift) {
    const float t = fast_exp(z > 0 ? -z : z);
    return (z > 0 ? 1.0f : fast_exp(z - shift)) / (1.0f + t);
}
/// 1 − σ(z)
float sigmoid_complement(float z) {
    const float t = fast_exp(z > 0 ? -z : z);
    return (z > 0 ? t : 1.0f) / (1.0f + t);
}

/// What a token's logits give for all experts.
struct TokenScores {
    alignas(64) float probabilities[most_experts];  // p
    float largest, sum;                             // of the logits; of exp(z − largest)
    int64_t E;

    TokenScores(const float* z, int64_t E_, RouterScore score) : E(E_) {
        largest = lane_max(E, [=](int64_t i) { return z[i]; });
        float* const p = probabilities;
        const float top = largest;
#pragma omp simd
        for (int64_t i = 0; i < E; ++i) p[i] = fast_exp(z[i] - top);
        sum = lane_sum(E, [=](int64_t i) { return p[i]; });
        float total = sum;
        if (score == RouterScore::sigmoid) {
            const float shift = std::min(top, 0.0f);
#pragma omp simd
            for (int64_t i = 0; i < E; ++i) p[i] = shifted_sigmoid(z[i], shift);
            total = lane_sum(E, [=](int64_t i) { return p[i]; });
        }
        const float factor = 1.0f / total;
#pragma omp simd
        for (int64_t i = 0; i < E; ++i) p[i] *= factor;
    }
    float lse() const { return largest + std::log(sum); }
};

/// The scores of the chosen experts, which weights are proportional to; those of a softmax without
/// the factor that all experts share.
struct ChosenScores {
    float values[most_experts_per_token];

    ChosenScores(const float* z, const int32_t* experts, int64_t k, const RouterRule& rule,
                 const TokenScores& token) {
        float top = -infinity, sum = 0;
        for (int64_t j = 0; j < k; ++j) top = std::max(top, z[experts[j]]);
        const bool softmax = rule.score == RouterScore::softmax;
        for (int64_t j = 0; j < k; ++j) {
            const float logit = z[experts[j]];
            values[j] = !rule.normalise
                            ? softmax ? token.probabilities[experts[j]] : shifted_sigmoid(logit, 0)
                        : softmax ? fast_exp(logit - top)
                                  : shifted_sigmoid(logit, std::min(top, 0.0f));
            sum += values[j];
        }
        if (rule.normalise)
            for (int64_t j = 0; j < k; ++j) values[j] /= sum;
    }
};

/// The k largest keys in descending order, of equal ones the first. Overwrites the keys.
void choose(int32_t* chosen, int64_t k, int32_t* keys, int64_t E) {
    for (int64_t j = 0; j < k; ++j) {
        int32_t largest = INT32_MIN;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < E; ++i) largest = std::max(largest, keys[i]);
        int64_t at = 0;
        while (keys[at] != largest) ++at;
        chosen[j] = static_cast<int32_t>(at);
        keys[at] = INT32_MIN;
    }
}

/// Sums over a slab of tokens.
struct SlabSums {
    float* probabilities;
    int32_t* counts;
    float* squared_lse;
};

void route_token(const Route& a, int64_t t, const SlabSums& sums) {
    const int64_t E = a.logits.cols(), k = a.experts.cols();
    const float* const z = a.logits.as<float>() + t * E;
    const float* const bias = a.selection_bias ? a.selection_bias.as<float>() : nullptr;
    int32_t* const experts = a.experts.as<int32_t>() + t * k;
    float* const weights = a.weights.as<float>() + t * k;
    const TokenScores token(z, E, a.rule.score);
    alignas(64) int32_t keys[most_experts];
    int nans = 0;
    const bool softmax = a.rule.score == RouterScore::softmax;
#pragma omp simd reduction(+ : nans)
    for (int64_t i = 0; i < E; ++i) {
        float value = z[i];
        if (bias) {
            const float score = softmax ? token.probabilities[i] : shifted_sigmoid(z[i], 0);
            value = z[i] == -infinity ? z[i] : score + bias[i];
        }
        nans += value != value || z[i] != z[i];
        keys[i] = ordered_bits(value);
    }
    if (nans) std::fill_n(keys, E, 0);
    choose(experts, k, keys, E);
    const ChosenScores scores(z, experts, k, a.rule, token);
    for (int64_t j = 0; j < k; ++j) {
        weights[j] =
            nans ? std::numeric_limits<float>::quiet_NaN() : a.rule.scale * scores.values[j];
        ++sums.counts[experts[j]];
    }
    const float* const p = token.probabilities;
    float* const to = sums.probabilities;
#pragma omp simd
    for (int64_t i = 0; i < E; ++i) to[i] += p[i];
    *sums.squared_lse += token.lse() * token.lse();
}

/// Adds up the slabs of each sequence. partials: a row of `cols` for each slab; out [S, cols].
template <class T>
void sum_slabs(const Tensor& out, const T* partials, const RouteSlabs& slabs) {
    if (!out) return;
    const int64_t cols = out.numel() / slabs.sequences;
#pragma omp parallel for schedule(static)
    for (int64_t s = 0; s < slabs.sequences; ++s) {
        T* const to = out.as<T>() + s * cols;
        std::fill_n(to, cols, T{});
        for (int64_t slab = 0; slab < slabs.per_sequence; ++slab) {
            const T* const from = partials + (s * slabs.per_sequence + slab) * cols;
            for (int64_t i = 0; i < cols; ++i) to[i] += from[i];
        }
    }
}

void backward_token(const RouteBackward& a, int64_t t, float* dz) {
    const int64_t E = a.logits.cols(), k = a.experts.cols(), N = a.logits.rows();
    const float* const z = a.logits.as<float>() + t * E;
    const int32_t* const experts = a.experts.as<int32_t>() + t * k;
    const float* const dweights = a.dweights.as<float>() + t * k;
    const bool softmax = a.rule.score == RouterScore::softmax;
    const TokenScores token(z, E, a.rule.score);
    const float* const p = token.probabilities;

    // The auxiliary losses: with a_i = ∂/∂p_i, p_i·(a_i − Σ_j p_j·a_j), times 1 − σ for a sigmoid.
    const float* const load = a.load ? a.load.as<float>() + t / (N / a.load.rows()) * E : nullptr;
    const float balance = a.balance * static_cast<float>(E);
    const float mean = load ? lane_sum(E, [=](int64_t i) { return p[i] * load[i]; }) : 0.0f;
    const float z_slope = a.z_loss == 0 ? 0.0f : 2 * a.z_loss * token.lse() / token.sum;
    const float top = token.largest;
#pragma omp simd
    for (int64_t i = 0; i < E; ++i) {
        float gradient = 0;
        if (load)
            gradient =
                balance * (load[i] - mean) * p[i] * (softmax ? 1.0f : sigmoid_complement(z[i]));
        if (z_slope != 0) gradient += z_slope * fast_exp(z[i] - top);
        dz[i] = gradient;
    }

    // The weights. Where they are normalised, the scores of other experts do not matter.
    const ChosenScores scores(z, experts, k, a.rule, token);
    float product = 0, auxiliary[most_experts_per_token];
    for (int64_t j = 0; j < k; ++j) {
        product += a.rule.scale * dweights[j] * scores.values[j];
        auxiliary[j] = dz[experts[j]];
    }
    if (softmax && !a.rule.normalise) {
#pragma omp simd
        for (int64_t i = 0; i < E; ++i) dz[i] -= product * p[i];
    }
    const float other = softmax || a.rule.normalise ? product : 0.0f;
    for (int64_t j = 0; j < k; ++j) {
        const float slope = softmax ? 1.0f : sigmoid_complement(z[experts[j]]);
        dz[experts[j]] =
            auxiliary[j] + (a.rule.scale * dweights[j] - other) * scores.values[j] * slope;
    }
}

[[maybe_unused]] bool is_matrix(const Tensor& t, DType dtype, int64_t rows, int64_t cols) {
    return t.dtype == dtype && t.rows() == rows && t.cols() == cols;
}

}  // namespace

void route(Stream& stream, const Route& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t N = args.logits.rows(), E = args.logits.cols(), k = args.experts.cols();
    assert(args.logits.dtype == DType::fp32 && E <= most_experts);
    assert(k >= 1 && k <= E && k <= most_experts_per_token);
    assert(is_matrix(args.experts, DType::int32, N, k) &&
           is_matrix(args.weights, DType::fp32, N, k));
    TRAIN_GPT_ON_CUDA(stream.device, route(stream, args));
    const RouteSlabs slabs(N, sequences_of(args));
    assert(N % slabs.sequences == 0);
    auto* const probabilities =
        stream.scratch_for<float>(route_scratch_bytes(N, slabs.sequences, E));
    float* const squared_lse = probabilities + slabs.count() * E;
    auto* const counts = reinterpret_cast<int32_t*>(squared_lse + slabs.count());
#pragma omp parallel for schedule(static)
    for (int64_t slab = 0; slab < slabs.count(); ++slab) {
        const SlabSums sums{probabilities + slab * E, counts + slab * E, squared_lse + slab};
        std::fill_n(sums.probabilities, E, 0.0f);
        std::fill_n(sums.counts, E, 0);
        *sums.squared_lse = 0;
        for (int64_t t = slabs.first(slab); t < slabs.last(slab); ++t) route_token(args, t, sums);
    }
    sum_slabs(args.probabilities, probabilities, slabs);
    sum_slabs(args.squared_lse, squared_lse, slabs);
    sum_slabs(args.counts, counts, slabs);
}

void route_backward(Stream& stream, const RouteBackward& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t N = args.logits.rows(), E = args.logits.cols();
    assert(args.logits.dtype == DType::fp32 && E <= most_experts);
    assert(args.dlogits.rows() == N && args.dlogits.cols() == E);
    assert(!args.load || (args.load.cols() == E && N % args.load.rows() == 0));
    TRAIN_GPT_ON_CUDA(stream.device, route_backward(stream, args));
    with_float_type(args.dlogits.dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for schedule(static)
        for (int64_t t = 0; t < N; ++t) {
            alignas(64) float dz[most_experts];
            backward_token(args, t, dz);
            T* const out = args.dlogits.as<T>() + t * E;
            for (int64_t i = 0; i < E; ++i) store(out[i], dz[i]);
        }
    });
}

void expert_load(Stream& stream, Tensor load, Tensor counts) {
    assert(counts.rows() % load.rows() == 0 && load.cols() == counts.cols());
    TRAIN_GPT_ON_CUDA(stream.device, expert_load(stream, load, counts));
    const int64_t S = load.rows(), E = load.cols(), parts = counts.rows() / S;
    for (int64_t s = 0; s < S; ++s) {
        const auto count = [&](int64_t i) {
            int32_t sum = 0;
            for (int64_t p = 0; p < parts; ++p) sum += counts.as<int32_t>()[(p * S + s) * E + i];
            return sum;
        };
        int64_t total = 0;
        for (int64_t i = 0; i < E; ++i) total += count(i);
        for (int64_t i = 0; i < E; ++i) load.as<float>()[s * E + i] = load_of(count(i), total, E);
    }
}

size_t route_scratch_bytes(int64_t N, int64_t S, int64_t E) {
    return static_cast<size_t>(RouteSlabs(N, S).count() * (2 * E + 1)) * sizeof(float);
}

Cost cost_of(const Route& a) {
    return {"route",
            bytes_of(a.logits) + bytes_of(a.selection_bias) + bytes_of(a.experts) +
                bytes_of(a.weights) + bytes_of(a.counts) + bytes_of(a.probabilities) +
                bytes_of(a.squared_lse),
            0};
}

Cost cost_of(const RouteBackward& a) {
    return {"route_backward",
            bytes_of(a.dlogits) + bytes_of(a.logits) + bytes_of(a.experts) + bytes_of(a.dweights) +
                bytes_of(a.load),
            0};
}

}  // namespace train_gpt
