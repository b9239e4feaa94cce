#include "training/sweep/sweep.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "base/printable.h"
#include "parallel/launch/place.h"
#include "training/commands/commands.h"
#include "training/interrupt.h"
#include "training/run_data.h"
#include "training/schedule.h"

namespace train_gpt::commands {

namespace {

/// What the runs are compared by: losses per token mean nothing across tokenizers.
Measure measure_of(const Config& config, const std::vector<VariedKey>& keys) {
    if (config.data.val.empty()) return Measure::training_loss;
    const bool other_tokens =
        std::ranges::any_of(keys, [](const VariedKey& key) { return key.key == "tokenizer.path"; });
    return other_tokens ? Measure::val_bits_per_byte : Measure::val_loss;
}

/// The runs of one combination. Everything that a run needs is opened and checked here, before the
/// first run begins.
void add_runs(const CommandLine& line, size_t c, SweepPlan& plan) {
    const Combination& combination = plan.combinations[c];
    CommandLine with = line;
    with.overrides.insert(with.overrides.end(), combination.overrides.begin(),
                          combination.overrides.end());
    const std::string decay_from = given_config(with).schedule.decay_from;
    Config config = load_config(with, 1, DecaysOf::sweep);
    require_run_inputs(config, line.config);
    const RunData data(config, line.config);
    plan.folder = config.run_dir;
    plan.measure = measure_of(config, plan.keys);
    const int64_t steps = total_steps(config, data.use().epoch_tokens());
    for (uint64_t first = config.seed, s = 0; s < static_cast<uint64_t>(line.sweep.seeds); ++s) {
        config.seed = first + s;
        const std::string name = run_name(plan.keys, combination, config.seed);
        config.run_dir = (plan.folder / name).string();
        plan.runs.push_back({.name = name,
                             .combination = c,
                             .seed = config.seed,
                             .config = config,
                             .decay_from = decay_from,
                             .first_step = first_step_of(config),
                             .steps = steps});
    }
}

}  // namespace

int sweep(const CommandLine& line) {
    const Place place =
        find_place([](const std::string& name) { return std::getenv(name.c_str()); }, true);
    if (place.through == Place::Through::mpi || place.size > 1)
        throw UsageError("sweep starts its runs itself, each as a single process; run it without ",
                         "a launcher of ranks (", place.variable, " is set)");
    SweepPlan plan{.folder = {},
                   .keys = varied_keys(line.sweep.vary),
                   .combinations = {},
                   .runs = {},
                   .options = line.sweep};
    plan.combinations = combinations_of(plan.keys);
    for (size_t c = 0; c < plan.combinations.size(); ++c) add_runs(line, c, plan);
    catch_interrupts();
    // With --json, stdout has the result alone.
    std::FILE* const to = line.sweep.json ? stderr : stdout;
    return run_sweep(plan, [&](const std::string& text) {
        std::fprintf(to, "%s\n", printable(text).c_str());
        std::fflush(to);
    });
}

}  // namespace train_gpt::commands
