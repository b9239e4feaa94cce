// schedule.decay_from: a run that begins with the whole state of another run's checkpoint (weights,
// optimizer, place in the data) and only decays. So one run with a constant learning rate gives
// annealed runs of several lengths.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "base/file.h"
#include "training/config/config.h"

namespace train_gpt {

/// What run_dir is the folder of.
enum class DecaysOf { run, sweep };

/// The configuration as its run uses it. With schedule.decay_from and wsd, decay_from becomes the
/// checkpoint's folder, and the run has D steps after the checkpoint's S, whatever length is given.
/// D is schedule.decay_steps; if that is 0, the decay is the share schedule.decay_fraction of S + D
/// steps. A run that has begun keeps its checkpoint and S, also if the other run has trained more
/// steps since; the runs of a sweep that name the same path have the same checkpoint, whenever they
/// begin. Throws Error if there is no such checkpoint, or the run in run_dir began from another
/// one.
Config with_decay_from(Config config, DecaysOf decays = DecaysOf::run);

/// The number of steps before the first step that a run trains: S with schedule.decay_from, else 0.
/// `config` is from with_decay_from().
int64_t first_step_of(const Config& config);

/// Records in a run's folder from where it decays, unless the folder has a record. `given`:
/// schedule.decay_from before with_decay_from().
void record_decay_start(const std::filesystem::path& run_dir, const std::string& given,
                        const Config& config);

/// The checkpoint of schedule.decay_from, if run_dir has no checkpoint yet.
std::optional<std::filesystem::path> decay_start_to_copy(const Config& config);

/// Copies this checkpoint into run_dir, from where the run resumes. Throws Error if the checkpoint
/// is damaged, or if run_dir belongs to something else.
void copy_decay_start(const Config& config, const Pulse& pulse);

}  // namespace train_gpt
