#include "training/files/made_from.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/formatted.h"
#include "base/printable.h"
#include "training/files/checkpoint.h"
#include "training/files/history_check.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

std::string text_of(const Json& json) {
    return json.is_string() ? json.get<std::string>() : to_text(json);
}

int64_t number_in(const Json& json, const char* key) {
    const Json value = json.value(key, Json());
    return value.is_number_integer() ? value.get<int64_t>() : 0;
}

/// The lines of the history that led to the checkpoint: of its run, up to the line that records it,
/// and the evaluations of the same weights after that line.
std::vector<Json> events_until(const HistoryChain& history, int64_t line, int64_t step) {
    std::vector<Json> events;
    for (const HistoryLine& of : history.lines) {
        if (line > 0 && of.number > line) {
            const Json name = of.event.value("event", Json());
            if (name == "start" && number_in(of.event, "step") != step) break;
            if (name == "evaluation" && number_in(of.event, "step") == step)
                events.push_back(of.event);
            continue;
        }
        if (of.event.value("event", Json()) == "start" &&
            of.event.value("resumes", Json()) == false)
            events.clear();
        events.push_back(of.event);
    }
    return events;
}

/// The starts that trained the steps up to `step`. A start that resumed before the end of an
/// earlier one has trained the later steps again.
Json starts_of(const std::vector<Json>& events, int64_t step) {
    std::vector<Json> starts;
    for (const Json& event : events) {
        if (event.value("event", Json()) != "start" || number_in(event, "step") >= step) continue;
        const int64_t after = number_in(event, "step");
        while (!starts.empty() && number_in(starts.back(), "first") > after) starts.pop_back();
        if (!starts.empty()) starts.back()["last"] = after;
        Json start = {{"first", after + 1}, {"last", step}};
        for (const auto& [key, value] : event.items())
            if (key != "event" && key != "step" && key != "previous" && key != "configuration")
                start[key] = value;
        starts.push_back(std::move(start));
    }
    return starts;
}

/// The evaluations of the steps up to `step`, the last of each.
Json evaluations_of(const std::vector<Json>& events, int64_t step) {
    std::map<int64_t, Json> of_steps;
    for (const Json& event : events) {
        if (event.value("event", Json()) != "evaluation" || number_in(event, "step") > step)
            continue;
        Json evaluation = event;
        for (const char* key : {"event", "previous", "seconds"}) evaluation.erase(key);
        of_steps[number_in(event, "step")] = std::move(evaluation);
    }
    Json list = Json::array();
    for (auto& [at, evaluation] : of_steps) list.push_back(std::move(evaluation));
    return list;
}

/// How often what happened.
Json counts_of(const std::vector<Json>& events) {
    Json counts = Json::object();
    for (const Json& event : events)
        if (const Json name = event.value("event", Json());
            name == "spike" || name == "failure" || name == "signal" || name == "restart") {
            Json& count = counts[name.get<std::string>()];
            count = count.is_null() ? 1 : count.get<int64_t>() + 1;
        }
    return counts;
}

/// The sources of training data, with the tokens that were read of each.
Json sources_of(const RunPosition& position, const Json& configuration) {
    Json sources = Json::array();
    const DataOrder& order = position.order;
    const int64_t tokens = position.tokens.before(position.step);
    const Json train = configuration.value("data", Json::object()).value("train", Json());
    std::map<std::string, int64_t> before = order.tokens_before;
    const std::vector<int64_t> given =
        order.sources.empty() ? std::vector<int64_t>() : order.tokens_of_sources(tokens);
    for (size_t s = 0; s < given.size(); ++s) {
        Json source = Json::object();
        if (train.is_string()) source["name"] = train;
        if (train.is_array() && train.size() == given.size() && train[s].is_object())
            source["name"] = train[s].value("name", Json(concat("source ", s + 1)));
        const auto earlier = before.find(order.sources[s].content);
        source["weight"] = order.sources[s].weight;
        source["tokens"] = given[s] + (earlier == before.end() ? 0 : earlier->second);
        source["content"] = order.sources[s].content;
        if (earlier != before.end()) before.erase(earlier);
        sources.push_back(std::move(source));
    }
    for (const auto& [content, count] : before)
        sources.push_back(
            {{"name", "data that were replaced later"}, {"tokens", count}, {"content", content}});
    return sources;
}

/// "optimizer.learning_rate from 0.1 to 0.2"
std::string describe_change(const Json& change) {
    std::string what = text_of(change.value("what", Json("?")));
    constexpr std::string_view key = "configuration.";
    if (what.starts_with(key)) what.erase(0, key.size());
    const auto value = [&](const char* name) {
        const std::string text = text_of(change.value(name, Json()));
        return text.size() > 40 ? text.substr(0, 12) + "…" : text;
    };
    return concat(what, " from ", value("before"), " to ", value("now"));
}

std::string describe_start(const Json& start) {
    const Json binary = start.value("binary", Json::object());
    std::string hosts;
    for (const Json& host : start.value("hosts", Json::array()))
        hosts += (hosts.empty() ? "" : ", ") + text_of(host);
    const Json time = start.value("time", Json());
    std::string text = concat(describe_steps_of(start), ": ",
                              time.is_number_integer() ? utc_time(time.get<int64_t>()) : "");
    if (start.contains("user")) text += ", by " + text_of(start["user"]);
    text += concat(" on ", hosts, ", ", number_in(start, "ranks"), " × ",
                   text_of(start.value("device", Json("unknown"))), ", train_gpt ",
                   text_of(start.value("version", Json("unknown"))));
    if (binary.is_object() && binary.contains("sha256"))
        text += ", program " + text_of(binary["sha256"]);
    std::string changes;
    for (const Json& change : start.value("changes", Json::array()))
        changes += (changes.empty() ? "\n    changed: " : "; ") + describe_change(change);
    return text + changes;
}

/// "train: 3 files, 1,234 bytes, all with hashes"
std::string describe_files(const Json& list) {
    if (list.is_string()) return text_of(list);
    int64_t files = 0, bytes = 0, hashes = 0;
    for (const Json& entry : list) {
        const Json inner = entry.is_object() ? entry.value("files", Json()) : Json();
        for (const Json& file : inner.is_array() ? inner : Json::array({entry})) {
            if (!file.is_object()) continue;
            ++files;
            bytes += number_in(file, "bytes");
            hashes += file.contains("xxh3") ? 1 : 0;
        }
    }
    return concat(files, files == 1 ? " file, " : " files, ",
                  with_separators(static_cast<uint64_t>(bytes)), " bytes, ", hashes,
                  " with a recorded hash");
}

}  // namespace

std::string describe_steps_of(const Json& start) {
    const int64_t first = number_in(start, "first"), last = number_in(start, "last");
    return first == last ? concat("step ", first) : concat("steps ", first, " to ", last);
}

Json made_from(const fs::path& checkpoint, const HistoryChain& history) {
    const int64_t step = checkpoint_step(checkpoint);
    Json made = {{"checkpoint", checkpoint.string()},
                 {"step", step},
                 {"manifest", manifest_hash(checkpoint)}};
    const CheckpointRecords records = checkpoint_records(history);
    const auto record = records.find(step);
    const bool recorded =
        record != records.end() && made["manifest"] == Json(record->second.manifest);
    const int64_t line = recorded ? record->second.line : 0;
    if (line > 0) made["line"] = line;
    const Json manifest = try_parse_json(MappedFile(checkpoint / "manifest.json").text());
    // Without either, the history is another run's.
    const bool is_ours =
        recorded || history.line_of(manifest.value("history", std::string())) != nullptr;
    for (const char* key : {"history", "program"})
        if (manifest.is_object() && manifest.contains(key)) made[key] = manifest[key];
    Json configuration = try_parse_json(MappedFile(checkpoint / "train_gpt.json").text());
    if (configuration.is_object()) made["configuration"] = std::move(configuration);
    try {
        const RunPosition position = checkpoint_position(checkpoint);
        made["tokens"] = position.tokens.before(step);
        if (Json sources = sources_of(position, made.value("configuration", Json::object()));
            !sources.empty())
            made["sources"] = std::move(sources);
    } catch (const Error&) {
        // The configuration is another version's, by whose rules it cannot be read.
    }

    if (!is_ours) return made;
    const std::vector<Json> events = events_until(history, line, step);
    if (Json starts = starts_of(events, step); !starts.empty()) {
        const Json& last = starts.back();
        for (const Json& event : events)  // with the sizes that train_gpt.json may leave open
            if (event.value("event", Json()) == "start" && event.contains("configuration"))
                made["configuration"] = event["configuration"];
        if (last.contains("tokenizer_sha256"))
            made["tokenizer"] = {{"path", made.value("configuration", Json::object())
                                              .value("tokenizer", Json::object())
                                              .value("path", Json(""))},
                                 {"sha256", last["tokenizer_sha256"]}};
        made["starts"] = std::move(starts);
    }
    if (Json data = recorded_data_of(history, line); data.is_object())
        made["data"] = std::move(data);
    if (Json evaluations = evaluations_of(events, step); !evaluations.empty())
        made["evaluations"] = std::move(evaluations);
    if (Json counts = counts_of(events); !counts.empty()) made["events"] = std::move(counts);
    return made;
}

std::string describe_made_from(const Json& made) {
    const auto count = [](const Json& json, const char* key) {
        return with_separators(static_cast<uint64_t>(std::max<int64_t>(0, number_in(json, key))));
    };
    std::string text =
        concat(text_of(made["checkpoint"]), ", after ", count(made, "tokens"), " tokens",
               made.contains("line")
                   ? concat(", which line ", number_in(made, "line"), " of the history records")
                   : std::string(),
               ", was made from\n");
    for (const Json& source : made.value("sources", Json::array()))
        text += concat("  ", count(source, "tokens"), " tokens of ",
                       text_of(source.value("name", Json("training data"))), "\n");
    const Json data = made.value("data", Json::object());
    for (const auto& [split, name] :
         {std::pair{"train", "training data"}, {"val", "validation data"}})
        if (data.contains(split) && data[split] != "")
            text += concat("  ", name, ": ", describe_files(data[split]), "\n");
    if (made.contains("tokenizer"))
        text += concat("  tokenizer ", text_of(made["tokenizer"]["path"]), ", ",
                       text_of(made["tokenizer"]["sha256"]), "\n");
    for (const Json& start : made.value("starts", Json::array()))
        text += "  " + describe_start(start) + "\n";
    if (made.contains("evaluations")) {
        const Json& last = made["evaluations"].back();
        text += concat("  evaluated after step ", number_in(last, "step"), ": validation loss ",
                       text_of(last.value("val_loss", Json())), "\n");
    }
    return text;
}

}  // namespace train_gpt
