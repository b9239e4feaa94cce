// How evenly routers spread the tokens of a step over their experts, counted in integers, and what
// follows from the counts. Integers have the same sum in every order, so they are the same on any
// number of ranks. Selection bias: DeepSeek-V3, arXiv 2412.19437; balance over a whole step: Qiu et
// al., arXiv 2501.11873.
#pragma once
#include <vector>

#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/adamw.h"

namespace train_gpt {

/// Adds a micro-batch to a router's sums over a step, all of E experts:
///   chosen += Σ_s counts[s]
///   mass   += Σ_s round(probabilities[s] · unit)
///   not_finite += how many sequences s have probabilities that are not finite
///   dropped += Σ_s Σ_i max(0, counts[s, i] − capacity), if given (GroupRows)
/// chosen, mass int32 [1, E]; not_finite, dropped int32 [1, 1]; counts int32 [S, E] and
/// probabilities fp32 [S, E] as Route writes them. All probabilities of a sequence are finite, or
/// none is. A probability that is not finite adds nothing to mass.
struct CountRoutes {
    Tensor chosen, mass, not_finite, counts, probabilities;
    float unit = 1;
    Tensor dropped = {};
    int64_t capacity = 0;
};
void count_routes(Stream& stream, const CountRoutes& args);

/// Elements [first, first + n) of a router's selection bias, which is like other parameters: a
/// master in fp32 and, in bf16 training, weights that are the master rounded.
struct BalanceSegment {
    bf16* weights = nullptr;  // null in fp32
    float* master = nullptr;
    int64_t first = 0, n = 0;
    const int32_t* chosen = nullptr;  // [E], of the step
    int64_t E = 0;
};
/// bias_i += rate·(d_i − Σ_j d_j / E),  d_i = sign(Σ_j n_j − E·n_i),
/// where n_i says how often the step chose expert i: an expert with less than its share is chosen
/// more often, and the sum of the biases stays 0. Where AdamW changes nothing (StepState), neither
/// does this.
void balance_biases(Stream& stream, const std::vector<BalanceSegment>& segments, float rate,
                    const StepState* state);

/// last = chosen, and load [R, E] = each expert's share of its router's row of chosen [R, E],
/// unless AdamW changes nothing in this step. chosen, last int32; load fp32.
struct KeepLoad {
    Tensor load, last, chosen;
};
void keep_load(Stream& stream, const KeepLoad& args, const StepState* state);

/// The terms of these formulas, for CPU and CUDA code.
constexpr int32_t mass_of(float probabilities, float unit) {
    const float mass = probabilities * unit + 0.5f;
    return mass >= 1 ? static_cast<int32_t>(mass) : 0;  // 0 for a NaN
}
constexpr int32_t dropped_of(int32_t count, int64_t capacity) {
    return count > capacity ? count - static_cast<int32_t>(capacity) : 0;
}
constexpr bool is_finite_probability(float p) { return p - p == 0; }
constexpr int direction_of(int32_t chosen, int64_t total, int64_t E) {
    return (total > E * chosen) - (total < E * chosen);
}
constexpr float bias_change(int direction, int directions, int64_t E, float rate) {
    return rate *
           (static_cast<float>(direction) - static_cast<float>(directions) / static_cast<float>(E));
}

namespace cuda {  // balance.cu
void count_routes(Stream& stream, const CountRoutes& args);
void balance_biases(Stream& stream, const std::vector<BalanceSegment>& segments, float rate,
                    const StepState* state);
void keep_load(Stream& stream, const KeepLoad& args, const StepState* state);
}  // namespace cuda

}  // namespace train_gpt
