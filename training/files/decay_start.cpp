#include "training/files/decay_start.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/json_file.h"
#include "training/files/checkpoint.h"
#include "training/files/run_folder.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* key = "schedule.decay_from";
constexpr const char* record_file = "decay_from.json";

/// Where a run's decay starts.
struct DecayStart {
    std::string checkpoint;
    int64_t step = 0;
};

/// The start of a run that has begun, as copy_decay_start() recorded it.
std::optional<DecayStart> start_of_run(const fs::path& run_dir) {
    const fs::path file = run_dir / record_file;
    if (!fs::exists(file)) return {};
    const Json json = read_json(file);
    return DecayStart{field<std::string>(json, "checkpoint", file),
                      field<int64_t>(json, "step", file)};
}

/// Whether a path names this checkpoint, or the folder of its run.
bool names(const std::string& path, const std::string& checkpoint) {
    const auto whole = [](const fs::path& p) { return fs::weakly_canonical(p); };
    return whole(path) == whole(checkpoint) ||
           whole(path) == whole(fs::path(checkpoint).parent_path());
}

DecayStart find_start(const Config& config) {
    const std::string& given = config.schedule.decay_from;
    if (const auto begun = start_of_run(config.run_dir)) {
        if (names(given, begun->checkpoint)) return *begun;
        throw Error("the run in ", config.run_dir, " decays from ", begun->checkpoint,
                    ", not from ", given, "; choose another run_dir, or change ", key, " back");
    }
    if (!config.run_dir.empty() && !list_checkpoints(config.run_dir).empty())
        throw Error(key, " begins a run, and ", config.run_dir,
                    " has one already; choose another run_dir");
    const fs::path checkpoint = find_checkpoint(given);
    return {checkpoint.string(), checkpoint_step(checkpoint)};
}

}  // namespace

Config with_decay_from(Config config) {
    Config::Schedule& schedule = config.schedule;
    if (schedule.decay_from.empty() || schedule.decay != Decay::wsd) return config;
    if (schedule.decay_steps == 0 && schedule.decay_fraction >= 1)
        throw Error(key,
                    " needs schedule.decay_steps, or a schedule.decay_fraction below 1: the decay "
                    "is a share of all steps, of which some were before it");
    const DecayStart start = find_start(config);
    const double share = schedule.decay_fraction / (1 - schedule.decay_fraction);
    if (schedule.decay_steps == 0)
        schedule.decay_steps = std::max<int64_t>(
            1, std::llround(static_cast<double>(start.step) * std::min(share, 1e6)));
    schedule.decay_from = start.checkpoint;
    schedule.steps = start.step + schedule.decay_steps;
    schedule.tokens = 0;
    schedule.epochs = 0;
    return config;
}

void copy_decay_start(const Config& config, const Pulse& pulse) {
    const fs::path run_dir = config.run_dir;
    if (config.schedule.decay_from.empty() || !list_checkpoints(run_dir).empty()) return;
    const fs::path checkpoint = config.schedule.decay_from;
    verify_checkpoint(checkpoint, Verify::everything, pulse);
    const RunFolder folder(run_dir);
    const fs::path place = checkpoint_path(run_dir, checkpoint_step(checkpoint));
    const fs::path unfinished = place.string() + ".tmp";
    write_file(run_dir / record_file, to_text({{"checkpoint", checkpoint.string()},
                                               {"step", checkpoint_step(checkpoint)}}) +
                                          "\n");
    try {
        fs::remove_all(unfinished);
        make_directory(unfinished);
        for (const auto& entry : fs::directory_iterator(checkpoint)) {
            fs::copy_file(entry.path(), unfinished / entry.path().filename());
            if (pulse) pulse();
        }
        sync_directory(unfinished);
        fs::rename(unfinished, place);
        sync_directory(run_dir);
    } catch (const fs::filesystem_error& error) {
        throw Error("cannot copy ", checkpoint.string(), " to ", place.string(), ": ",
                    error.code().message(), "; make room for a checkpoint there");
    }
}

}  // namespace train_gpt
