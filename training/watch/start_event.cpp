#include "training/watch/start_event.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <string>
#include <utility>

#include <pwd.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "base/sha256.h"
#include "base/version.h"
#include "model/families/family.h"
#include "training/files/checkpoint.h"
#include "training/files/run_folder.h"
#include "training/run_start.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// The user who started this process; a number where it has no name.
std::string user_name() {
    const passwd* entry = ::getpwuid(::geteuid());
    return entry ? entry->pw_name : std::to_string(::geteuid());
}

/// The words of this process's command line.
Json command_of_process() {
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    Json words = Json::array();
    for (std::string word; std::getline(file, word, '\0');) words.push_back(printable(word));
    return words;
}

/// This program's file. Empty if it cannot be read any more.
Json binary_of_process() try {
    const fs::path self = "/proc/self/exe";
    std::error_code code;
    return {{"path", fs::read_symlink(self, code).string()},
            {"bytes", fs::file_size(self)},
            {"sha256", sha256_of_file(self)}};
} catch (const std::exception&) {
    return {};
}

Json mesh_json(const MeshLayout& layout) {
    Json mesh = Json::object();
    for (const Axis axis : all_axes_and_parts)
        if (axis != Axis::replica) mesh[name_of(axis)] = layout.size(axis);
    return mesh;
}

Json read_if_object(const fs::path& file) {
    Json json = fs::exists(file) ? try_parse_json(MappedFile(file).text()) : Json();
    return json.is_object() ? json : Json::object();
}

/// The checkpoint that the run resumes from, as its manifest describes it.
Json resumed_from(const fs::path& run_dir, int64_t step) {
    const fs::path checkpoint = checkpoint_path(run_dir, step);
    Json json = {{"step", step}, {"manifest", manifest_hash(checkpoint)}};
    const Json manifest = read_if_object(checkpoint / "manifest.json");
    if (manifest.contains("history")) json["history"] = manifest["history"];
    return json;
}

/// Whether the last start in a history was killed: no end follows it.
bool was_killed(const HistoryChain& history) {
    bool runs = false;
    for (const HistoryLine& line : history.lines) {
        const Json event = line.event.value("event", Json());
        if (event == "start") runs = true;
        if (event == "end") runs = false;
    }
    return runs;
}

/// The keys of a start that may change from one to the next.
constexpr std::array compared{"user",       "hosts",   "version",      "binary", "device",
                              "ranks",      "mesh",    "steps",        "data",   "tokenizer_sha256",
                              "vocabulary", "choices", "configuration"};

/// Every value below a key, by its path: "mesh.data". What says where something lies, and not what
/// it is, is left out.
void flatten(const std::string& path, const Json& json, std::vector<std::string>& order,
             std::map<std::string, Json>& values) {
    if (json.is_object()) {
        for (const auto& [key, value] : json.items())
            flatten(path + "." + key, value, order, values);
        return;
    }
    for (const char* left_out : {"binary.path", "binary.bytes", "data.train", "data.val"})
        if (path == left_out) return;
    order.push_back(path);
    values[path] = json;
}

}  // namespace

Json changes_between(const Json& before, const Json& now) {
    std::vector<std::string> old_order, order;
    std::map<std::string, Json> old_values, values;
    for (const char* key : compared) {
        if (before.contains(key)) flatten(key, before[key], old_order, old_values);
        if (now.contains(key)) flatten(key, now[key], order, values);
    }
    for (const std::string& path : old_order)
        if (!values.contains(path)) order.push_back(path);
    Json changes = Json::array();
    for (const std::string& path : order) {
        const Json& was = old_values[path];
        const Json& is = values[path];
        if (was != is) changes.push_back({{"what", path}, {"before", was}, {"now", is}});
    }
    return changes;
}

Json data_of_run(const fs::path& run_dir, const std::vector<Json>& before) {
    const Json manifest = read_if_object(run_dir / run_manifest);
    Json lists = Json::object();
    for (const char* split : {"train", "val"})
        if (manifest.contains(split)) lists[split] = manifest[split];
    if (lists.empty()) return {};
    Json data = {{"sha256", sha256_of(to_text(lists))}};
    const bool known = std::ranges::any_of(before, [&](const Json& event) {
        const Json of = event.value("data", Json());
        return of.is_object() && of.contains("train") &&
               of.value("sha256", Json()) == data["sha256"];
    });
    if (!known) data.update(lists);
    return data;
}

Json hashes_of_run(const fs::path& run_dir) {
    Json hashes = Json::object();
    for (const char* name : {"config.json", run_manifest, "choices.json"})
        if (fs::exists(run_dir / name)) hashes[name] = sha256_of_file(run_dir / name);
    return hashes;
}

Json start_event(const RunStart& start, std::vector<std::string> hosts,
                 const HistoryChain& before) {
    std::ranges::sort(hosts);
    hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
    const fs::path run_dir = start.given.run_dir;
    const DecoderSpec& spec = start.data.spec();
    std::error_code code;
    Json line = history_event("start", start.first_step());
    line["resumes"] = start.resumes;
    if (start.replays) line["replays"] = true;
    line["steps"] = start.schedule.steps();
    if (const Json passes = passes_json(start.planned_use()); !passes.empty())
        line["passes"] = passes;
    line["version"] = version();
    line["device"] = device_name(start.trainer.stream.device);
    line["ranks"] = start.ranks();
    line["hosts"] = hosts;
    const int64_t parameters = registry_of(spec).numel(), idle = spec.idle_parameters();
    line["parameters"] = parameters;
    if (idle > 0) line["active_parameters"] = parameters - idle;
    line["dtype"] = name_of(start.trainer.parameters.dtype());
    line["vocabulary"] = spec.vocab_size;
    if (const Tokenizer* tokenizer = start.data.tokenizer()) {
        line["tokenizer"] = start.data.tokenizer_hash();
        line["tokenizer_sha256"] = sha256_of(tokenizer->to_json());
    }
    line["memory"] = Json::object();
    for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i)
        if (const auto purpose = static_cast<Purpose>(i); start.plan.bytes(purpose) > 0)
            line["memory"][name_of(purpose)] = start.plan.bytes(purpose);

    line["user"] = user_name();
    line["command"] = command_of_process();
    line["working_directory"] = fs::current_path(code).string();
    line["binary"] = binary_of_process();
    line["mesh"] = mesh_json(start.mesh.layout());
    std::vector<Json> earlier;
    const Json* last = nullptr;
    for (const HistoryLine& of : before.lines) {
        earlier.push_back(of.event);
        if (of.event.value("event", Json()) == "start") last = &of.event;
    }
    if (Json data = data_of_run(run_dir, earlier); !data.empty()) line["data"] = std::move(data);
    line["files"] = hashes_of_run(run_dir);
    if (line["files"].contains("choices.json")) line["choices"] = line["files"]["choices.json"];
    line["configuration"] = read_if_object(run_dir / "config.json");
    if (!start.resumes) return line;
    line["checkpoint"] = resumed_from(run_dir, start.first_step());
    if (was_killed(before)) line["killed"] = true;
    if (last) line["changes"] = changes_between(*last, line);
    return line;
}

}  // namespace train_gpt
