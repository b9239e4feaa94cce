#include "training/schedule.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <utility>

#include "base/error.h"

namespace train_gpt {

void plan_steps(TokenCount& tokens, int64_t step, const Config& config) {
    const auto& batch = config.batch;
    tokens.change(step, batch.tokens_per_step);
    if (batch.warmup_tokens == 0) return;
    const int64_t least = batch.warmup_tokens_per_step, most = batch.tokens_per_step / least;
    // k is larger than this many parts from so many tokens on. In two terms, which do not overflow.
    const auto end_of = [&](int64_t k) {
        const auto parts = static_cast<uint64_t>(most - 1), n = static_cast<uint64_t>(k),
                   whole = static_cast<uint64_t>(batch.warmup_tokens) / parts,
                   rest = static_cast<uint64_t>(batch.warmup_tokens) % parts;
        return static_cast<int64_t>(whole * n + (rest * n + parts - 1) / parts);
    };
    for (int64_t k = 1; k < most; ++k) {
        const int64_t here = tokens.before(step), left = end_of(k) - here;
        if (left <= 0) continue;
        tokens.change(step, k * least);
        step += (left - 1) / (k * least) + 1;
        tokens.change(step, batch.tokens_per_step);
    }
}

std::optional<int64_t> scheduled_tokens(const Config& config, int64_t epoch_tokens) {
    const auto& schedule = config.schedule;
    if (schedule.tokens > 0) return schedule.tokens;
    if (schedule.epochs == 0) return {};
    if (epoch_tokens <= 0)
        throw Error(
            "schedule.epochs = ", schedule.epochs,
            " gives no steps, since the training data holds no whole sequence; use more data");
    const double wanted = std::ceil(schedule.epochs * static_cast<double>(epoch_tokens));
    if (wanted > 1e18)
        throw Error("schedule.epochs = ", schedule.epochs, " gives ", wanted,
                    " tokens, more than can be counted; lower it");
    return static_cast<int64_t>(wanted);
}

int64_t total_steps(const Config& config, int64_t epoch_tokens, const TokenCount& tokens) {
    const auto& schedule = config.schedule;
    int64_t steps = schedule.steps;
    if (const auto wanted = scheduled_tokens(config, epoch_tokens)) {
        auto last = tokens.parts().rbegin();
        // A batch warm-up may be longer than the run.
        while (config.batch.warmup_tokens > 0 && last->first_token >= *wanted &&
               std::next(last) != tokens.parts().rend())
            ++last;
        const int64_t left = *wanted - last->first_token;
        steps = last->first_step + (left > 0 ? (left - 1) / last->per_step + 1 : 0);
    }
    steps = std::max<int64_t>(steps, 1);
    if (schedule.warmup_steps > steps)
        throw Error("schedule.warmup_steps = ", schedule.warmup_steps, " is more than the run's ",
                    steps, " steps; shorten the warm-up or lengthen the run");
    return steps;
}

int64_t total_steps(const Config& config, int64_t epoch_tokens) {
    TokenCount tokens(config.batch.tokens_per_step);
    plan_steps(tokens, 0, config);
    return total_steps(config, epoch_tokens, tokens);
}

double learning_rate(const Config& config, int64_t step, int64_t total_steps,
                     const TokenCount& tokens) {
    const double peak_rate = config.optimizer.learning_rate;
    const auto& schedule = config.schedule;
    const Decay decay = schedule.decay;
    // Divide first: the quotient is exactly 1 at the end, where rate · W / W may be off by a bit.
    if (step < schedule.warmup_steps)
        return peak_rate *
               (static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps));

    // Where a step is within the run: in tokens, or in steps if these are the schedule's measure.
    const int64_t unit = schedule.steps > 0 ? 1 : tokens.per_step();
    const auto at = [&](int64_t s) { return schedule.steps > 0 ? s : tokens.before(s); };
    const int64_t peak = at(std::max<int64_t>(schedule.warmup_steps - 1, 0)),
                  last = at(total_steps - 1), here = at(step);
    int64_t start = peak;  // of the last step at the peak rate
    if (decay == Decay::wsd) {
        const double length = static_cast<double>(at(total_steps)) / static_cast<double>(unit);
        const auto decaying = schedule.decay_steps > 0
                                  ? schedule.decay_steps
                                  : std::llround(schedule.decay_fraction * length);
        start = std::max(peak, last - std::max<int64_t>(decaying, 1) * unit);
    }
    if (decay == Decay::constant || here <= start) return peak_rate;

    const double x =
        std::min(1.0, static_cast<double>(here - start) / static_cast<double>(last - start));
    const double share =
        decay == Decay::cosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * x)) : 1.0 - x;
    return peak_rate * (schedule.final_fraction + (1.0 - schedule.final_fraction) * share);
}

Schedule::Schedule(const Config& config, int64_t epoch_tokens, RunPosition start)
    : config_(config),
      start_(std::move(start)),
      steps_(total_steps(config, epoch_tokens, start_.tokens)),
      tokens_(scheduled_tokens(config, epoch_tokens).value_or(start_.tokens.before(steps_))) {}

RunPosition Schedule::position(int64_t step) const {
    RunPosition position = start_;
    position.step = step;
    return position;
}

}  // namespace train_gpt
