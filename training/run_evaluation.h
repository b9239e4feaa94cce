// The evaluations of a run: made by all ranks, shown and logged by one.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "dataloader/loader.h"
#include "training/evaluation.h"
#include "training/metrics.h"
#include "training/progress.h"
#include "training/trainer.h"

namespace train_gpt {

/// What a run is evaluated on.
struct Evaluations {
    std::unique_ptr<ValidationWindows> validation;  // null: none
    std::optional<HellaSwag> hellaswag;
    const Tokenizer* tokenizer = nullptr;
};

std::string describe_validation(int64_t step, double nats_per_token, double bits_per_byte);

/// Who makes an evaluation, after which step, and where it is shown and logged.
struct EvaluationPlace {
    Trainer& run;
    int64_t step;
    const World& world;
    Progress& progress;
    MetricsLog& metrics;
};

/// Validation loss, and HellaSwag where the configuration names it. On a terminal it shows how far it is. False, on all ranks,
/// where a signal to one of them came in between.
bool evaluate_and_log(const Evaluations& on, const EvaluationPlace& at);

/// The validation loss that a new run starts from, without HellaSwag, where that takes half a minute at most. `least_seconds`:
/// what it takes at the speed that was measured for matrix products. It is given up when it turns out to take longer, which is
/// said, and at a signal.
void evaluate_at_start(const Evaluations& on, const EvaluationPlace& at, double least_seconds);

/// A note for people where `tokenize` took the validation data from the end of the text, whose loss may then stay above that of
/// training; empty where it did not.
std::string note_on_validation(const std::string& glob);

}  // namespace train_gpt
