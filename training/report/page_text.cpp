#include "training/report/page_text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/formatted.h"
#include "device/memory.h"
#include "training/report/thinning.h"
#include "training/watch/progress.h"

namespace train_gpt {

namespace {

std::string count(double number) {
    return with_separators(static_cast<uint64_t>(std::max(0.0, number)));
}

/// "39.3 million"
std::string rough_count(double number) {
    if (number >= 1e12) return formatted("%.3g trillion", number / 1e12);
    if (number >= 1e9) return formatted("%.3g billion", number / 1e9);
    if (number >= 1e6) return formatted("%.3g million", number / 1e6);
    return count(number);
}

std::string text_of(const Json& value) {
    if (value.is_null()) return "";
    return value.is_string() ? value.get<std::string>() : to_text(value);
}

/// A field of a JSON object as text; empty if it is missing.
std::string field(const Json& object, const char* name) {
    return object.is_object() && object.contains(name) ? text_of(object[name]) : "";
}

double number_of(const Json& value, double otherwise = 0) {
    return value.is_number() ? value.get<double>() : otherwise;
}

/// The mark of a run's colour, as the plots use it.
std::string swatch(size_t run, bool several) {
    return several ? concat("<i class=\"swatch c", run, "\"></i>") : "";
}

struct Fact {
    std::string name, value;  // HTML; an empty value is shown as –
};

/// Facts of each run, the same in each: for several runs a table with a row for each fact.
std::string table_of_facts(const std::vector<RecordedRun>& runs,
                           const std::vector<std::vector<Fact>>& facts) {
    std::string text = "<div class=\"wide\"><table class=\"facts\">";
    if (runs.size() > 1) {
        text += "<thead><tr><th></th>";
        for (size_t r = 0; r < runs.size(); ++r)
            text += "<th scope=\"col\">" + swatch(r, true) + html(runs[r].name()) + "</th>";
        text += "</tr></thead>";
    }
    text += "<tbody>";
    for (size_t f = 0; f < facts[0].size(); ++f) {
        if (std::ranges::all_of(facts, [&](const auto& of) { return of[f].value.empty(); }))
            continue;
        text += "<tr><th scope=\"row\">" + facts[0][f].name + "</th>";
        for (const auto& of_run : facts)
            text += "<td>" + (of_run[f].value.empty() ? "–" : of_run[f].value) + "</td>";
        text += "</tr>\n";
    }
    return text + "</tbody></table></div>\n";
}

// ---- Summary ------------------------------------------------------------------------------------

std::string state_of(const RecordedRun& run) {
    for (size_t i = run.history().size(); i-- > 0;) {
        const Json& line = run.history()[i];
        const std::string event = field(line, "event");
        if (event == "end")
            return field(line, "reason") == "complete"
                       ? "complete"
                       : "stopped: " + html(shortened(field(line, "reason"), 1200));
        if (event == "start" && run.active()) return "running when this page was written";
        if (event == "start") return "ended without saying why (killed, or the machine failed)";
    }
    if (run.active()) return "running when this page was written";
    const int64_t planned = run.steps_planned();
    return planned > 0 && run.last_step() >= planned ? "complete" : "not complete";
}

std::string model_of(const RecordedRun& run) {
    const std::string family = text_of(run.setting("model.family"));
    if (family.empty()) return "";
    std::string text =
        concat(html(family), ", ", html(text_of(run.setting("model.n_layer"))), " layers of ",
               html(text_of(run.setting("model.n_embd"))), " channels");
    if (const Json* start = run.last_start())
        if (const double n = number_of(start->value("parameters", Json())); n > 0)
            text = rough_count(n) + " parameters: " + text;
    return text;
}

std::string speed_of(const RecordedRun& run) {
    std::vector<double> rates;
    for (const double rate : run.training().column("tokens_per_second"))
        if (std::isfinite(rate)) rates.push_back(rate);
    if (rates.empty()) return "";
    const auto middle = rates.begin() + std::ssize(rates) / 2;
    std::ranges::nth_element(rates, middle);
    std::string text = count(std::round(*middle)) + " tokens/s";
    const double share = run.training().last("peak_fraction"), mfu = run.training().last("mfu");
    if (std::isfinite(mfu)) text += formatted(", %.0f %% of the datasheet’s rate", 100 * mfu);
    if (std::isfinite(share)) text += formatted(", %.0f %% of the measured limit", 100 * share);
    return text;
}

std::string time_of(const RecordedRun& run) {
    double seconds = 0;
    for (const MetricsTable* table : {&run.training(), &run.evaluations()})
        if (const double last = table->last("seconds"); last > seconds) seconds = last;
    return seconds >= 3600 ? format_duration(seconds) + " hours"
                           : formatted("%d min %02d s", static_cast<int>(seconds) / 60,
                                       static_cast<int>(seconds) % 60);
}

std::string tokens_of(const RecordedRun& run) {
    double last = -1;
    for (const MetricsTable* table : {&run.training(), &run.evaluations()})
        for (const double tokens : run.tokens(*table))
            if (tokens > last) last = tokens;
    return last < 0 ? "" : rough_count(last);
}

/// "2.15 of 3", or of several sources "web 0.2 of 0.3, books 2.15 of 3"
std::string passes_of(const RecordedRun& run) {
    const MetricsTable& training = run.training();
    const std::vector<SourceUse> planned = run.passes_planned();
    std::string text;
    for (const SourceUse& source : planned) {
        const bool single = planned.size() == 1 && training.has("passes");
        const double last = training.last(single ? "passes" : "passes/" + source.name);
        if (!text.empty()) text += ", ";
        if (!single) text += html(source.name) + " ";
        text += (std::isfinite(last) ? formatted("%.3g of ", last) : "") +
                formatted("%.3g", source.passes);
    }
    return text;
}

/// An evaluation and the step that it is of; empty if there is none.
std::string evaluation_of(const RecordedRun& run, const char* field, std::optional<size_t> row,
                          const char* unit) {
    if (!row || !run.evaluations().has(field)) return "";
    const double value = run.evaluations().column(field)[*row], at = run.evaluations().step[*row];
    if (!std::isfinite(value)) return "";
    return formatted("%.4f", value) + unit + " at step " + count(at) +
           (at == 0 && run.last_step() > 0 ? ", before training" : "");
}

std::vector<Fact> summary_of(const RecordedRun& run) {
    const int64_t step = run.last_step(), planned = run.steps_planned();
    const MetricsTable& training = run.training();
    const Curve mean = running_mean(training.step, training.column("loss"));
    const std::optional<size_t> last = run.evaluations().last_row("val_loss"),
                                best = run.evaluations().smallest_row("val_loss", "val_tokens");
    const double validation = run.evaluations().last("val_loss");
    const auto shown = [](double value) {
        return std::isfinite(value) ? formatted("%.4f", value) : "";
    };
    return {
        {"State", state_of(run)},
        {"Model", model_of(run)},
        {"Steps", count(static_cast<double>(step)) +
                      (planned > 0 ? " of " + count(static_cast<double>(planned)) : "")},
        {"Tokens seen", tokens_of(run)},
        {"Passes over the training data", passes_of(run)},
        {"Time trained", time_of(run)},
        {"Speed", speed_of(run)},
        {"Training loss, recent mean",
         mean.size() > 0 ? shown(mean.y.back()) + " nats per token" : ""},
        {"Validation loss, last", evaluation_of(run, "val_loss", last, " nats per token")},
        {"The same, per byte of text", evaluation_of(run, "val_bits_per_byte", last, " bits")},
        {"As uncertain as among",
         std::isfinite(validation) && validation < 25
             ? rough_count(std::round(std::exp(validation))) + " equally likely next tokens"
             : ""},
        {"Validation loss, best", run.evaluations().rows() < 2
                                      ? ""
                                      : evaluation_of(run, "val_loss", best, " nats per token")}};
}

}  // namespace

std::string html(std::string_view text) {
    std::string safe;
    for (const char c : printable(text)) switch (c) {
            case '&':
                safe += "&amp;";
                break;
            case '<':
                safe += "&lt;";
                break;
            case '>':
                safe += "&gt;";
                break;
            case '"':
                safe += "&quot;";
                break;
            case '\'':
                safe += "&#39;";
                break;
            default:
                safe += c;
        }
    return safe;
}

std::string shortened(std::string text, size_t most) {
    if (text.size() <= most) return text;
    text.resize(most);
    text.resize(most - unfinished_utf8(text));
    return text + " …";
}

std::string utc_time(int64_t seconds) {
    const std::time_t time = seconds;
    std::tm parts{};
    char text[64];
    if (!gmtime_r(&time, &parts) ||
        std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts) == 0)
        return "";
    return text;
}

std::string summary_html(const std::vector<RecordedRun>& runs) {
    std::vector<std::vector<Fact>> facts;
    for (const RecordedRun& run : runs) facts.push_back(summary_of(run));
    return table_of_facts(runs, facts);
}

std::string notes_html(const std::vector<RecordedRun>& runs) {
    std::vector<std::string> notes = notes_on_comparison(runs);
    for (const RecordedRun& run : runs)
        for (const std::string& note : run.notes()) notes.push_back(note);
    if (notes.empty()) return "";
    std::string text = "<ul class=\"notes\">";
    for (std::string note : notes) {
        note[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(note[0])));
        text += "<li>" + html(note) + ".</li>";
    }
    return text + "</ul>\n";
}

// ---- Samples ------------------------------------------------------------------------------------

namespace {

/// The samples of a run, the last of each step and text; a step that was run again gives the same.
std::vector<const Json*> samples_of(const RecordedRun& run) {
    std::vector<const Json*> samples;
    std::set<std::string> seen;
    for (const Json& line : run.history())
        if (field(line, "event") == "sample" &&
            seen.insert(concat(field(line, "step"), " ", field(line, "text"))).second)
            samples.push_back(&line);
    std::ranges::stable_sort(samples, {},
                             [](const Json* line) { return (*line)["step"].get<int64_t>(); });
    return samples;
}

std::string sample_html(const Json& sample) {
    const std::string text = shortened(field(sample, "text"), 1200);
    return concat("<figure><figcaption>Step ", html(field(sample, "step")),
                  "</figcaption><blockquote><b>", html(field(sample, "prompt")), "</b>", html(text),
                  "</blockquote></figure>\n");
}

}  // namespace

std::string samples_html(const std::vector<RecordedRun>& runs) {
    const size_t most = std::max<size_t>(2, 12 / runs.size());
    std::string text;
    for (size_t r = 0; r < runs.size(); ++r) {
        const std::vector<const Json*> samples = samples_of(runs[r]);
        if (samples.empty()) continue;
        if (runs.size() > 1) text += "<h3>" + swatch(r, true) + html(runs[r].name()) + "</h3>";
        text += "<div class=\"samples\">";
        const size_t shown = std::min(most, samples.size());
        for (size_t i = 0; i < shown; ++i)
            text += sample_html(*samples[shown == 1 ? 0 : i * (samples.size() - 1) / (shown - 1)]);
        text += "</div>";
        if (shown < samples.size())
            text += concat("<p class=\"aside\">", shown, " of ", samples.size(),
                           " samples; all are in history.jsonl.</p>");
    }
    return text;
}

// ---- Configuration ------------------------------------------------------------------------------

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
            for (const RecordedRun& run : runs) values.insert(text_of(run.setting(key)));
            if (different && values.size() < 2) continue;
            for (size_t r = 0; r < runs.size(); ++r)
                facts[r].push_back(
                    {"<code>" + html(key) + "</code>", html(text_of(runs[r].setting(key)))});
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

// ---- Provenance ---------------------------------------------------------------------------------

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
        const std::string hash = field(file, "xxh3");
        list += "<li>" + html(field(file, "path")) +
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
            text += "<b>" + html(field(source, "name")) + "</b>, weight " +
                    html(field(source, "weight")) + ": " +
                    (source.value("files", Json()).is_array() ? files_html(source["files"])
                                                              : html(field(source, "files")));
    return text;
}

/// "8 on 2 hosts: a, b"
std::string ranks_of(const Json& start) {
    std::string hosts;
    const Json names = start.value("hosts", Json());
    for (const Json& host : names) hosts += (hosts.empty() ? "" : ", ") + html(text_of(host));
    return html(field(start, "ranks")) +
           (names.size() > 1 ? concat(" on ", names.size(), " hosts: ") : " on ") + hosts;
}

/// A start or an end of the run.
std::string event_html(const Json& line) {
    const std::string reason = field(line, "reason");
    std::string text = reason == "complete"
                           ? "complete at step "
                           : "stopped (" + html(shortened(reason, 300)) + ") at step ";
    if (field(line, "event") == "start")
        text = field(line, "resumes") == "true" ? "resumed from step " : "started at step ";
    const auto time = static_cast<int64_t>(number_of(line.value("time", Json())));
    return "<li>" + utc_time(time) + ": " + text + html(field(line, "step")) + "</li>";
}

/// When the run started and ended, a line each; of many the first and the last ones.
std::string events_html(const RecordedRun& run) {
    constexpr size_t most_at_an_end = 20;
    std::vector<const Json*> events;
    int64_t checkpoints = 0;
    for (const Json& line : run.history()) {
        const std::string event = field(line, "event");
        checkpoints += event == "checkpoint" ? 1 : 0;
        if (event == "start" || event == "end") events.push_back(&line);
    }
    if (events.empty()) return "";
    std::string text;
    for (size_t i = 0; i < events.size(); ++i) {
        if (i == most_at_an_end && events.size() > 2 * most_at_an_end) {
            const size_t left_out = events.size() - 2 * most_at_an_end;
            text += concat("<li>… and ", left_out, " more, all of which are in history.jsonl</li>");
            i += left_out;
        }
        text += event_html(*events[i]);
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
    const std::string tokenizer = field(start, "tokenizer"),
                      zero = text_of(run.setting("parallel.zero"));
    const double ranks = number_of(start.value("ranks", Json()));
    std::string device = field(start, "device");
    if (device.empty()) device = field(manifest, "cpu");
    return {{"Folder", html(run.folder().string())},
            {"Starts and ends", events_html(run)},
            {"Program", html(field(start, "version").empty() ? field(manifest, "program")
                                                             : field(start, "version"))},
            {"Device", html(device)},
            {"Ranks", ranks > 0 ? ranks_of(start) : html(field(manifest, "host"))},
            {"Mesh",
             ranks > 0 ? formatted("%.0f × data parallel, ZeRO stage ", ranks) + html(zero) : ""},
            {"Micro-batch", field(choices, "micro_batch").empty()
                                ? ""
                                : html(field(choices, "micro_batch")) + " sequences, recompute: " +
                                      html(field(choices, "recompute"))},
            {"Attention", html(field(manifest, "attention"))},
            {"Seed", html(field(manifest, "seed"))},
            {"Weights from", html(text_of(run.setting("model.init_from")))},
            {"Tokenizer", html(field(manifest, "tokenizer")) +
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
