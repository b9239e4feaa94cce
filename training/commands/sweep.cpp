#include "training/sweep/sweep.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/printable.h"
#include "parallel/launch/place.h"
#include "training/commands/commands.h"
#include "training/config/config_text.h"
#include "training/interrupt.h"
#include "training/run_data.h"
#include "training/schedule.h"

namespace train_gpt::commands {

namespace {

/// What the runs of a sweep read. Runs that read the same share it: to open many shards takes time.
class OpenedData {
  public:
    explicit OpenedData(std::string file) : file_(std::move(file)) {}

    /// The tokens of one pass over a run's training data. Throws Error as RunData() does.
    int64_t epoch_tokens(const Config& config) {
        Config reads;
        reads.tokenizer = config.tokenizer;
        reads.data = config.data;
        reads.evaluation = config.evaluation;
        reads.model.vocab_size = config.model.vocab_size;
        reads.batch.sequence_length = config.sequence_length();
        const auto [known, is_new] = known_.try_emplace(to_json(reads));
        if (is_new) {
            const RunData data(config, file_);
            known->second = {data.spec().vocab_size, data.use().epoch_tokens()};
        }
        spec_of(config, known->second.vocab_size);  // may throw Error
        return known->second.epoch_tokens;
    }

  private:
    struct Known {
        int64_t vocab_size = 0, epoch_tokens = 0;
    };
    std::string file_;
    std::map<std::string, Known> known_;
};

/// What the runs are compared by, which all of them must have. Losses per token mean nothing across
/// tokenizers, nor losses of different texts.
void choose_measure(SweepPlan& plan, const std::function<void(const std::string&)>& say) {
    const auto varies = [&](const char* key) {
        return std::ranges::any_of(
            plan.keys, [&](const VariedKey& k) { return k.key == key && k.values.size() > 1; });
    };
    for (const char* key : {"data.val", "evaluation.max_tokens"})
        if (varies(key)) {
            plan.measure = Measure::training_loss;
            return say(concat("note: runs are compared by their training loss, since ", key,
                              " is varied: validation losses would be of different texts"));
        }
    if (plan.runs.front().config.data.val.empty()) {
        plan.measure = Measure::training_loss;
        if (varies("data.train"))
            say("note: data.train is varied and there is no data.val, so runs are compared by "
                "training losses of different texts");
    } else if (varies("tokenizer.path")) {
        plan.measure = Measure::val_bits_per_byte;
    }
}

/// The runs of one combination. Everything that a run needs is opened and checked here, before the
/// first run begins.
void add_runs(const CommandLine& line, size_t c, OpenedData& data, SweepPlan& plan) {
    const Combination& combination = plan.combinations[c];
    CommandLine with = line;
    with.overrides.insert(with.overrides.end(), combination.overrides.begin(),
                          combination.overrides.end());
    const std::string decay_from = given_config(with).schedule.decay_from;
    Config config = config_of_command(with, 1, DecaysOf::sweep);
    require_run_inputs(config, line.config);
    plan.folder = config.run_dir;
    const int64_t steps = total_steps(config, data.epoch_tokens(config));
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
    OpenedData data(line.config);
    for (size_t c = 0; c < plan.combinations.size(); ++c) add_runs(line, c, data, plan);
    catch_interrupts();
    const auto say = [&](const std::string& text) {
        // With --json, stdout has the result alone.
        std::FILE* const to = line.sweep.json ? stderr : stdout;
        std::fprintf(to, "%s\n", printable(text).c_str());
        std::fflush(to);
    };
    choose_measure(plan, say);
    return run_sweep(plan, say);
}

}  // namespace train_gpt::commands
