#include "kernels/experts/balance.h"

#include <algorithm>
#include <cassert>

#include "device/profile.h"
#include "kernels/experts/route.h"

namespace train_gpt {

namespace {

bool changes_nothing(const StepState* state) {
    return state->stop || state->overflow || state->skip;
}

}  // namespace

void count_routes(Stream& stream, const CountRoutes& args) {
    assert(args.counts.rows() == args.probabilities.rows());
    TRAIN_GPT_ON_CUDA(stream.device, count_routes(stream, args));
    const int64_t E = args.chosen.numel();
    for (int64_t s = 0; s < args.counts.rows(); ++s) {
        *args.not_finite.as<int32_t>() +=
            !is_finite_probability(args.probabilities.as<float>()[s * E]);
        for (int64_t i = 0; i < E; ++i) {
            args.chosen.as<int32_t>()[i] += args.counts.as<int32_t>()[s * E + i];
            args.mass.as<int32_t>()[i] +=
                mass_of(args.probabilities.as<float>()[s * E + i], args.unit);
            if (args.dropped)
                *args.dropped.as<int32_t>() +=
                    dropped_of(args.counts.as<int32_t>()[s * E + i], args.capacity);
        }
    }
}

void balance_biases(Stream& stream, const std::vector<BalanceSegment>& segments, float rate,
                    const StepState* state) {
    if (segments.empty()) return;
    TRAIN_GPT_ON_CUDA(stream.device, balance_biases(stream, segments, rate, state));
    if (changes_nothing(state)) return;
    for (const BalanceSegment& s : segments) {
        int64_t total = 0;
        int directions = 0;
        for (int64_t i = 0; i < s.E; ++i) total += s.chosen[i];
        for (int64_t i = 0; i < s.E; ++i) directions += direction_of(s.chosen[i], total, s.E);
        for (int64_t i = 0; i < s.n; ++i) {
            const int direction = direction_of(s.chosen[s.first + i], total, s.E);
            s.master[i] += bias_change(direction, directions, s.E, rate);
            if (s.weights) s.weights[i] = bf16(s.master[i]);
        }
    }
}

void keep_load(Stream& stream, const KeepLoad& args, const StepState* state) {
    TRAIN_GPT_ON_CUDA(stream.device, keep_load(stream, args, state));
    if (changes_nothing(state)) return;
    std::copy_n(args.chosen.as<int32_t>(), args.chosen.numel(), args.last.as<int32_t>());
    expert_load(stream, args.load, args.chosen);
}

}  // namespace train_gpt
