#include "training/files/history_check.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/json_file.h"
#include "base/sha256.h"
#include "training/files/checkpoint.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

std::string text_in(const Json& json, const char* key) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    return json.is_object() && found != json.end() && found->is_string() ? found->get<std::string>()
                                                                         : std::string();
}

Json object_in(const Json& json, const char* key) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    return json.is_object() && found != json.end() && found->is_object() ? *found
                                                                         : Json(Json::object());
}

int64_t step_of(const Json& event) {
    const Json step = event.value("step", Json());
    return step.is_number_integer() ? step.get<int64_t>() : -1;
}

bool is_start(const HistoryLine& line) { return text_in(line.event, "event") == "start"; }

/// Adds what a line records about checkpoints.
void add_records(const HistoryLine& line, CheckpointRecords& records) {
    const std::string event = text_in(line.event, "event");
    const auto add = [&](int64_t step, const std::string& manifest, bool saved) {
        if (step >= 0 && !manifest.empty()) records[step] = {line.number, manifest, saved};
    };
    if (event == "checkpoint") add(step_of(line.event), text_in(line.event, "manifest"), true);
    const Json found = object_in(line.event, "checkpoints");
    if (event == "chain")
        for (const auto& [name, manifest] : found.items())
            if (manifest.is_string())
                add(std::atoll(name.substr(std::min<size_t>(name.size(), 5)).c_str()),
                    manifest.get<std::string>(), false);
    if (event == "start") {
        const Json from = object_in(line.event, "checkpoint");
        const int64_t step = step_of(from);
        if (!records.contains(step)) add(step, text_in(from, "manifest"), false);
    }
}

/// Whether a hash is that of a line of the chain before line `number`.
bool is_line_before(const HistoryChain& history, const std::string& hash, int64_t number) {
    const HistoryLine* line = history.line_of(hash);
    return line && line->number < number;
}

std::string name_in(const fs::path& run_dir) { return (run_dir / history_file).string(); }

}  // namespace

CheckpointRecords checkpoint_records(const HistoryChain& history) {
    CheckpointRecords records;
    for (const HistoryLine& line : history.lines)
        if (history.first > 0 && line.number >= history.first) add_records(line, records);
    return records;
}

std::string foreign_checkpoint(const Json& start, const HistoryChain& before) {
    const Json from = object_in(start, "checkpoint");
    const std::string head = text_in(from, "history");
    const bool decays =
        !text_in(object_in(object_in(start, "configuration"), "schedule"), "decay_from").empty();
    if (head.empty() || decays || start.value("replays", Json()) == true || before.line_of(head))
        return "";
    return concat("there is no line that the checkpoint of step ", step_of(from),
                  " names, from which the run resumed: lines were removed or changed, or the "
                  "checkpoint is another run's");
}

std::optional<HistoryBreak> broken_start(const HistoryChain& history) {
    CheckpointRecords records;
    HistoryChain before;
    before.first = history.first;
    for (const HistoryLine& line : history.lines) {
        if (history.first == 0 || line.number < history.first) continue;
        if (is_start(line)) {
            const Json from = object_in(line.event, "checkpoint");
            const auto known = records.find(step_of(from));
            if (known != records.end() && known->second.manifest != text_in(from, "manifest"))
                return HistoryBreak{
                    line.number,
                    concat("records that the run resumed from a checkpoint of step ", known->first,
                           " whose manifest.json is not the one of line ", known->second.line,
                           ": it was changed or replaced before")};
            if (const std::string foreign = foreign_checkpoint(line.event, before);
                !foreign.empty())
                return HistoryBreak{line.number, "is a start, and before it " + foreign};
        }
        add_records(line, records);
        before.lines.push_back(line);
    }
    return {};
}

std::string checkpoint_trouble(const fs::path& checkpoint, const HistoryChain& history) {
    const fs::path run_dir = checkpoint.parent_path(), manifest = checkpoint / "manifest.json";
    const std::string head = text_in(read_json(manifest), "history");
    const CheckpointRecords records = checkpoint_records(history);
    const auto record = records.find(checkpoint_step(checkpoint));
    if (record == records.end()) {
        if (head.empty()) return "";
        return concat(manifest.string(), " is not recorded in ", name_in(run_dir), ": ",
                      history.line_of(head)
                          ? "it was added, or its line was removed, or the program has not "
                            "written the line: it was killed, or still trains; a run that resumes "
                            "from it records it"
                          : "the line that it names is not there either, so lines were removed, or "
                            "the checkpoint is another run's");
    }
    const CheckpointRecord& of = record->second;
    if (sha256_of_file(manifest) != of.manifest)
        return concat(manifest.string(), " is not the one that line ", of.line, " of ",
                      name_in(run_dir), " records: it was changed or replaced");
    if (of.saved && !is_line_before(history, head, of.line))
        return concat(manifest.string(), " names a line that ", name_in(run_dir),
                      " does not have before line ", of.line, ": lines were changed or removed");
    return "";
}

const HistoryLine* last_start(const HistoryChain& history) {
    const HistoryLine* last = nullptr;
    for (const HistoryLine& line : history.lines)
        if (is_start(line)) last = &line;
    return last;
}

std::string run_files_trouble(const fs::path& run_dir, const HistoryChain& history) {
    Json recorded = Json::object();
    std::map<std::string, int64_t> lines;
    for (const HistoryLine& line : history.lines) {
        if (is_start(line)) recorded = Json::object();
        const Json files = object_in(line.event, "files");
        for (const auto& [name, hash] : files.items()) {
            recorded[name] = hash;
            lines[name] = line.number;
        }
    }
    for (const auto& [name, hash] : recorded.items()) {
        // The name is from a file that somebody may have written to make us read another one.
        if (fs::path(name).filename() != name) continue;
        const fs::path file = run_dir / name;
        const std::string by = concat("line ", lines[name], " of ", name_in(run_dir));
        if (!fs::exists(file)) return concat(file.string(), ", which ", by, " records, is missing");
        if (Json(sha256_of_file(file)) != hash)
            return concat(file.string(), " is not the one that ", by,
                          " records: it was changed, or a start was killed before its line was "
                          "written");
    }
    return "";
}

Json recorded_data_of(const HistoryChain& history, int64_t up_to) {
    std::map<std::string, Json> lists;
    Json last;
    for (const HistoryLine& line : history.lines) {
        if (up_to > 0 && line.number > up_to) break;
        const Json data = object_in(line.event, "data");
        const std::string hash = text_in(data, "sha256");
        if (hash.empty()) continue;
        if (data.contains("train")) lists[hash] = data;
        if (lists.contains(hash)) last = lists[hash];
    }
    return last;
}

std::vector<RecordedFile> data_files_of(const fs::path& run_dir, const HistoryChain& history) {
    const HistoryLine* start = last_start(history);
    const fs::path folder = start ? text_in(start->event, "working_directory") : "";
    std::vector<RecordedFile> files;
    std::set<std::string> seen;
    const std::function<void(const Json&)> add = [&](const Json& json) {
        const std::string path = text_in(json, "path");
        if (path.empty()) {
            if (json.is_structured())
                for (const Json& part : json) add(part);
            return;
        }
        if (!seen.insert(path).second) return;
        const Json bytes = json.value("bytes", Json());
        files.push_back({.path = fs::exists(path) ? fs::path(path) : folder / path,
                         .manifest = run_dir / history_file,
                         .bytes = bytes.is_number_unsigned() || bytes.is_number_integer()
                                      ? std::optional(bytes.get<uint64_t>())
                                      : std::nullopt,
                         .hash = text_in(json, "xxh3")});
    };
    add(recorded_data_of(history));
    return files;
}

}  // namespace train_gpt
