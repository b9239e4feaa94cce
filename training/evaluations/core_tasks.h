// CORE (Li et al. 2024, arXiv 2406.11794): the mean centered accuracy over 22 tasks.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "training/evaluations/task_scores.h"

namespace train_gpt {

/// A task of CORE, with the accuracy of guessing in percent by both published tables.
struct CoreTask {
    const char* name;
    double baseline[2];
};
std::span<const CoreTask> core_tasks();

/// The published tables of baselines: v1, and v2 of September 2025, which differs in three tasks.
constexpr const char* core_versions[] = {"v1", "v2"};

/// CORE by each of the tables, with the standard error that the tasks' items give it. Nothing
/// unless all 22 tasks are among the results, by the procedure `core`.
struct CoreScore {
    Estimate by_version[2];
};
std::optional<CoreScore> core_score(std::span<const TaskResult> results);

}  // namespace train_gpt
