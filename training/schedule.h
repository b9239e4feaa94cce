// How long a run is, and its learning rate at every step.
#pragma once
#include <cstdint>
#include <optional>

#include "training/config/config.h"
#include "training/files/position.h"

namespace train_gpt {

/// Sets the tokens of `step` and all later steps as the configuration has them. They are
/// N = batch.tokens_per_step, or with a batch warm-up, where S = batch.warmup_tokens_per_step,
/// W = batch.warmup_tokens and t is what the run has read before the step:
///
///   S · k,  k = min(N / S, 1 + floor((N / S - 1) · t / W))
///
/// So a step's size depends on t alone, and a run that resumes has the sizes that it would have
/// had.
void plan_steps(TokenCount& tokens, int64_t step, const Config& config);

/// The tokens that the schedule asks for: schedule.tokens, or schedule.epochs · epoch_tokens
/// rounded up. Nothing if the schedule asks for steps. epoch_tokens: training tokens of one pass
/// over the data. Throws Error if the data is empty or there are too many tokens to count.
std::optional<int64_t> scheduled_tokens(const Config& config, int64_t epoch_tokens);

/// The number of steps of the whole run, at least 1. It is schedule.steps. If the schedule asks for
/// tokens, the last step is the step that reaches them. `tokens`: the tokens of each step; they
/// differ if the batch has changed when the run resumed. Throws Error as scheduled_tokens() does,
/// and if the warm-up is longer than the run.
int64_t total_steps(const Config& config, int64_t epoch_tokens, const TokenCount& tokens);
/// The number of steps of a run that has not begun.
int64_t total_steps(const Config& config, int64_t epoch_tokens);

/// The learning rate of a step, counted from 0. With L = optimizer.learning_rate, W =
/// schedule.warmup_steps, N = total_steps and f = schedule.final_fraction:
///
///   warm-up    L · (step + 1) / W in steps 0 … W-1, so that step W-1 has exactly L
///   constant   L from there on
///   cosine     L · (f + (1 - f) · (1 + cos(π·x)) / 2)
///   linear     L · (f + (1 - f) · (1 - x))
///   wsd        L, then linear over the last schedule.decay_steps steps, or if these are 0, over
///              the last schedule.decay_fraction · N steps (at least one, and none of the
///              warm-up): warm-up–stable–decay, Hu et al. 2024, arXiv 2404.06395
///
/// x grows from 0 at the peak to 1 at step N-1, so the last step has exactly f · L. The peak is
/// step W-1, or step 0 without warm-up; with wsd it is the last step with L. If the run's length is
/// given in tokens or epochs, x grows with the tokens before a step, else with the steps. The two
/// differ only if the number of tokens in a step changes. A run that is only warm-up (N <= W), or
/// only one step, ends at the peak. Steps from N on keep the last rate.
double learning_rate(const Config& config, int64_t step, int64_t total_steps,
                     const TokenCount& tokens = TokenCount(1));

/// The schedule of a run that starts or resumes.
class Schedule {
  public:
    /// start: the position where this process begins. Throws Error as total_steps() does.
    Schedule(const Config& config, int64_t epoch_tokens, RunPosition start);

    const RunPosition& start() const { return start_; }
    /// The run's position before a step. The step is not before the first step of this process.
    RunPosition position(int64_t step) const;
    /// The number of steps of the whole run.
    int64_t steps() const { return steps_; }
    /// The tokens that the whole run is meant to read. Steps are whole, so the run may read some
    /// more.
    int64_t tokens() const { return tokens_; }
    int64_t tokens_before(int64_t step) const { return start_.tokens.before(step); }
    int64_t tokens_of(int64_t step) const { return start_.tokens.of_step(step); }
    double learning_rate(int64_t step) const {
        return train_gpt::learning_rate(config_, step, steps_, start_.tokens);
    }

  private:
    Config config_;
    RunPosition start_;
    int64_t steps_, tokens_;
};

}  // namespace train_gpt
