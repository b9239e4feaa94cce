#include "training/evaluations/task_report.h"

#include <algorithm>

#include "base/error.h"
#include "base/formatted.h"
#include "base/text_table.h"
#include "training/evaluations/core_tasks.h"

namespace train_gpt {

namespace {

/// "0.3125", with its standard error "0.3125 ± 0.0210", or "-".
std::string text_of(const Estimate& estimate, bool with_error) {
    if (std::isnan(estimate.mean)) return "-";
    std::string text = formatted("%.4f", estimate.mean);
    if (with_error && std::isfinite(estimate.error)) text += formatted(" ± %.4f", estimate.error);
    return text;
}

using TableRow = std::vector<std::string>;

/// Without the columns in which no row but the first has a value.
std::vector<TableRow> without_empty_columns(std::vector<TableRow> rows) {
    for (size_t c = rows.front().size(); c-- > 0;)
        if (std::all_of(rows.begin() + 1, rows.end(),
                        [&](const TableRow& r) { return r[c] == "-"; }))
            for (TableRow& row : rows) row.erase(row.begin() + static_cast<std::ptrdiff_t>(c));
    return rows;
}

std::string describe_core(const CoreScore& core) {
    std::string text;
    for (size_t v = std::size(core_versions); v-- > 0;)
        text += concat(text.empty() ? "CORE " : "; with baselines ",
                       text.empty() ? "" : concat(core_versions[v], " "),
                       text_of(core.by_version[v], true),
                       text.empty() ? concat(" with baselines ", core_versions[v]) : "");
    return text;
}

/// Adds NAME and NAME_stderr, as far as they are known.
void add(Json& json, const std::string& name, const Estimate& estimate) {
    if (std::isfinite(estimate.mean)) json[name] = estimate.mean;
    if (std::isfinite(estimate.error)) json[name + "_stderr"] = estimate.error;
}

}  // namespace

std::string describe_tasks(std::span<const TaskResult> results) {
    std::vector<TableRow> rows{{"task", "items", "shots", "accuracy", "centered", "by sum",
                                "by character", "by byte", "by token", "exact match", "perplexity",
                                "bits/byte"}};
    for (const TaskResult& r : results)
        rows.push_back(
            {r.name, std::to_string(r.items), std::to_string(r.shots), text_of(r.accuracy, true),
             text_of(r.centered, false), text_of(r.by_sum, false), text_of(r.per_character, false),
             text_of(r.per_byte, false), text_of(r.per_token, false), text_of(r.exact_match, false),
             std::isnan(r.perplexity) ? "-" : formatted("%.4g", r.perplexity),
             text_of(r.bits_per_byte, true)});
    std::string text = text_table(without_empty_columns(rows));
    if (const auto core = core_score(results)) text += describe_core(*core) + "\n";
    return text;
}

std::string summary_of_tasks(std::span<const TaskResult> results) {
    if (const auto core = core_score(results)) return describe_core(*core);
    std::string text;
    for (const TaskResult& r : results)
        text += concat(text.empty() ? "" : ", ", r.name, " ", text_of(r.accuracy, true));
    return text;
}

Json json_of(std::span<const TaskResult> results) {
    Json json{{"tasks", Json::array()}};
    for (const TaskResult& r : results) {
        Json task{{"task", r.name},
                  {"form", name_of(r.form)},
                  {"procedure", name_of(r.procedure)},
                  {"shots", r.shots},
                  {"items", r.items}};
        add(task, "accuracy", r.accuracy);
        add(task, "centered", r.centered);
        add(task, "accuracy_by_sum", r.by_sum);
        add(task, "accuracy_per_character", r.per_character);
        add(task, "accuracy_per_byte", r.per_byte);
        add(task, "accuracy_per_token", r.per_token);
        add(task, "exact_match", r.exact_match);
        add(task, "bits_per_byte", r.bits_per_byte);
        if (std::isfinite(r.perplexity)) task["perplexity"] = r.perplexity;
        json["tasks"].push_back(std::move(task));
    }
    if (const auto core = core_score(results))
        for (size_t v = 0; v < std::size(core_versions); ++v)
            add(json["core"][core_versions[v]], "score", core->by_version[v]);
    return json;
}

std::vector<std::pair<std::string, double>> metrics_of_tasks(std::span<const TaskResult> results) {
    std::vector<std::pair<std::string, double>> metrics;
    const auto add = [&](const std::string& name, double value) {
        if (std::isfinite(value)) metrics.emplace_back(name, value);
    };
    for (const TaskResult& r : results) {
        const std::string name = "task/" + r.name;
        add(name + "/accuracy", r.accuracy.mean);
        add(name + "/stderr", r.accuracy.error);
        add(name + "/centered", r.centered.mean);
        add(name + "/bits_per_byte", r.bits_per_byte.mean);
    }
    if (const auto core = core_score(results))
        for (size_t v = 0; v < std::size(core_versions); ++v) {
            add(concat("core/", core_versions[v]), core->by_version[v].mean);
            add(concat("core/", core_versions[v], "/stderr"), core->by_version[v].error);
        }
    return metrics;
}

std::string items_json(const Task& task, std::span<const AnswerLosses> losses) {
    std::string lines;
    for (const TaskItem& item : task.items) {
        const std::span<const AnswerLosses> answers = losses.first(task.choices(item));
        losses = losses.subspan(answers.size());
        const ItemScores scores = scores_of(task, item, answers);
        Json json{{"task", task.name}, {"line", item.line}};
        for (const AnswerLosses& answer : answers) {
            json["nats"].push_back(answer.nats);
            json["tokens"].push_back(static_cast<int64_t>(answer.tokens));
        }
        json["bits_per_byte"] = scores.bits_per_byte;
        if (task.form == TaskForm::language_modeling) {
            json["exact_match"] = scores.matches;
        } else {
            json["gold"] = item.gold;
            json["by_sum"] = scores.by_sum;
            json["per_character"] = scores.per_character;
            json["per_byte"] = scores.per_byte;
            json["per_token"] = scores.per_token;
        }
        lines += to_text(json) + "\n";
    }
    return lines;
}

}  // namespace train_gpt
