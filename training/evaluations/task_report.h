// Results of tasks as people and programs read them.
#pragma once
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/json_text.h"
#include "training/evaluations/task_scores.h"

namespace train_gpt {

/// A table of the results, and CORE if they are all of its tasks. Lines that end with newlines.
std::string describe_tasks(std::span<const TaskResult> results);

/// A few words for a line of progress: "arc_easy 0.312 ± 0.021, piqa …", or CORE.
std::string summary_of_tasks(std::span<const TaskResult> results);

/// {"tasks": […], "core": {…}}. docs/evaluations.md describes the fields. What is not known is left
/// out.
Json json_of(std::span<const TaskResult> results);

/// What metrics.jsonl has of an evaluation: task/NAME/accuracy, …/stderr, …/centered and
/// …/bits_per_byte, and core/VERSION with core/VERSION/stderr.
std::vector<std::pair<std::string, double>> metrics_of_tasks(std::span<const TaskResult> results);

/// One line of JSON for each item: its line in the file, the losses of its answers, and what the
/// model decided.
std::string items_json(const Task& task, std::span<const AnswerLosses> losses);

}  // namespace train_gpt
