#include "training/report/compare_runs.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/formatted.h"
#include "training/report/recorded_run.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr std::pair<const char*, const char*> compared[] = {{"loss", "loss"},
                                                            {"grad_norm", "gradient norm"}};

void compare_numbers(const MetricsTable& a, const MetricsTable& b, const StepRange& steps,
                     RunComparison& result) {
    std::vector<std::pair<std::vector<double>, std::vector<double>>> values;
    for (const auto& [field, name] : compared) {
        values.emplace_back(a.column(field), b.column(field));
        result.columns.push_back({.name = name, .first = {}, .largest = {}});
    }
    for (size_t i = 0, j = 0; i < a.rows(); ++i) {
        const auto step = static_cast<int64_t>(a.step[i]);
        if (!steps.contains(step)) continue;
        while (j < b.rows() && b.step[j] < a.step[i]) ++j;
        if (j == b.rows() || b.step[j] != a.step[i]) {
            ++result.only_a;
        } else {
            if (result.steps++ == 0) result.first_step = step;
            result.last_step = step;
            for (size_t c = 0; c < values.size(); ++c) {
                RunComparison::Column& column = result.columns[c];
                const RunComparison::Pair pair{step, values[c].first[i], values[c].second[j]};
                if (pair.difference() == 0) continue;
                if (!column.first) column.first = pair;
                if (!column.largest || pair.difference() > column.largest->difference())
                    column.largest = pair;
            }
        }
    }
}

void compare_fingerprints(const RecordedFingerprints& a, const RecordedFingerprints& b,
                          const StepRange& steps, RunComparison& result) {
    int64_t equal = -1;
    for (const auto& [step, line] : a.lines()) {
        const auto other = b.lines().find(step);
        if (!steps.contains(step)) continue;
        if (other == b.lines().end()) {
            ++result.only_a;
            continue;
        }
        ++result.fingerprints;
        result.last_fingerprint = step;
        if (result.state) continue;
        if (auto what = first_difference(line, other->second))
            result.state = {.after = equal, .step = step, .what = *what};
        else
            equal = step;
    }
}

std::string number(double value) { return formatted("%.9g", value); }

std::string describe(const RunComparison::Column& column) {
    if (!column.first) return "the same";
    const RunComparison::Pair &first = *column.first, &largest = *column.largest;
    return concat("first different at step ", first.step, " (", number(first.a), " and ",
                  number(first.b), "); largest relative difference ",
                  formatted("%.3g", largest.difference()), " at step ", largest.step);
}

std::string describe_state(const RunComparison& comparison) {
    if (!comparison.state) return "the same";
    const RunComparison::State& state = *comparison.state;
    return concat("first different at step ", state.step,
                  state.after < 0 ? "" : concat(", equal at step ", state.after), ": ",
                  state.what.described());
}

/// Why two runs have no step in common.
std::string no_common_steps(const RecordedRun& a, const RecordedRun& b) {
    const auto range = [](const RecordedRun& run) {
        const std::vector<double>& steps = run.training().step;
        return steps.empty() ? concat(run.folder().string(), " has logged no training step")
                             : concat(run.folder().string(), " has logged steps from ",
                                      static_cast<int64_t>(steps.front()), " to ",
                                      static_cast<int64_t>(steps.back()));
    };
    return concat("these runs have no logged step in common: ", range(a), ", and ", range(b),
                  "; compare runs with the same log.every");
}

}  // namespace

double RunComparison::Pair::difference() const {
    if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
    if (!std::isfinite(a) || !std::isfinite(b)) return std::numeric_limits<double>::infinity();
    return std::abs(a - b) / std::max(std::abs(a), std::abs(b));
}

const RunComparison::Column* RunComparison::first_difference() const {
    const Column* first = nullptr;
    for (const Column& column : columns)
        if (column.first && (!first || column.first->step < first->first->step)) first = &column;
    return first;
}

double RunComparison::largest_difference() const {
    double largest = 0;
    for (const Column& column : columns)
        if (column.largest) largest = std::max(largest, column.largest->difference());
    return largest;
}

RunComparison compare_runs(const fs::path& a, const fs::path& b, const StepRange& steps) {
    RunComparison result;
    compare_numbers(RecordedRun(a).training(), RecordedRun(b).training(), steps, result);
    compare_fingerprints(RecordedFingerprints(a), RecordedFingerprints(b), steps, result);
    return result;
}

ComparisonReport report_on_comparison(const fs::path& a, const fs::path& b, double tolerance) {
    const RunComparison found = compare_runs(a, b);
    if (found.steps == 0) throw Error(no_common_steps(RecordedRun(a), RecordedRun(b)));
    std::string text = concat("common steps    ", found.steps, ", from ", found.first_step, " to ",
                              found.last_step, "\n");
    for (const RunComparison::Column& column : found.columns)
        text += formatted("%-16s", column.name.c_str()) + describe(column) + "\n";
    if (found.fingerprints > 0)
        text += concat("fingerprints    of ", found.fingerprints,
                       found.fingerprints == 1 ? " common step: " : " common steps: ",
                       describe_state(found), "\n");
    const double largest = found.largest_difference();
    const std::string by = formatted("%.3g", largest), limit = formatted("%g", tolerance);
    const bool within = largest <= tolerance && (tolerance > 0 || !found.state);
    if (found.same())
        text += "verdict         the same in all common steps";
    else if (within)
        text += concat("verdict         within the tolerance ", limit);
    else if (largest > tolerance)
        text += concat("verdict         different: by ", by, ", and the tolerance is ", limit);
    else
        text +=
            "verdict         different: losses and norms are the same, but fingerprints are not";
    return {std::move(text), within};
}

}  // namespace train_gpt
