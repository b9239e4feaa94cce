#include "training/sweep/recorded.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "training/files/checkpoint.h"
#include "training/report/recorded_run.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

double mean_of_last_tenth(const MetricsTable& training, int64_t step, int64_t first) {
    const int64_t after = step - std::max<int64_t>((step - first) / 10, 1);
    const std::vector<double> losses = training.column("loss");
    // If no step of the tenth was logged (log.every), the last loss before
    double sum = 0, last = std::nan("");
    int count = 0;
    for (size_t row = 0; row < training.rows(); ++row) {
        const auto at = static_cast<int64_t>(training.step[row]);
        if (at > step) continue;
        last = losses[row];
        if (at <= after) continue;
        sum += losses[row];
        ++count;
    }
    return count > 0 ? sum / count : last;
}

}  // namespace

const char* field_of(Measure measure) {
    return measure == Measure::val_loss            ? "val_loss"
           : measure == Measure::val_bits_per_byte ? "val_bits_per_byte"
                                                   : "loss";
}

const char* name_of(Measure measure) {
    return measure == Measure::val_loss            ? "validation loss"
           : measure == Measure::val_bits_per_byte ? "validation bits per byte"
                                                   : "training loss";
}

RunRecord read_record(const fs::path& folder, Measure measure, int64_t first) {
    RunRecord record;
    if (!fs::exists(folder / "metrics.jsonl")) return record;
    const RecordedRun run(folder);
    if (const auto checkpoints = list_checkpoints(folder); !checkpoints.empty())
        record.step = checkpoint_step(checkpoints.front());
    const auto& history = run.history();
    record.complete = !history.empty() && history.back().value("event", "") == "end" &&
                      history.back().value("reason", "") == "complete";
    if (!record.complete) return record;
    record.loss = measure == Measure::training_loss
                      ? mean_of_last_tenth(run.training(), run.last_step(), first)
                      : run.evaluations().last(field_of(measure));
    return record;
}

double training_loss_before(const fs::path& folder, int64_t step, int64_t first) {
    if (!fs::exists(folder / "metrics.jsonl")) return std::nan("");
    return mean_of_last_tenth(RecordedRun(folder).training(), step, first);
}

}  // namespace train_gpt
