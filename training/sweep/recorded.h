// How far a run of a sweep is, and how good, as its folder records it.
#pragma once
#include <cmath>
#include <cstdint>
#include <filesystem>

namespace train_gpt {

/// What the runs of a sweep are compared by. Lower is better.
enum class Measure { val_loss, val_bits_per_byte, training_loss };

/// The field of metrics.jsonl: "val_loss", "val_bits_per_byte" or "loss".
const char* field_of(Measure measure);
/// "validation loss", "validation bits per byte" or "training loss".
const char* name_of(Measure measure);

struct RunRecord {
    bool complete = false;  // the run's last start ended as complete
    int64_t step = 0;       // of the newest checkpoint; 0: there is none
    /// The last evaluation of a complete run, or training_loss_before().
    double loss = std::nan("");
};
/// Reads a run's folder. Where there is none, nothing has been done. `first`: the step after which
/// the run begins (first_step_of()).
RunRecord read_record(const std::filesystem::path& folder, Measure measure, int64_t first);

/// The mean training loss of the last tenth of the steps after `first` up to `step`, over the steps
/// that are logged. NaN if none is.
double training_loss_before(const std::filesystem::path& folder, int64_t step, int64_t first);

}  // namespace train_gpt
