#include "training/files/decay_start.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"
#include "base/json_file.h"
#include "base/mapped_pages.h"
#include "training/files/checkpoint.h"
#include "training/files/run_folder.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* key = "schedule.decay_from";
constexpr const char* record_file = "decay_from.json";

/// Where a run's decay starts.
struct DecayStart {
    std::string given;  // schedule.decay_from, as the user wrote it
    std::string checkpoint;
    int64_t step = 0;
};

/// The start that a run's folder has recorded.
std::optional<DecayStart> start_of_run(const fs::path& run_dir) {
    const fs::path file = run_dir / record_file;
    if (!fs::exists(file)) return {};
    const Json json = read_json(file);
    return DecayStart{optional_field<std::string>(json, "given", "", file),
                      field<std::string>(json, "checkpoint", file),
                      field<int64_t>(json, "step", file)};
}

/// Without a trailing slash.
fs::path whole(const fs::path& path) {
    const fs::path canonical = fs::weakly_canonical(path);
    return canonical.has_filename() ? canonical : canonical.parent_path();
}

/// Whether a path names this checkpoint, or the folder of its run.
bool names(const std::string& path, const std::string& checkpoint) {
    return whole(path) == whole(checkpoint) || whole(path) == whole(checkpoint).parent_path();
}

/// The start of a run of a sweep that was given the same path.
std::optional<DecayStart> start_of_sweep(const fs::path& sweep, const std::string& given) {
    std::error_code code;
    for (fs::directory_iterator entry(sweep, code), end; !code && entry != end;
         entry.increment(code))
        if (auto begun = start_of_run(entry->path());
            begun && !begun->given.empty() && whole(begun->given) == whole(given))
            return begun;
    return {};
}

DecayStart find_start(const std::string& given) {
    const fs::path checkpoint = find_checkpoint(given);
    if (!fs::exists(checkpoint / "manifest.json"))
        throw Error(checkpoint.string(),
                    " is a model without the state of a run (it has no manifest.json), as an "
                    "exported or imported model is; ",
                    key, " needs a run's checkpoint, RUN_DIR/step-NNNNNNNN, and model.init_from ",
                    "starts a run from weights alone");
    return {given, checkpoint.string(), checkpoint_step(checkpoint)};
}

DecayStart start_of(const Config& config, DecaysOf decays) {
    const std::string& given = config.schedule.decay_from;
    if (decays == DecaysOf::sweep) {
        const auto begun = start_of_sweep(config.run_dir, given);
        return begun ? *begun : find_start(given);
    }
    if (const auto begun = start_of_run(config.run_dir)) {
        if (names(given, begun->checkpoint)) {
            if (!fs::exists(begun->checkpoint) && list_checkpoints(config.run_dir).empty())
                throw Error("the run in ", config.run_dir, " decays from ", begun->checkpoint,
                            ", which is gone before the run has copied it: the other run has "
                            "replaced it by newer ones (its checkpoint.keep); choose another "
                            "run_dir and a checkpoint that stays");
            return *begun;
        }
        throw Error("the run in ", config.run_dir, " decays from ", begun->checkpoint,
                    ", not from ", given, "; choose another run_dir, or change ", key, " back");
    }
    if (!config.run_dir.empty() && !list_checkpoints(config.run_dir).empty())
        throw Error(key, " begins a run, and ", config.run_dir,
                    " has one already; choose another run_dir");
    return find_start(given);
}

void copy_file(const fs::path& from, const fs::path& to, const Pulse& pulse) {
    const MappedFile file(from);
    AtomicFile copy(to);
    for (std::span<const std::byte> rest = file.bytes(); !rest.empty();) {
        const auto piece = rest.first(std::min(most_mapped_bytes, rest.size()));
        copy.write(piece);
        release_pages(piece);
        rest = rest.subspan(piece.size());
        if (pulse) pulse();
    }
    copy.commit();
}

/// Copies a checkpoint's files under another name, and gives the folder its name when all is there.
void copy_checkpoint(const fs::path& checkpoint, const fs::path& place, const Pulse& pulse) {
    const fs::path unfinished = place.string() + ".tmp";
    try {
        fs::remove_all(unfinished);
        make_directory(unfinished);
        for (const RecordedFile& file : recorded_files(checkpoint))
            copy_file(file.path, unfinished / file.path.filename(), pulse);
        copy_file(checkpoint / "manifest.json", unfinished / "manifest.json", pulse);
        sync_directory(unfinished);
        fs::rename(unfinished, place);
    } catch (...) {
        std::error_code ignored;
        fs::remove_all(unfinished, ignored);
        throw;
    }
    sync_directory(place.parent_path());
}

}  // namespace

Config with_decay_from(Config config, DecaysOf decays) {
    Config::Schedule& schedule = config.schedule;
    if (schedule.decay_from.empty() || schedule.decay != Decay::wsd) return config;
    if (schedule.decay_steps == 0 && schedule.decay_fraction >= 1)
        throw Error(key,
                    " needs schedule.decay_steps, or a schedule.decay_fraction below 1: the decay "
                    "is a share of all steps, of which some were before it");
    const DecayStart start = start_of(config, decays);
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

int64_t first_step_of(const Config& config) {
    const Config::Schedule& schedule = config.schedule;
    return schedule.decay_from.empty() ? 0 : schedule.steps - schedule.decay_steps;
}

void record_decay_start(const fs::path& run_dir, const std::string& given, const Config& config) {
    const fs::path file = run_dir / record_file;
    if (config.schedule.decay_from.empty() || fs::exists(file)) return;
    write_file(file, to_text({{"given", given},
                              {"checkpoint", config.schedule.decay_from},
                              {"step", first_step_of(config)}}) +
                         "\n");
}

std::optional<fs::path> decay_start_to_copy(const Config& config) {
    if (config.schedule.decay_from.empty() || !list_checkpoints(config.run_dir).empty()) return {};
    return config.schedule.decay_from;
}

void copy_decay_start(const Config& config, const Pulse& pulse) {
    const auto checkpoint = decay_start_to_copy(config);
    if (!checkpoint) return;
    verify_checkpoint(*checkpoint, Verify::everything, pulse);
    const RunFolder folder(config.run_dir);
    record_decay_start(config.run_dir, config.schedule.decay_from, config);
    copy_checkpoint(*checkpoint, checkpoint_path(config.run_dir, first_step_of(config)), pulse);
}

}  // namespace train_gpt
