// A job that continues without the hosts that it loses. The supervisor starts the ranks of a run,
// reads how they end, checks the hosts that are left, and starts the ranks again. The run resumes
// from its newest whole checkpoint, as `train` always does.
//
// A start:
//   1. all hosts are asked at the same time whether they are there; after a failure, by a
//      `selfcheck` of their own ranks
//   2. hosts that fail or do not answer get no ranks; spares take their places
//   3. `plan` on a host says whether the run fits; after a failure, on how many of the ranks that
//      are left
//   4. a `selfcheck` of all ranks together, unless a host has failed in 1 after a failure, which
//      explains the failure; hosts that it names get no ranks, and 2 to 4 come again
//   5. the ranks train
//
// Another start follows if ranks were lost or have failed (supervise_decisions.h). The job ends
// after max_restarts starts without a new checkpoint.
#pragma once
#include "training/supervise/job.h"

namespace train_gpt {

/// Runs the job to its end. Returns the exit code. Throws Error for a configuration that cannot run
/// at all.
int supervise(const SupervisedJob& job);

}  // namespace train_gpt
