#include "training/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace train_gpt {

int64_t total_steps(const Config& config, int64_t epoch_tokens) {
    const auto& schedule = config.schedule;
    const int64_t per_step = config.batch.tokens_per_step;
    int64_t steps = schedule.steps;
    if (schedule.tokens > 0) steps = (schedule.tokens - 1) / per_step + 1;
    if (schedule.epochs > 0) {
        if (epoch_tokens <= 0)
            throw Error(
                "schedule.epochs = ", schedule.epochs,
                " gives no steps, since the training data holds no whole sequence; use more data");
        const double wanted = std::ceil(schedule.epochs * static_cast<double>(epoch_tokens) /
                                        static_cast<double>(per_step));
        if (wanted > 1e15)
            throw Error("schedule.epochs = ", schedule.epochs, " gives ", wanted,
                        " steps, more than can be counted; lower it");
        steps = static_cast<int64_t>(wanted);
    }
    steps = std::max<int64_t>(steps, 1);
    if (schedule.warmup_steps > steps)
        throw Error("schedule.warmup_steps = ", schedule.warmup_steps, " is more than the run's ",
                    steps, " steps; shorten the warm-up or lengthen the run");
    return steps;
}

double learning_rate(const Config& config, int64_t step, int64_t total_steps) {
    const double peak_rate = config.optimizer.learning_rate;
    const auto& schedule = config.schedule;
    const Decay decay = schedule.decay;
    // Divide first: the quotient is exactly 1 at the end, where rate · W / W may be off by a bit.
    if (step < schedule.warmup_steps)
        return peak_rate *
               (static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps));

    const int64_t peak = std::max<int64_t>(schedule.warmup_steps - 1, 0), last = total_steps - 1;
    int64_t start = peak;  // the last step at the peak rate
    if (decay == Decay::wsd) {
        const auto decaying =
            std::llround(schedule.decay_fraction * static_cast<double>(total_steps));
        start = std::max(peak, last - std::max<int64_t>(decaying, 1));
    }
    if (decay == Decay::constant || step <= start) return peak_rate;

    const double x =
        std::min(1.0, static_cast<double>(step - start) / static_cast<double>(last - start));
    const double share =
        decay == Decay::cosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * x)) : 1.0 - x;
    return peak_rate * (schedule.final_fraction + (1.0 - schedule.final_fraction) * share);
}

}  // namespace train_gpt
