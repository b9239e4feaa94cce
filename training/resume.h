// Where a run starts: after the step of its newest checkpoint, or at step 0 with random weights or
// another model's weights. All ranks call these functions together, except record_start(), which
// only the first rank calls.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "parallel/world.h"
#include "training/config/config.h"
#include "training/files/position.h"
#include "training/files/run_folder.h"
#include "training/files/token_ids.h"
#include "training/run_data.h"
#include "training/run_start.h"
#include "training/trainer.h"
#include "training/watch/progress.h"

namespace train_gpt {

/// Returns what to print for a run that has nothing left to do; empty for other runs. Throws Error
/// if the run in the folder has another model.
std::string describe_if_complete(const Config& config, const RunData& data, const World& world,
                                 Progress& progress);

/// Copies the checkpoint of schedule.decay_from into a new run's folder, from where the run
/// resumes. Before it writes anything, throws Error if the run cannot continue from it.
void begin_decay(const Config& config, const RunData& data, const World& world);

/// The position where a new run starts.
RunPosition start_of(const Config& config, const RunData& data);

/// Restores weights and optimizer state from the newest complete checkpoint of the run folder.
/// Returns the position where the run continues, or nothing if the run is new. The steps that
/// follow have the configuration's batch. If seed, sequence length or training data have changed,
/// the order of the data begins anew. Throws Error if the checkpoint is of another model. Prints
/// what else has changed since.
std::optional<RunPosition> resume(const Config& config, const RunData& data, Trainer& trainer,
                                  const World& world, Progress& progress);

/// Sets the weights that a new run starts from: the weights of the model that model.init_from
/// names, or random weights.
void initialize_weights(const Config& config, const RunData& data, Trainer& trainer,
                        const World& world, Progress& progress);

/// The ids of tokens for the run's checkpoints. A run that resumes takes them from its checkpoint,
/// a run with model.init_from from that model; adapt_token_ids() adapts them to the run's
/// tokenizer. Another run takes the ids of its tokenizer.
TokenIds run_token_ids(const Config& config, const RunData& data, std::optional<int64_t> resumed,
                       const World& world);

/// Writes config.json, manifest.json and choices.json; for a run that resumes, prints which data
/// and choices have changed.
void record_start(const RunFolder& folder, const RunStart& start, Progress& progress);

}  // namespace train_gpt
