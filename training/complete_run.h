// Whether a run has nothing left to do, found from its folder alone.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "training/config/config.h"
#include "training/files/checkpoint.h"
#include "training/watch/metrics.h"

namespace train_gpt {

struct CompleteRun {
    std::filesystem::path checkpoint;
    int64_t step = 0;             // the checkpoint's; may be beyond the configuration's last step
    LoggedEvaluation evaluation;  // of that step, if there are validation data
};

/// Returns the run in config.run_dir if it is complete, else nothing. A run is complete if its
/// newest checkpoint is from step `steps` or a later step, is undamaged, was trained on verified
/// data, and has been evaluated (if there are validation data).
std::optional<CompleteRun> find_complete_run(const Config& config, int64_t steps,
                                             const Pulse& pulse = {});

/// "already complete: …", and the last validation loss.
std::string describe(const CompleteRun& run, const Config& config, int64_t steps);

}  // namespace train_gpt
