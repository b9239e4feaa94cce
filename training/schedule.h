// How long a run is, and its learning rate at every step.
#pragma once
#include <cstdint>

#include "training/config.h"

namespace train_gpt {

/// Steps of the whole run: schedule.steps, or schedule.tokens or schedule.epochs · epoch_tokens
/// divided by batch.tokens_per_step, rounded up, at least 1. epoch_tokens: training tokens of one
/// pass over the data, used with schedule.epochs only. Throws Error when the data is empty, the run
/// would be too long to count, or the warm-up does not fit into it.
int64_t total_steps(const Config& config, int64_t epoch_tokens);

/// The learning rate of a step, counted from 0. With L = optimizer.learning_rate, W =
/// schedule.warmup_steps, N = total_steps and f = schedule.final_fraction:
///
///   warm-up    L · (step + 1) / W in steps 0 … W-1, so that step W-1 has exactly L
///   constant   L from there on
///   cosine     L · (f + (1 - f) · (1 + cos(π·x)) / 2)
///   linear     L · (f + (1 - f) · (1 - x))
///   wsd        L, then linear over the last schedule.decay_fraction · N steps (at least one; none of the warm-up):
///              warm-up–stable–decay, Hu et al. 2024, arXiv 2404.06395
///
/// x runs from 0 at the peak (step W-1, or step 0 without warm-up) to 1 at step N-1: the last step has exactly f · L.
/// A run that is nothing but warm-up (N <= W), or one step, ends at the peak. Steps from N on keep
/// the last rate.
double learning_rate(const Config& config, int64_t step, int64_t total_steps);

}  // namespace train_gpt
