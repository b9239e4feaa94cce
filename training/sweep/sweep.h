// A sweep: runs of the same configuration with other values of some keys, and other seeds, as child
// processes. The folder of a sweep has
//
//   NAME/                the folder of a run (run_name())
//   NAME/given.json      the run's configuration, as the sweep wrote it before the run began
//   NAME/output.txt      what the run has printed, all its starts one after another
//   sweep.json           what was found: summary_json()
//   report.html          the same as a page
//   lock                 held while a sweep writes into the folder
//
// Everything that a sweep knows is in these folders, so that the same command continues a sweep.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "training/config/config.h"
#include "training/sweep/recorded.h"
#include "training/sweep/sweep_arguments.h"
#include "training/sweep/variants.h"

namespace train_gpt {

/// A run of a sweep before it begins.
struct PlannedRun {
    std::string name;
    size_t combination = 0;
    uint64_t seed = 0;
    Config config;
    std::string decay_from = {};  // schedule.decay_from as it was given; config has its checkpoint
    int64_t first_step = 0;       // first_step_of(): the run trains the steps after it,
    int64_t steps = 0;            // up to this one; needed if the sweep halves
};

struct SweepPlan {
    std::filesystem::path folder;
    std::vector<VariedKey> keys;
    std::vector<Combination> combinations;
    std::vector<PlannedRun> runs;
    Measure measure = Measure::val_loss;
    SweepOptions options = {};
};

/// The steps after which --halve stops the worse half of the combinations: a quarter and half of
/// the steps that a run trains, which are those after `first` up to `steps`. Combinations are
/// compared by their mean training loss before the step (training_loss_before()): runs with one
/// seed have trained on the same samples.
std::vector<int64_t> halving_points(int64_t first, int64_t steps);

/// Trains what is left to train, writes sweep.json and report.html, and prints the result to
/// stdout. `say` prints a line about progress. Returns the exit code: 0 if all runs have finished
/// or were stopped by --halve; 1 if one has failed; 75 or 130 if some were stopped early. Throws
/// Error if the folder belongs to something else, or has runs of another configuration.
int run_sweep(const SweepPlan& plan, const std::function<void(const std::string&)>& say);

}  // namespace train_gpt
