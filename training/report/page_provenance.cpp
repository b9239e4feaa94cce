#include "training/report/page_provenance.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/formatted.h"
#include "device/memory.h"
#include "parallel/mesh.h"
#include "training/report/html_text.h"
#include "training/report/page_data.h"
#include "training/report/setting_text.h"

namespace train_gpt {

std::string configuration_html(const std::vector<RecordedRun>& runs) {
    std::vector<std::string> keys;
    std::set<std::string> seen;
    for (const RecordedRun& run : runs)
        for (const auto& [key, value] : run.config())
            if (seen.insert(key).second) keys.push_back(key);
    if (keys.empty()) return "";
    const auto rows = [&](bool different) {
        std::vector<std::vector<Fact>> facts(runs.size());
        for (const std::string& key : keys) {
            std::set<std::string> values;
            for (const RecordedRun& run : runs) values.insert(to_text(run.setting(key)));
            if (different && values.size() < 2) continue;
            for (size_t r = 0; r < runs.size(); ++r)
                facts[r].push_back({"<code>" + html(key) + "</code>",
                                    html(setting_text(key, runs[r].setting(key)))});
        }
        return facts;
    };
    std::string text;
    if (runs.size() > 1) {
        const auto differences = rows(true);
        text += differences[0].empty()
                    ? "<p>The configurations are the same.</p>"
                    : "<h3>Where the runs differ</h3>" + table_of_facts(runs, differences);
    }
    return text + "<details><summary>All keys</summary>" + table_of_facts(runs, rows(false)) +
           "</details>\n";
}

namespace {

/// Number, sizes and hashes of a list of files in manifest.json.
std::string files_html(const Json& files) {
    constexpr size_t most = 8;
    double tokens = 0, bytes = 0;
    std::string list;
    for (size_t i = 0; i < files.size(); ++i) {
        const Json& file = files[i];
        if (!file.is_object()) continue;
        tokens += number_of(file.value("tokens", Json()));
        bytes += number_of(file.value("bytes", Json()));
        if (i >= most) continue;
        const std::string hash = field_text(file, "xxh3");
        list += "<li>" + html(field_text(file, "path")) +
                (hash.empty() ? "" : " <code>" + html(hash) + "</code>") + "</li>";
    }
    if (files.size() > most) list += concat("<li>… and ", files.size() - most, " more</li>");
    return concat(
        files.size(), files.size() == 1 ? " file, " : " files, ",
        tokens > 0 ? rough_count(tokens) + " tokens" : format_bytes(static_cast<uint64_t>(bytes)),
        "<ul class=\"files\">", list, "</ul>");
}

/// What manifest.json says of the training or the validation data.
std::string data_html(const Json& data) {
    if (!data.is_array()) return html(text_of(data));
    if (data.empty() || !data[0].is_object() || !data[0].contains("files")) return files_html(data);
    std::string text;
    for (const Json& source : data)
        if (source.is_object())
            text += "<b>" + html(field_text(source, "name")) + "</b>, weight " +
                    html(field_text(source, "weight")) + ": " +
                    (source.value("files", Json()).is_array() ? files_html(source["files"])
                                                              : html(field_text(source, "files")));
    return text;
}

/// "8 on 2 hosts: a, b"
std::string ranks_of(const Json& start) {
    std::string hosts;
    const Json names = start.value("hosts", Json());
    for (const Json& host : names) hosts += (hosts.empty() ? "" : ", ") + html(text_of(host));
    return html(field_text(start, "ranks")) +
           (names.size() > 1 ? concat(" on ", names.size(), " hosts: ") : " on ") + hosts;
}

/// "2 × pipeline, 4 × data parallel, ZeRO stage 1": the axes with several ranks, and data.
std::string mesh_text(const RecordedRun& run, double ranks) {
    std::string axes;
    for (const Axis axis : all_axes) {
        if (axis == Axis::data) continue;
        const double size = number_of(run.setting(concat("parallel.", name_of(axis))), 1);
        if (size <= 1) continue;
        axes += formatted("%.0f × ", size) + name_of(axis) + ", ";
        ranks /= size;
    }
    return axes + formatted("%.0f × data parallel, ZeRO stage ", ranks) +
           html(setting_text("parallel.zero", run.setting("parallel.zero")));
}

/// What was said about the last spikes.
std::string spikes_html(const RecordedRun& run) {
    constexpr size_t most = 5;
    std::vector<std::string> texts;
    for (const Json& line : run.history())
        if (field_text(line, "event") == "spike") texts.push_back(field_text(line, "text"));
    std::string text;
    if (texts.size() > most) text += concat("<li>… ", texts.size() - most, " earlier ones</li>");
    for (size_t i = texts.size() - std::min(texts.size(), most); i < texts.size(); ++i)
        text += "<li>" + html(shortened(texts[i], 400)) + "</li>";
    return text.empty() ? "" : "<ul class=\"files\">" + text + "</ul>";
}

/// The command of the last start, with the quotes that a shell needs.
std::string command_of(const Json& start) {
    const Json words = start.value("command", Json());
    std::string text;
    for (const Json& word : words) {
        std::string shown = text_of(word);
        const bool plain =
            !shown.empty() &&
            shown.find_first_not_of(
                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%") ==
                shown.npos;
        if (!plain) {
            for (size_t at = 0; (at = shown.find('\'', at)) != shown.npos; at += 4)
                shown.replace(at, 1, "'\\''");
            shown = "'" + shown + "'";
        }
        text += (text.empty() ? "" : " ") + shown;
    }
    return text.empty() ? "" : "<code>" + html(text) + "</code>";
}

/// A start or an end of the run.
std::string event_html(const Json& line) {
    const std::string reason = field_text(line, "reason");
    std::string text = reason == "complete"
                           ? "complete at step "
                           : "stopped (" + html(shortened(reason, 300)) + ") at step ";
    if (field_text(line, "event") == "start")
        text = field_text(line, "resumes") == "true" ? "resumed from step " : "started at step ";
    const auto time = static_cast<int64_t>(number_of(line.value("time", Json())));
    return "<li>" + utc_time(time) + ": " + text + html(field_text(line, "step")) + "</li>";
}

/// When the run started and ended, and what a supervisor did, a line each; of many the first and
/// the last ones.
std::string events_html(const RecordedRun& run) {
    constexpr size_t most_at_an_end = 20;
    std::vector<std::pair<double, std::string>> events;  // time, line
    const auto add = [&](const Json& line, const std::string& text) {
        events.emplace_back(number_of(line.value("time", Json())), text);
    };
    int64_t checkpoints = 0;
    for (const Json& line : run.history()) {
        const std::string event = field_text(line, "event");
        checkpoints += event == "checkpoint" ? 1 : 0;
        if (event == "start" || event == "end") add(line, event_html(line));
    }
    if (events.empty()) return "";
    if (const std::vector<Json> supervised = supervisor_events(run); !supervised.empty()) {
        for (const Json& line : supervised)
            add(line,
                "<li>" + utc_time(static_cast<int64_t>(number_of(line.value("time", Json())))) +
                    ": supervisor: " + html(shortened(field_text(line, "text"), 300)) + "</li>");
        std::ranges::stable_sort(events, {}, &std::pair<double, std::string>::first);
    }
    std::string text;
    for (size_t i = 0; i < events.size(); ++i) {
        if (i == most_at_an_end && events.size() > 2 * most_at_an_end) {
            const size_t left_out = events.size() - 2 * most_at_an_end;
            text += concat("<li>… and ", left_out, " more, all of which are in history.jsonl</li>");
            i += left_out;
        }
        text += events[i].second;
    }
    return "<ul class=\"files\">" + text + "</ul>" +
           (checkpoints > 0
                ? concat(checkpoints, " checkpoint", checkpoints == 1 ? "" : "s", " written")
                : "");
}

std::vector<Fact> provenance_of(const RecordedRun& run) {
    const Json none = Json::object();
    const Json& manifest = run.manifest().is_object() ? run.manifest() : none;
    const Json& choices = run.choices().is_object() ? run.choices() : none;
    const Json& start = run.last_start() ? *run.last_start() : none;
    const std::string tokenizer = field_text(start, "tokenizer");
    const double ranks = number_of(start.value("ranks", Json()));
    std::string device = field_text(start, "device");
    if (device.empty()) device = field_text(manifest, "cpu");
    return {{"Folder", html(run.folder().string())},
            {"Command", command_of(start)},
            {"Starts and ends", events_html(run)},
            {"What was said of spikes", spikes_html(run)},
            {"Program", html(field_text(start, "version").empty() ? field_text(manifest, "program")
                                                                  : field_text(start, "version"))},
            {"Device", html(device)},
            {"Ranks", ranks > 0 ? ranks_of(start) : html(field_text(manifest, "host"))},
            {"Mesh", ranks > 0 ? mesh_text(run, ranks) : ""},
            {"Micro-batch",
             field_text(choices, "micro_batch").empty()
                 ? ""
                 : html(field_text(choices, "micro_batch")) +
                       " sequences, recompute: " + html(field_text(choices, "recompute"))},
            {"Attention", html(field_text(manifest, "attention"))},
            {"Bits", manifest.value("deterministic", Json(true)) == Json(false)
                         ? "kernels.deterministic is off: bits differ from run to run"
                         : ""},
            {"Seed", html(field_text(manifest, "seed"))},
            {"Weights from", html(text_of(run.setting("model.init_from")))},
            {"Tokenizer", html(field_text(manifest, "tokenizer")) +
                              (tokenizer.empty() ? "" : " <code>" + html(tokenizer) + "</code>")},
            {"Training data", data_html(manifest.value("train", Json()))},
            {"Validation data", data_html(manifest.value("val", Json()))}};
}

}  // namespace

std::string provenance_html(const std::vector<RecordedRun>& runs) {
    std::vector<std::vector<Fact>> facts;
    for (const RecordedRun& run : runs) facts.push_back(provenance_of(run));
    return table_of_facts(runs, facts);
}

}  // namespace train_gpt
