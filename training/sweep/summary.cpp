#include "training/sweep/summary.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/formatted.h"
#include "base/text_table.h"

namespace train_gpt {

namespace {

using State = SweptRun::State;
using Row = SweepSummary::Row;

Row row_of(size_t combination, const std::vector<SweptRun>& runs) {
    Row row{.combination = combination, .state = State::finished};
    std::vector<double> losses;
    for (const SweptRun& run : runs) {
        if (run.combination != combination) continue;
        ++row.seeds;
        if (run.state == State::finished)
            losses.push_back(run.loss);
        else if (row.state != State::failed)
            row.state = run.state;
    }
    row.finished = static_cast<int>(losses.size());
    if (losses.empty()) return row;
    const auto n = static_cast<double>(losses.size());
    double sum = 0, squares = 0;
    for (const double loss : losses) sum += loss;
    row.mean = sum / n;
    for (const double loss : losses) squares += (loss - row.mean) * (loss - row.mean);
    if (losses.size() > 1) row.spread = std::sqrt(squares / (n - 1));
    return row;
}

SweepSummary::Key key_result(const SweepSummary& summary, size_t k) {
    const VariedKey& key = summary.keys[k];
    SweepSummary::Key result;
    for (size_t v = 0; v < key.values.size(); ++v) {
        std::optional<size_t> best;
        for (size_t r = 0; r < summary.rows.size() && !best; ++r)  // in the order of their means
            if (const Row& row = summary.rows[r];
                row.complete() && summary.combinations[row.combination].values[k] == key.values[v])
                best = r;
        result.best_with.push_back(best);
        if (best && (!result.best || *best < *result.best_with[*result.best])) result.best = v;
    }
    if (result.best && key.is_number && key.values.size() > 1) {
        result.at_low_edge = *result.best == 0;
        result.at_high_edge = *result.best + 1 == key.values.size();
    }
    return result;
}

Json number_or_null(double value) { return std::isfinite(value) ? Json(value) : Json(); }

/// The values of a combination by key.
Json values_json(const SweepSummary& summary, size_t combination) {
    Json values = Json::object();
    for (size_t k = 0; k < summary.keys.size(); ++k)
        values[summary.keys[k].key] = parse_json(summary.combinations[combination].values[k]);
    return values;
}

Json row_json(const SweepSummary& summary, const Row& row) {
    return {{"values", values_json(summary, row.combination)},
            {"mean", number_or_null(row.mean)},
            {"spread", number_or_null(row.spread)},
            {"finished", row.finished},
            {"seeds", row.seeds},
            {"state", word_of(row.state)}};
}

}  // namespace

const char* word_of(State state) {
    switch (state) {
        case State::finished:
            return "finished";
        case State::stopped:
            return "stopped";
        case State::halved:
            return "halved";
        case State::failed:
            return "failed";
        default:
            return "waiting";
    }
}

SweepSummary summarize(Measure measure, std::vector<VariedKey> keys,
                       std::vector<Combination> combinations, std::vector<SweptRun> runs) {
    SweepSummary summary{.measure = measure,
                         .keys = std::move(keys),
                         .combinations = std::move(combinations),
                         .runs = std::move(runs),
                         .rows = {},
                         .key_results = {}};
    for (size_t c = 0; c < summary.combinations.size(); ++c)
        summary.rows.push_back(row_of(c, summary.runs));
    std::ranges::stable_sort(summary.rows, [](const Row& a, const Row& b) {
        if (a.complete() != b.complete()) return a.complete();
        return a.complete() && a.mean < b.mean;
    });
    for (size_t k = 0; k < summary.keys.size(); ++k)
        summary.key_results.push_back(key_result(summary, k));
    return summary;
}

std::string loss_text(double loss) { return std::isfinite(loss) ? formatted("%.4f", loss) : "–"; }

std::string describe_edge(const SweepSummary& summary, size_t k) {
    const SweepSummary::Key& result = summary.key_results[k];
    const VariedKey& key = summary.keys[k];
    if (!result.best) return "no value has finished with all its seeds";
    if (!key.is_number || key.values.size() < 2) return "";
    if (result.at_low_edge || result.at_high_edge)
        return concat("the best lies at the edge: it is the ",
                      result.at_low_edge ? "smallest" : "largest", " value tried; try ",
                      result.at_low_edge ? "smaller" : "larger", " ones, too");
    return "the best lies between other values";
}

std::string summary_text(const SweepSummary& summary) {
    std::vector<std::vector<std::string>> lines{{"mean", "spread", "seeds"}};
    for (const VariedKey& key : summary.keys) lines[0].push_back(key.key);
    for (const Row& row : summary.rows) {
        auto& line = lines.emplace_back(std::vector<std::string>{
            loss_text(row.mean), loss_text(row.spread),
            row.complete() ? concat(row.seeds) : concat(row.finished, " of ", row.seeds)});
        for (const std::string& value : summary.combinations[row.combination].values)
            line.push_back(plain_value(value));
        if (!row.complete()) line.push_back(word_of(row.state));
    }
    std::string text = concat(name_of(summary.measure), ", mean and spread (standard deviation) ",
                              "over seeds:\n", text_table(lines));
    for (size_t k = 0; k < summary.keys.size(); ++k) {
        const SweepSummary::Key& result = summary.key_results[k];
        if (summary.keys[k].values.size() < 2) continue;
        text +=
            concat("\n", summary.keys[k].key, ", each value with its best of the other keys:\n");
        lines.clear();
        for (size_t v = 0; v < result.best_with.size(); ++v) {
            const double mean =
                result.best_with[v] ? summary.rows[*result.best_with[v]].mean : std::nan("");
            lines.push_back({"  " + plain_value(summary.keys[k].values[v]), loss_text(mean),
                             v == result.best ? "best"
                             : !std::isfinite(mean)
                                 ? ""
                                 : formatted("%+.4f", mean - summary.rows[0].mean)});
        }
        text += text_table(lines);
        if (const std::string edge = describe_edge(summary, k); !edge.empty())
            text += "  " + edge + "\n";
    }
    if (const Row* best = summary.best(); best && !summary.keys.empty())
        text += concat(
            "\nbest: ", describe(summary.keys, summary.combinations[best->combination].values),
            ": ", loss_text(best->mean), "\n");
    return text;
}

Json summary_json(const SweepSummary& summary) {
    Json json = {{"measure", field_of(summary.measure)},
                 {"best", summary.best() ? row_json(summary, *summary.best()) : Json()},
                 {"keys", Json::array()},
                 {"combinations", Json::array()},
                 {"runs", Json::array()}};
    for (size_t k = 0; k < summary.keys.size(); ++k) {
        const SweepSummary::Key& result = summary.key_results[k];
        Json values = Json::array();
        for (size_t v = 0; v < result.best_with.size(); ++v)
            values.push_back({{"value", parse_json(summary.keys[k].values[v])},
                              {"best", result.best_with[v]
                                           ? row_json(summary, summary.rows[*result.best_with[v]])
                                           : Json()}});
        json["keys"].push_back(
            {{"key", summary.keys[k].key},
             {"best", result.best ? parse_json(summary.keys[k].values[*result.best]) : Json()},
             {"at_edge", result.at_low_edge    ? Json("low")
                         : result.at_high_edge ? Json("high")
                                               : Json()},
             {"values", std::move(values)}});
    }
    for (const Row& row : summary.rows) json["combinations"].push_back(row_json(summary, row));
    for (const SweptRun& run : summary.runs) {
        Json line = {{"name", run.name}, {"values", values_json(summary, run.combination)},
                     {"seed", run.seed}, {"state", word_of(run.state)},
                     {"step", run.step}, {"loss", number_or_null(run.loss)}};
        if (!run.reason.empty()) line["reason"] = run.reason;
        json["runs"].push_back(std::move(line));
    }
    return json;
}

}  // namespace train_gpt
