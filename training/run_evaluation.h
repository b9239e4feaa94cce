// The evaluations of a run: computed by all ranks, shown and logged by one.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "dataloader/loader.h"
#include "training/evaluation.h"
#include "training/trainer.h"
#include "training/watch/metrics.h"
#include "training/watch/progress.h"

namespace train_gpt {

/// What a run is evaluated on.
struct Evaluations {
    std::unique_ptr<ValidationWindows> validation;  // null: none
    std::optional<HellaSwag> hellaswag;
    const Tokenizer* tokenizer = nullptr;
};

std::string describe_validation(int64_t step, double nats_per_token, double bits_per_byte);
/// The best evaluation up to a step in a run folder; empty if it is the one of this step.
std::string describe_best(const std::filesystem::path& run_dir, int64_t step);

/// What computes an evaluation, after which step, and where it is shown and logged.
struct EvaluationPlace {
    Trainer& run;
    int64_t step;
    const Mesh& mesh;
    Progress& progress;
    MetricsLog& metrics;
};

/// Computes the validation loss, and HellaSwag where the configuration names it. Shows its progress
/// on a terminal. Returns false, on all ranks, if a signal to one of them interrupted it.
bool evaluate_and_log(const Evaluations& on, const EvaluationPlace& at);

/// Computes the validation loss that a new run starts from, without HellaSwag, if that takes 30
/// seconds at most. `least_seconds`: the time it takes at the measured speed of matrix products.
/// The evaluation is abandoned at a signal, and when it turns out to take longer, which is printed.
void evaluate_at_start(const Evaluations& on, const EvaluationPlace& at, double least_seconds);

/// A note for the user where `tokenize` took the validation data from the end of the text, so that
/// their loss may stay above the training loss; empty if it did not.
std::string note_on_validation(const std::string& glob);

}  // namespace train_gpt
