#include "training/files/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/hub_files.h"
#include "base/json_file.h"
#include "base/path.h"
#include "base/version.h"
#include "model/families/family.h"
#include "parallel/together.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/files/fp8_file.h"
#include "training/files/grids_file.h"
#include "training/files/optimizer_files.h"
#include "training/files/routers_file.h"
#include "training/files/spikes_file.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr int format_version = 3;

/// The oldest version that can read a checkpoint. 2: optimizer files may hold runs of elements at
/// equal distances. 3: the position is not its step times its batch.
int version_needed(const CheckpointContents& contents) {
    const auto& position = contents.position;
    if (position && (position->tokens.parts().size() > 1 || position->order.first_token > 0))
        return 3;
    return contents.parameters.sharding().tensors > 1 ? 2 : 1;
}

std::string step_name(int64_t step) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
    return name;
}

/// The step in "step-00000123", or −1. Steps of more than eight digits have longer names.
int64_t step_of_name(const std::string& name) {
    if (name.size() < 13 || name.size() > 21 || name.compare(0, 5, "step-") != 0) return -1;
    if (name.find_first_not_of("0123456789", 5) != std::string::npos) return -1;
    return std::stoll(name.substr(5));
}

/// The folders step-NNNNNNNN of a run, whole or not, newest first.
std::vector<fs::path> step_folders(const fs::path& run_dir) {
    std::vector<std::pair<int64_t, fs::path>> found;
    std::error_code code;
    for (fs::directory_iterator entry(run_dir, code), end; !code && entry != end;
         entry.increment(code))
        if (const int64_t step = step_of_name(entry->path().filename().string()); step >= 0)
            found.emplace_back(-step, entry->path());
    if (code && code != std::errc::no_such_file_or_directory)
        throw Error("cannot read the run folder ", run_dir.string(), ": ", code.message(),
                    "; name a run's folder or a checkpoint in it");
    std::sort(found.begin(), found.end());
    std::vector<fs::path> folders;
    for (auto& [step, path] : found) folders.push_back(std::move(path));
    return folders;
}

using ReadParameter = std::function<void(const Parameter&, int64_t, std::span<float>)>;

/// The model of a checkpoint, with weights that `read` gives.
StoredModel stored_model(const CheckpointContents& contents, ReadParameter read) {
    const ParameterStore& parameters = contents.parameters;
    return {.spec = contents.spec,
            .dtype = stored_type_of(parameters.dtype()),
            .tokens = contents.tokens.value_or(token_ids_of(contents.tokenizer)),
            .read = std::move(read)};
}

/// Reads the fp32 masters in a checkpoint's optimizer files; null if there are none.
ReadParameter masters_in(const fs::path& checkpoint, const std::vector<Parameter>& parameters) {
    const auto saved = std::make_shared<const OptimizerFiles>(checkpoint, parameters);
    if (saved->empty()) return {};
    std::map<std::string, int> index;
    for (size_t i = 0; i < parameters.size(); ++i) index[parameters[i].name] = static_cast<int>(i);
    return [saved, index](const Parameter& p, int64_t first, std::span<float> values) {
        saved->read_masters(index.at(p.name), first, values);
    };
}

/// Sizes and hashes of files, as in a manifest.
std::string hashes_of(const std::vector<fs::path>& files, const Pulse& pulse) {
    Json hashes = Json::object();
    for (const fs::path& file : files)
        hashes[file.filename().string()] = {{"bytes", fs::file_size(file)},
                                            {"xxh3", hash_file(file, pulse)}};
    return to_text(hashes);
}

/// Calls `write`, which works on a checkpoint, and says in its errors of which.
template <class Write>
auto writing(const fs::path& checkpoint, const Write& write) {
    try {
        return write();
    } catch (const fs::filesystem_error& error) {
        throw Error("cannot write the checkpoint ", checkpoint.string(), ": ",
                    error.code().message());
    }
}

}  // namespace

CheckpointFiles::CheckpointFiles(const fs::path& run_dir, const CheckpointContents& contents,
                                 Pulse pulse)
    : run_dir_(run_dir),
      directory_(run_dir / (step_name(contents.step) + ".tmp")),
      contents_(contents),
      pulse_(std::move(pulse)) {}

void CheckpointFiles::make_place() const {
    contents_.require_in_place();
    writing(path(), [&] { make_directory(directory_); });
    try {
        contents_.require_in_place();  // another folder may have taken its place meanwhile
    } catch (const Error&) {
        std::remove(directory_.c_str());  // if it is empty
        throw;
    }
}

void CheckpointFiles::remove_place() const {
    contents_.require_in_place();
    writing(path(), [&] { fs::remove_all(directory_); });
}

void CheckpointFiles::give_up() const {
    try {
        contents_.require_in_place();
        fs::remove_all(directory_);
    } catch (const std::exception&) {  // the error that came first is shown
    }
}

std::string CheckpointFiles::write_own(bool first_rank) const {
    return writing(path(), [&] {
        const CheckpointContents& c = contents_;
        const ParameterStore& parameters = c.parameters;
        std::vector<fs::path> files;
        const auto add = [&](const std::string& name) {
            return files.emplace_back(directory_ / name);
        };
        const Sharding& s = parameters.sharding();
        const int shards = s.is_split() ? s.size : 1;
        if (!s.is_copy()) {
            char name[64];
            std::snprintf(name, sizeof name, "optimizer-%05d-of-%05d.safetensors",
                          (s.pipeline * shards + s.rank) * s.tensors + s.tensor,
                          s.pipelines * shards * s.tensors);
            write_optimizer_file(add(name), parameters, c.copy, pulse_);
        }
        if (!first_rank) return hashes_of(files, pulse_);
        write_file(add("train_gpt.json"), to_json(c.config));
        write_choices(directory_, c.choices);
        add("choices.json");
        if (!c.grids.empty()) add(write_grids(directory_, parameters.grids()->layout(), c.grids));
        if (c.spikes) add(write_spikes(directory_, *c.spikes));
        if (!c.routers.empty()) add(write_routers(directory_, c.spec.experts.n_expert, c.routers));
        if (!c.fp8.amax.empty()) add(write_fp8(directory_, c.fp8));
        if (c.position) {
            write_position(directory_, *c.position);
            add("position.json");
        }
        if (c.tokenizer)
            for (const std::string& name : write_tokenizer(directory_, *c.tokenizer, c.spec.n_ctx))
                add(name);
        return hashes_of(files, pulse_);
    });
}

std::string CheckpointFiles::write_weights(bool from_files) const {
    return writing(path(), [&] {
        const ParameterStore& parameters = contents_.parameters;
        ReadParameter read = [&](const Parameter& p, int64_t first, std::span<float> values) {
            parameters.state.read_weights(parameters.index_of(p.name), first, values);
        };
        if (from_files) read = masters_in(directory_, registry_of(contents_.spec).parameters);
        const auto pulsing = [&](const Parameter& p, int64_t first, std::span<float> values) {
            pulse_();
            read(p, first, values);
        };
        const StoredModel model = stored_model(contents_, pulsing);
        std::vector<fs::path> files;
        for (const std::string& name : write_model(directory_, model, model.dtype))
            files.push_back(directory_ / name);
        return hashes_of(files, pulse_);
    });
}

void CheckpointFiles::complete(const std::vector<std::string>& hashes) const {
    writing(path(), [&] {
        Json manifest = {{"format", "train_gpt checkpoint"},
                         {"format_version", version_needed(contents_)},
                         {"program", version()},
                         {"step", contents_.step},
                         {"deterministic", contents_.deterministic},
                         {"files", Json::object()}};
        if (!contents_.history.empty()) {
            sync_file(contents_.history_path);
            manifest["history"] = contents_.history;
        }
        for (const std::string& of_rank : hashes) manifest["files"].update(parse_json(of_rank));
        write_file(directory_ / "manifest.json", to_text(manifest, 2) + "\n");
        sync_directory(directory_);

        // Replaces a checkpoint of the same step, if the run was resumed from an older one.
        contents_.require_in_place();
        fs::remove_all(path());
        fs::rename(directory_, path());
        sync_directory(run_dir_);
    });
}

fs::path save_checkpoint(const fs::path& run_dir, const CheckpointContents& contents,
                         const Mesh& mesh) {
    const World& world = mesh.world();
    const CheckpointFiles files(run_dir, contents, [&] { world.activity().pulse(); });
    const bool root = world.rank() == 0, holds_model = contents.parameters.holds_whole_model();
    try {
        first_for_all(world, [&] {
            files.remove_place();
            files.make_place();
            return "";
        });
        std::vector<std::string> hashes = together(world, [&] { return files.write_own(root); });
        // Where no rank holds all weights, they are made from what each has written.
        hashes.push_back(first_for_all(world, [&] { return files.write_weights(!holds_model); }));
        first_for_all(world, [&] {
            files.complete(hashes);
            return "";
        });
    } catch (...) {
        if (root) files.give_up();
        throw;
    }
    return files.path();
}

std::vector<fs::path> list_checkpoints(const fs::path& run_dir) {
    std::vector<fs::path> listed, found;
    do {
        found = listed = step_folders(run_dir);
        std::erase_if(found,
                      [](const fs::path& path) { return !fs::exists(path / "manifest.json"); });
        // A run may have removed them for a newer one since they were listed.
    } while (found.empty() && listed != step_folders(run_dir));
    return found;
}

fs::path checkpoint_path(const fs::path& run_dir, int64_t step) {
    return run_dir / step_name(step);
}

void remove_unfinished_checkpoints(const fs::path& run_dir) {
    std::error_code ignored;
    std::vector<fs::path> doomed;
    for (fs::directory_iterator entry(run_dir, ignored), end; entry != end;
         entry.increment(ignored))
        if (entry->path().extension() == ".tmp" && step_of_name(entry->path().stem().string()) >= 0)
            doomed.push_back(entry->path());
    for (const fs::path& path : doomed) fs::remove_all(path, ignored);
}

void prune_checkpoints(const fs::path& run_dir, int keep, int64_t sound_step,
                       std::optional<int64_t> sane_step) {
    std::error_code ignored;
    const auto checkpoints = list_checkpoints(run_dir);
    const auto sound = std::ranges::find_if(checkpoints, [&](const fs::path& path) {
        return step_of_name(path.filename().string()) <= sound_step;
    });
    for (size_t i = static_cast<size_t>(keep); keep > 0 && i < checkpoints.size(); ++i) {
        if (checkpoints.begin() + static_cast<std::ptrdiff_t>(i) == sound) continue;
        if (sane_step == step_of_name(checkpoints[i].filename().string())) continue;
        // Under this name it no longer counts as a checkpoint; if deleting it is interrupted,
        // remove_unfinished_checkpoints() deletes the rest.
        fs::path leaving = checkpoints[i];
        leaving += ".tmp";
        fs::rename(checkpoints[i], leaving, ignored);
        fs::remove_all(leaving, ignored);
    }
}

namespace {

/// Renames a checkpoint to a name that no checkpoint has, and replaces what has that name.
void set_aside(const fs::path& checkpoint, const char* suffix) {
    std::error_code code;
    fs::path aside = checkpoint;
    aside += suffix;
    fs::remove_all(aside, code);
    fs::rename(checkpoint, aside, code);
    if (code)
        throw Error("cannot move ", checkpoint.string(), " out of the way: ", code.message(),
                    "; move it yourself");
}

}  // namespace

int set_aside_checkpoints(const fs::path& run_dir, int64_t sound_step) {
    int moved = 0;
    for (const fs::path& checkpoint : step_folders(run_dir))
        if (step_of_name(checkpoint.filename().string()) > sound_step) {
            set_aside(checkpoint, ".suspect");
            ++moved;
        }
    return moved;
}

std::optional<fs::path> recover_newest_checkpoint(
    const fs::path& run_dir, const std::function<void(const std::string&)>& warn,
    const Pulse& pulse) {
    std::vector<fs::path> damaged;
    for (const fs::path& checkpoint : step_folders(run_dir)) {
        try {
            verify_checkpoint(checkpoint, Verify::everything, pulse);
        } catch (const Error& error) {
            warn(concat(error.what(), "; trying the checkpoint before it"));
            damaged.push_back(checkpoint);
            continue;
        }
        for (const fs::path& path : damaged) set_aside(path, ".damaged");
        return checkpoint;
    }
    if (damaged.empty()) return {};
    throw Error("none of the ", damaged.size(), " checkpoints in ", run_dir.string(),
                " is undamaged; restore one of them from a copy, or choose another run_dir to "
                "start afresh");
}

fs::path find_checkpoint(const fs::path& path) {
    if (const std::string link = describe_broken_link(path); !link.empty())
        throw Error(link, "; restore it or remove the link");
    if (!fs::exists(path))
        throw Error("there is no checkpoint at ", path.string(), "; check the path");
    if (is_model_folder(path)) return path;
    refuse_cache_root(path);
    if (!fs::is_directory(path))
        throw Error(path.string(), " is a file; name the folder of a model, a run or a checkpoint",
                    path.extension() == ".bin"
                        ? " (train_gpt import makes one of an llm.c model file)"
                        : "");
    const auto checkpoints = list_checkpoints(path);
    if (checkpoints.empty())
        throw Error(
            path.string(),
            " holds no complete checkpoint (no model.safetensors and no step-NNNNNNNN folder)",
            fs::exists(path / "pytorch_model.bin")
                ? "; pytorch_model.bin is not read: save the model with save_pretrained of a newer "
                  "transformers"
                : "; name a run's folder or one of its checkpoints");
    return checkpoints.front();
}

fs::path find_whole_checkpoint(const fs::path& path, const Pulse& pulse) {
    const fs::path checkpoint = find_checkpoint(path);
    if (fs::exists(checkpoint / "manifest.json"))
        verify_checkpoint(checkpoint, Verify::model, pulse);
    return checkpoint;
}

namespace {

constexpr const char* advice_on_damage =
    ": the checkpoint is damaged; restore it from a copy or use another one";

}  // namespace

std::vector<RecordedFile> recorded_files(const fs::path& checkpoint) {
    const char* advice = advice_on_damage;
    const fs::path path = checkpoint / "manifest.json";
    if (!fs::exists(path)) throw Error(checkpoint.string(), " has no manifest.json", advice);
    const Json manifest = read_json(path);
    if (field<int64_t>(manifest, "format_version", path) > format_version)
        throw Error(checkpoint.string(), " was written by a newer version of this program (",
                    optional_field<std::string>(manifest, "program", "unknown", path),
                    "); use that version, or a newer one");
    const int64_t named = step_of_name(checkpoint.filename().string());
    if (const int64_t step = field<int64_t>(manifest, "step", path);
        step < 0 || (named >= 0 && named != step))
        throw Error(path.string(), " is of step ", step, advice);
    const auto files = field<std::map<std::string, Json>>(manifest, "files", path);
    for (const char* name : {"config.json", "model.safetensors", "train_gpt.json"})
        if (!files.count(name)) throw Error(path.string(), " does not list ", name, advice);
    std::vector<RecordedFile> recorded;
    for (const auto& [name, entry] : files)
        recorded.push_back({.path = checkpoint / name,
                            .manifest = path,
                            .bytes = field<uint64_t>(entry, "bytes", path),
                            .hash = field<std::string>(entry, "xxh3", path)});
    return recorded;
}

void verify_checkpoint(const fs::path& checkpoint, Verify what, const Pulse& pulse) {
    const char* advice = advice_on_damage;
    for (const RecordedFile& file : recorded_files(checkpoint)) {
        const std::string name = file.path.filename().string();
        if (what == Verify::model && is_optimizer_file(name)) continue;
        if (what == Verify::choices && name != "choices.json") continue;
        const FileState state = verify_file(file, pulse);
        if (state == FileState::missing)
            throw Error(checkpoint.string(), " is missing its file ", name, advice);
        if (const uintmax_t bytes = fs::file_size(file.path); bytes != file.bytes)
            throw Error(file.path.string(), " has ", bytes, " bytes instead of ", *file.bytes,
                        advice);
        if (state != FileState::good)
            throw Error(file.path.string(), " differs from its hash in manifest.json", advice);
    }
}

int64_t checkpoint_step(const fs::path& checkpoint) {
    return field<int64_t>(read_json(checkpoint / "manifest.json"), "step",
                          checkpoint / "manifest.json");
}

RunPosition checkpoint_position(const fs::path& checkpoint) {
    return read_position(checkpoint, checkpoint_step(checkpoint), checkpoint_config(checkpoint));
}

Config checkpoint_config(const fs::path& checkpoint) {
    return load_config(checkpoint / "train_gpt.json", {});
}

void load_training_state(const fs::path& checkpoint, ParameterStore& parameters,
                         const Pulse& pulse) {
    const OptimizerFiles saved(checkpoint, registry_of(read_model_spec(checkpoint)).parameters);
    saved.load(parameters, pulse);
}

std::optional<StoredModel> open_masters(const fs::path& checkpoint) {
    StoredModel model = open_model_folder(checkpoint);
    const std::vector<Parameter> parameters = registry_of(model.spec).parameters;
    model.read = masters_in(checkpoint, parameters);
    if (!model.read) return {};
    model.dtype = StoredType::fp32;
    return model;
}

}  // namespace train_gpt
