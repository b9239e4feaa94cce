#include "training/replay.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <system_error>
#include <utility>
#include <variant>

#include "base/error.h"
#include "base/file.h"
#include "base/formatted.h"
#include "base/json_text.h"
#include "base/printable.h"
#include "base/version.h"
#include "device/device.h"
#include "parallel/together.h"
#include "training/config/config_checks.h"
#include "training/config/config_parser.h"
#include "training/decisions.h"
#include "training/files/checkpoint.h"
#include "training/files/kept_choices.h"
#include "training/files/run_folder.h"
#include "training/plan/plan.h"
#include "training/report/recorded_run.h"
#include "training/run_data.h"
#include "training/watch/metrics.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

std::string describe_steps(int64_t first, int64_t last) {
    return first == last ? concat("step ", first) : concat("steps ", first, " to ", last);
}

// ---- What the run recorded ----------------------------------------------------------------------

/// The last step that a run's folder knows of.
int64_t last_step(const RecordedRun& run) {
    int64_t last = run.last_step();
    for (const Json& event : run.history())
        if (event["event"] != "start") last = std::max(last, event["step"].get<int64_t>());
    for (const fs::path& checkpoint : list_checkpoints(run.folder()))
        last = std::max(last, checkpoint_step(checkpoint));
    return last;
}

/// The starts of the run, in the order of their steps, whose steps were not run again later.
std::vector<Json> starts_of(const RecordedRun& run) {
    std::vector<Json> starts;
    for (const Json& event : run.history()) {
        if (event["event"] != "start") continue;
        while (!starts.empty() && starts.back()["step"] >= event["step"]) starts.pop_back();
        starts.push_back(event);
    }
    return starts;
}

/// Those that computed some of these steps.
std::vector<Json> starts_of(const RecordedRun& run, const StepRange& steps) {
    const std::vector<Json> all = starts_of(run);
    std::vector<Json> some;
    for (size_t i = 0; i < all.size(); ++i) {
        const bool begins = all[i]["step"] < steps.to;
        const bool ends = i + 1 < all.size() && all[i + 1]["step"] <= steps.after;
        if (begins && !ends) some.push_back(all[i]);
    }
    return some;
}

/// The file with the configuration of the step after a checkpoint. Another start of the run, with
/// another configuration, may have resumed from the checkpoint: its own is in a later checkpoint or
/// in the run's folder.
fs::path config_file(const RecordedRun& run, const fs::path& checkpoint, int64_t step) {
    const fs::path latest = run.folder() / "config.json";
    if (checkpoint.empty()) step = 0;
    bool resumed_there = checkpoint.empty();
    for (const Json& start : starts_of(run)) resumed_there |= start["step"] == step;
    if (!resumed_there) return checkpoint / "train_gpt.json";
    fs::path found = latest;
    for (const fs::path& later : list_checkpoints(run.folder()))  // newest first
        if (checkpoint_step(later) > step) found = later / "train_gpt.json";
    return found;
}

/// The mean seconds of the steps as logged; NaN if none is.
double seconds_per_step(const fs::path& run, const StepRange& steps) {
    double sum = 0;
    int64_t count = 0;
    read_metrics(run, [&](const MetricsRecord& record) {
        if (!steps.contains(record.step)) return;
        for (const auto& [name, value] : record.fields)
            if (const auto* ms = std::get_if<double>(&value); ms && name == "ms") {
                sum += *ms / 1e3;
                ++count;
            }
    });
    return count > 0 ? sum / static_cast<double>(count) : std::nan("");
}

bool has_records(const RecordedRun& run, const StepRange& steps) {
    const auto within = [&](auto step) { return steps.contains(static_cast<int64_t>(step)); };
    const RecordedFingerprints fingerprints(run.folder());
    return std::ranges::any_of(run.training().step, within) ||
           std::ranges::any_of(fingerprints.lines(),
                               [&](const auto& line) { return within(line.first); });
}

/// The newest checkpoint before a step; empty if there is none.
fs::path checkpoint_before(const fs::path& run, int64_t step) {
    for (const fs::path& checkpoint : list_checkpoints(run))
        if (checkpoint_step(checkpoint) < step) return checkpoint;
    return {};
}

/// Throws Error if a replay would write over what is there.
void require_free(const fs::path& folder) {
    for (const char* name : {"lock", "metrics.jsonl", "manifest.json", "config.json"})
        if (fs::exists(folder / name))
            throw Error(folder.string(),
                        " already has a run; remove it, or name another folder with --into");
    if (!list_checkpoints(folder).empty())
        throw Error(folder.string(), " already has checkpoints; name another folder with --into");
}

/// What the first rank finds out for all, as JSON.
Json find_replay(const ReplayOptions& options) {
    const RecordedRun run(options.run);
    if (const int64_t last = last_step(run); options.to > last)
        throw Error("the run in ", options.run, " has come to step ", last, ", and --to is ",
                    options.to, "; name a step up to ", last);
    const fs::path into = options.into.empty() ? run.folder() / concat("replay-", options.to)
                                               : fs::path(options.into);
    require_free(into);
    const fs::path checkpoint = checkpoint_before(run.folder(), options.to);
    const int64_t first = checkpoint.empty() ? 0 : checkpoint_step(checkpoint);
    const StepRange steps{first, options.to};
    if (!has_records(run, steps))
        throw Error("the run in ", options.run, " has recorded nothing of ",
                    describe_steps(first + 1, options.to),
                    ", so there is nothing to compare with; name a step --to ",
                    "that has a line in metrics.jsonl or fingerprints.jsonl");
    const fs::path file = config_file(run, checkpoint, first);
    Json found{{"into", into.string()},   {"checkpoint", checkpoint.string()}, {"first", first},
               {"file", file.string()},   {"config", MappedFile(file).text()}, {"ranks", 1},
               {"devices", Json::array()}};
    Json notes = Json::array();
    for (const Json& start : starts_of(run, steps)) {
        found["ranks"] = start.value("ranks", 1);
        if (start.contains("device")) found["devices"].push_back(start["device"]);
        if (const auto by = start.value("version", version()); by != version())
            notes.push_back(
                concat("the run was trained by version ", by, ", and this is ", version()));
        if (start["step"] > first)
            notes.push_back(concat("the run was started again after step ",
                                   start["step"].get<int64_t>(),
                                   "; if its configuration was changed there, later steps differ"));
    }
    found["notes"] = notes;
    const double seconds = seconds_per_step(run.folder(), steps);
    found["seconds"] = seconds * static_cast<double>(options.to - first);
    return found;
}

}  // namespace

Replay plan_replay(const ReplayOptions& options, const World& world) {
    const Json found =
        parse_json(first_for_all(world, [&] { return to_text(find_replay(options)); }));
    const Json& seconds = found["seconds"];
    Replay replay{.run = options.run,
                  .into = found["into"].get<std::string>(),
                  .checkpoint = found["checkpoint"].get<std::string>(),
                  .first = found["first"].get<int64_t>(),
                  .to = options.to,
                  .config_file = found["file"].get<std::string>(),
                  .ranks = found["ranks"].get<int>(),
                  .devices = found["devices"].get<std::vector<std::string>>(),
                  .seconds = seconds.is_number() ? seconds.get<double>() : std::nan(""),
                  .notes = found["notes"].get<std::vector<std::string>>()};
    together(world, [&] {
        const std::string& file = replay.config_file;
        read_config(replay.config, found["config"].get<std::string>(), file);
        for (const std::string& text : options.overrides) apply_override(replay.config, text);
        replay.config.run_dir = replay.into.string();
        check_config(replay.config, file, world.size());
        require_run_inputs(replay.config, file);
        return "";
    });
    return replay;
}

// ---- The beginning ------------------------------------------------------------------------------

namespace {

/// The model of a device, without a CPU's threads: with more ranks on a machine each has fewer.
std::string model_of(const std::string& device) {
    const bool has_threads = device.ends_with(" threads") || device.ends_with(" thread");
    return has_threads ? device.substr(0, device.rfind(", ")) : device;
}

void require_device(const Replay& replay, const Device& device) {
    const std::string here = device_name(device);
    for (const std::string& recorded : replay.devices)
        if (model_of(recorded) != model_of(here))
            throw Error("the run computed these steps on ", recorded, ", and this device is ", here,
                        "; bits are comparable only on the same model (--set device=cpu|cuda "
                        "chooses)");
}

void require_data(const Replay& replay) {
    const std::vector<std::string> changed = changed_data(replay.run, replay.config);
    if (std::ranges::find(changed, "data.train") != changed.end())
        throw Error("data.train is not what the run was trained on (", replay.run.string(), "/",
                    run_manifest,
                    " lists its files); restore the files, or name them with --set "
                    "data.train=…");
}

/// Adds the file to a folder without copying its bytes, if the disk can do that.
void link_file(const fs::path& from, const fs::path& to) {
    std::error_code code;
    fs::create_hard_link(from, to, code);
    if (code) fs::copy_file(from, to, code);
    if (code) throw Error("cannot copy ", from.string(), " to ", to.string(), ": ", code.message());
}

/// The folder of a run that has the checkpoint and no steps after it.
void make_folder(const Replay& replay) {
    make_directory(replay.into);
    // What the run knows of its data: hashes, and what is verified.
    for (const char* name : {run_manifest, "verified.json"})
        if (std::error_code code; fs::exists(replay.run / name))
            fs::copy_file(replay.run / name, replay.into / name, code);  // not needed
    if (replay.checkpoint.empty()) return;
    const fs::path to = checkpoint_path(replay.into, replay.first);
    make_directory(to);
    for (const RecordedFile& file : recorded_files(replay.checkpoint))
        link_file(file.path, to / file.path.filename());
    link_file(replay.checkpoint / "manifest.json", to / "manifest.json");
}

/// "1.20 GiB of 62.00 GiB available on each rank". Throws Error if the run's choices do not fit.
std::string describe_memory(const Replay& replay, const std::string& choices_of,
                            const Device& device, const World& world) {
    Config config = replay.config;
    const Choices choices =
        choices_of.empty() ? read_choices(replay.checkpoint) : given_choices(choices_of);
    if (config.batch.micro_batch == 0) config.batch.micro_batch = choices.micro_batch;
    if (config.memory.recompute.is_auto() && !choices.recompute.empty())
        config.memory.recompute = recompute_from(choices.recompute);
    if (!config.parallel.zero) config.parallel.zero = choices.zero;
    config = with_kept_sums(config, choices);
    PlanTarget here(device);
    here.ranks_here = world.local_size();
    const PlanReport plan = plan_report(config, here, world.size());
    if (!plan.problem.empty()) throw Error(plan.problem);
    return concat(format_bytes(plan.needed.device), " of ", format_bytes(plan.available.device),
                  " available on each rank");
}

std::string describe_beginning(const Replay& replay, const std::string& memory,
                               const std::string& here, int ranks) {
    const double seconds = replay.seconds * replay.ranks / ranks;
    const int64_t steps = replay.to - replay.first;
    std::string text = concat(
        "replaying ", describe_steps(replay.first + 1, replay.to), " of ", replay.run.string(),
        ", from ", replay.checkpoint.empty() ? "the beginning" : replay.checkpoint.string(),
        ", into ", replay.into.string(), "\n", steps, steps == 1 ? " step" : " steps");
    if (std::isfinite(seconds))
        text += concat(", about ", formatted(seconds < 10 ? "%.2g" : "%.0f", seconds),
                       " seconds as the run took");
    if (replay.ranks != ranks)
        text += concat(" on ", replay.ranks, replay.ranks == 1 ? " rank" : " ranks", ", here on ",
                       ranks);
    text += "; memory: " + memory;
    for (const std::string& note : replay.notes) text += "\nnote: " + note;
    for (const std::string& recorded : replay.devices)
        if (replay.ranks != ranks || recorded != here)
            return text + concat("\nnote: the run computed these steps on ", replay.ranks, " × ",
                                 recorded, ", and this is ", ranks, " × ", here,
                                 ": sums that depend on their order differ in the last bits");
    return text;
}

}  // namespace

void begin_replay(const Replay& replay, const std::string& choices, const Device& device,
                  const World& world) {
    together(world, [&] {
        require_device(replay, device);
        return "";
    });
    first_for_all(world, [&] {
        require_data(replay);
        const std::string memory = describe_memory(replay, choices, device, world);
        std::printf("%s\n",
                    printable(describe_beginning(replay, memory, device_name(device), world.size()))
                        .c_str());
        std::fflush(stdout);
        make_folder(replay);
        return "";
    });
}

// ---- The end ------------------------------------------------------------------------------------

std::string describe_replay(const RunComparison& found, const StepRange& steps) {
    if (found.same()) {
        const std::string left =
            found.only_a == 0 ? ""
                              : concat("; ", found.only_a, found.only_a == 1 ? " line" : " lines",
                                       " of the run's records could not be compared, since the "
                                       "replay has none for their steps");
        if (found.steps + found.fingerprints == 0) return "nothing was compared" + left;
        return concat(describe_steps(steps.after + 1, steps.to),
                      steps.to == steps.after + 1 ? " is" : " are",
                      " the same (losses and norms of ", found.steps, ", fingerprints of ",
                      found.fingerprints, ")", left);
    }
    const RunComparison::Column* column = found.first_difference();
    // Tensors were equal where their fingerprints were.
    int64_t equal = steps.after, different = steps.to;
    if (found.state) {
        different = found.state->step;
        equal = std::max(equal, found.state->after);
    } else if (found.fingerprints > 0) {
        equal = found.last_fingerprint;
    }
    std::string text = "first difference: ";
    if (column && (!found.state || column->first->step < found.state->step))
        text += column->name;
    else
        text += found.state->what.described();
    if (column) different = std::min(different, column->first->step);
    text += concat(", in ", describe_steps(std::min(equal + 1, different), different), "\n");
    if (column)
        text += concat("  ", column->name, " of step ", column->first->step, ": ",
                       formatted("%.9g", column->first->a), " recorded, ",
                       formatted("%.9g", column->first->b), " now\n");
    if (found.state)
        text += concat("  fingerprints of step ", found.state->step, ": ",
                       found.state->what.described(), "\n");
    text.pop_back();
    return text;
}

int compare_replay(const Replay& replay, const World& world) {
    const std::string same = first_for_all(world, [&]() -> std::string {
        const StepRange steps{replay.first, replay.to};
        const RunComparison found = compare_runs(replay.run, replay.into, steps);
        std::printf("%s\n", printable(describe_replay(found, steps)).c_str());
        const bool compared = found.steps + found.fingerprints > 0;
        return compared && found.same() ? "yes" : "";
    });
    return same.empty() ? 1 : 0;
}

}  // namespace train_gpt
