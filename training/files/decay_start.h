// schedule.decay_from: a run that begins with the whole state of another run's checkpoint (weights,
// optimizer, place in the data) and only decays. So one run with a constant learning rate gives
// annealed runs of several lengths.
#pragma once
#include "base/file.h"
#include "training/config/config.h"

namespace train_gpt {

/// The configuration as its run uses it. With schedule.decay_from and wsd: that checkpoint's own
/// folder; after its S steps come D more, whatever length is given. D is schedule.decay_steps, or
/// if it is 0, as many as make the decay the share schedule.decay_fraction of all S + D steps.
/// A run that has begun keeps its checkpoint and S, also if the other run has gone on since.
/// Throws Error if there is no such checkpoint, or the run in run_dir began from another one.
Config with_decay_from(Config config);

/// Copies the checkpoint of schedule.decay_from into run_dir, from where the run resumes. Does
/// nothing if run_dir has a checkpoint. Throws Error if the checkpoint is damaged, or if run_dir
/// belongs to something else.
void copy_decay_start(const Config& config, const Pulse& pulse);

}  // namespace train_gpt
