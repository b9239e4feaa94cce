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
    int64_t step = 0;             // of the checkpoint; may be beyond the configuration's
    LoggedEvaluation evaluation;  // of that step, if there are validation data
};

/// The run in config.run_dir, if its newest checkpoint is whole, is of step `steps` or a later one,
/// and has been evaluated; else nothing.
std::optional<CompleteRun> find_complete_run(const Config& config, int64_t steps,
                                             const Pulse& pulse = {});

/// "already complete: …", and the last validation loss.
std::string describe(const CompleteRun& run, const Config& config, int64_t steps);

}  // namespace train_gpt
