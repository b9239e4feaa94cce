// How long a run is, and its learning rate at every step.
#pragma once
#include <cstdint>

#include "training/config.h"

namespace train_gpt {

/// Steps of the whole run: schedule.steps, or schedule.tokens or schedule.epochs · epoch_tokens
/// divided by batch.tokens_per_step and rounded up; at least 1. epoch_tokens: training tokens of
/// one pass over the data, used only with schedule.epochs. Throws Error when the data is empty, the
/// run has too many steps to count, or the warm-up is longer than the run.
int64_t total_steps(const Config& config, int64_t epoch_tokens);

/// The learning rate of a step, counted from 0. With L = optimizer.learning_rate, W =
/// schedule.warmup_steps, N = total_steps and f = schedule.final_fraction:
///
///   warm-up    L · (step + 1) / W in steps 0 … W-1, so that step W-1 has exactly L
///   constant   L from there on
///   cosine     L · (f + (1 - f) · (1 + cos(π·x)) / 2)
///   linear     L · (f + (1 - f) · (1 - x))
///   wsd        L, then linear over the last schedule.decay_fraction · N steps (at least one, and
///              none of the warm-up): warm-up–stable–decay, Hu et al. 2024, arXiv 2404.06395
///
/// x runs from 0 at the peak (step W-1, or step 0 without warm-up; with wsd the last step with L)
/// to 1 at step N-1, so the last step has exactly f · L. A run that is only warm-up (N <= W), or
/// only one step, ends at the peak. Steps from N on keep the last rate.
double learning_rate(const Config& config, int64_t step, int64_t total_steps);

}  // namespace train_gpt
