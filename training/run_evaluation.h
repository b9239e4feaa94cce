// The evaluations of a run: computed by all ranks, shown and logged by one.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/loader.h"
#include "training/evaluation.h"
#include "training/evaluations/task_file.h"
#include "training/trainer.h"
#include "training/watch/metrics.h"
#include "training/watch/progress.h"

namespace train_gpt {

/// What a run is evaluated on.
struct Evaluations {
    std::unique_ptr<ValidationWindows> validation;  // null: no validation data
    std::optional<HellaSwag> hellaswag;
    std::vector<Task> tasks;
    const Tokenizer* tokenizer = nullptr;
};

std::string describe_validation(int64_t step, double nats_per_token, double bits_per_byte);
/// Describes the best evaluation up to a step in a run folder. Empty if this step's evaluation is
/// the best.
std::string describe_best(const std::filesystem::path& run_dir, int64_t step);

/// What computes an evaluation, after which step, and where it is shown and logged.
struct EvaluationPlace {
    Trainer& run;
    int64_t step;
    const Mesh& mesh;
    Progress& progress;
    MetricsLog& metrics;
};

/// Computes the validation loss, and HellaSwag and tasks if the configuration names them. Shows the
/// progress on a terminal. Returns false on all ranks if a signal to one of them interrupted the
/// evaluation.
bool evaluate_and_log(const Evaluations& on, const EvaluationPlace& at);

/// Computes the validation loss that a new run starts from, without HellaSwag and tasks. Does so
/// only if it takes 30 seconds at most. `least_seconds`: the time it takes at the measured speed of
/// matrix products. Abandons the evaluation if it takes longer than 30 seconds after all, and
/// prints that. Also abandons it at a signal.
void evaluate_at_start(const Evaluations& on, const EvaluationPlace& at, double least_seconds);

/// A note for the user if `tokenize` took the validation data from the end of the text: their loss
/// may then stay above the training loss. Empty otherwise.
std::string note_on_validation(const std::string& glob);

}  // namespace train_gpt
