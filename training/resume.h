// Where a run starts: after the step of its newest checkpoint, or at step 0 with weights that are
// random or another model's. All ranks call these functions together, but for record_start(), which
// is the first rank's.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "parallel/world.h"
#include "training/choices.h"
#include "training/config.h"
#include "training/progress.h"
#include "training/run_data.h"
#include "training/run_folder.h"
#include "training/trainer.h"

namespace train_gpt {

/// What to say of a run that has nothing left to do; empty for others. Throws Error where the run
/// in the folder is of another model.
std::string describe_if_complete(const Config& config, const RunData& data, const World& world,
                                 Progress& progress);

/// Restores weights and optimizer from the newest whole checkpoint of the run folder and returns
/// its step; nothing when the run is new. Throws Error where that checkpoint is of another model;
/// says what else has changed since.
std::optional<int64_t> resume(const Config& config, const RunData& data, Trainer& trainer,
                              const World& world, Progress& progress);

/// The weights that a new run starts from: random, or those of model.init_from.
void initialize_weights(const Config& config, const RunData& data, Trainer& trainer,
                        const World& world, Progress& progress);

/// What a start leaves in the run's folder.
struct StartRecord {
    const Config& config;
    const Choices& kept;     // of the checkpoint that the run resumes from
    const Choices& choices;  // of this start
    bool resumes = false;
};
/// Writes config.json, manifest.json and choices.json; for a run that resumes it says which data
/// and choices are others now.
void record_start(const RunFolder& folder, const StartRecord& start, Progress& progress);

}  // namespace train_gpt
