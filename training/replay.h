// The command `replay`: runs steps of a run again, in a folder of their own, and compares what they
// compute with what the run recorded. The run's folder stays as it is.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "parallel/world.h"
#include "training/config/config.h"
#include "training/report/compare_runs.h"

namespace train_gpt {

struct ReplayOptions {
    std::string run;                     // the run's folder
    int64_t to = 0;                      // the last step
    std::string into = {};               // empty: RUN/replay-STEP
    std::vector<std::string> overrides;  // of the configuration
};

/// Steps to run again.
struct Replay {
    std::filesystem::path run, into, checkpoint;  // no checkpoint: from the beginning
    int64_t first = 0, to = 0;                    // the step of the checkpoint; the last step
    std::string config_file = {};
    Config config = {};                     // of the run at these steps, with run_dir = into
    int ranks = 1;                          // that computed these steps
    std::vector<std::string> devices = {};  // and their devices
    double seconds = 0;                     // of all steps, as recorded; NaN: unknown
    std::vector<std::string> notes = {};    // on what may make results differ
};

/// Finds what a replay starts from: the newest checkpoint before its last step. All ranks call it.
/// Throws Error, also if RUN is not the folder of a run, if the run has not come so far, or has
/// recorded nothing of these steps, and if the folder to write has a run.
Replay plan_replay(const ReplayOptions& options, const World& world);

/// Prints the steps, and the time and memory that they take, and makes the folder that the replay
/// resumes from. `choices`: whose choices are taken (decide()). All ranks call it. Throws Error if
/// the run's device, its training data or the memory is not there.
void begin_replay(const Replay& replay, const std::string& choices, const Device& device,
                  const World& world);

/// Compares the steps in both folders, and prints the first difference. Returns the exit code. All
/// ranks call it.
int compare_replay(const Replay& replay, const World& world);

/// What compare_replay() prints. `found`: the run's records compared with the replay's.
std::string describe_replay(const RunComparison& found, const StepRange& steps);

}  // namespace train_gpt
