// A job that continues without the hosts that it loses. The supervisor starts the ranks of a run,
// reads how they end, checks the hosts that are left, and starts the ranks again. The run resumes
// from its newest whole checkpoint, as `train` always does.
//
// A start:
//   1. each host is asked, at the same time, whether it is there: a `selfcheck` of its own ranks
//   2. hosts that fail or do not answer get no ranks; spares take their places
//   3. if there are fewer ranks than the job began with, `plan` on a host says on how many of them
//      the run fits
//   4. if no host has failed in 1, a `selfcheck` of all ranks together; hosts that it names get no
//      ranks, and 2 to 4 come again
//   5. the ranks train
//
// Another start follows if ranks were lost or have failed (decisions.h). The job ends after
// max_restarts starts without a new checkpoint.
#pragma once
#include "training/supervise/job.h"

namespace train_gpt {

/// Runs the job to its end. Returns the exit code. Throws Error for a configuration that cannot run
/// at all.
int supervise(const SupervisedJob& job);

}  // namespace train_gpt
