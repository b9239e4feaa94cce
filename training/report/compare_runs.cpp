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

std::string digits_of(double value) { return formatted("%.9g", value); }

std::string describe(const RunComparison::Column& column) {
    if (!column.first) return "the same";
    const RunComparison::Pair &first = *column.first, &largest = *column.largest;
    return concat("first different at step ", first.step, " (", digits_of(first.a), " and ",
                  digits_of(first.b), "); largest relative difference ",
                  formatted("%.3g", largest.difference()), " at step ", largest.step);
}

std::string describe_state(const RunComparison& comparison) {
    if (!comparison.state) return "the same";
    const RunComparison::State& state = *comparison.state;
    return concat("first different at step ", state.step,
                  state.after < 0 ? "" : concat(", equal at step ", state.after), ": ",
                  state.what.described());
}

/// The pairs of a column's finite numbers at the steps that both tables have.
std::vector<RunComparison::Pair> finite_pairs(const MetricsTable& a, const MetricsTable& b,
                                              const char* field) {
    const std::vector<double> of_a = a.column(field), of_b = b.column(field);
    std::vector<RunComparison::Pair> pairs;
    for (size_t i = 0, j = 0; i < a.rows(); ++i) {
        while (j < b.rows() && b.step[j] < a.step[i]) ++j;
        if (j < b.rows() && b.step[j] == a.step[i] && std::isfinite(of_a[i]) &&
            std::isfinite(of_b[j]))
            pairs.push_back({static_cast<int64_t>(a.step[i]), of_a[i], of_b[j]});
    }
    return pairs;
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

double LossGap::at_the_end() const {
    const double of_validation = validation ? validation->b - validation->a : 0;
    return std::max({std::abs(thirds[2]), std::abs(halves[1]), std::abs(of_validation)});
}

bool LossGap::grows() const {
    return noise && std::abs(halves[1]) - std::abs(halves[0]) > 2 * *noise;
}

LossGap loss_gap(const fs::path& a, const fs::path& b) {
    const RecordedRun run_a(a), run_b(b);
    const auto pairs = finite_pairs(run_a.training(), run_b.training(), "loss");
    const size_t n = pairs.size();
    if (n == 0) throw Error(no_common_steps(run_a, run_b));
    if (n < 6)
        throw Error("a gap is a mean over many steps, and these runs have ", n,
                    n == 1 ? " step" : " steps",
                    " with a loss in common; train longer, or with a smaller log.every");
    const auto mean = [&](size_t first, size_t end) {
        double sum = 0;
        for (size_t i = first; i < end; ++i) sum += pairs[i].b - pairs[i].a;
        return sum / static_cast<double>(end - first);
    };
    LossGap gap{.first_step = pairs.front().step,
                .last_step = pairs.back().step,
                .steps = static_cast<int64_t>(n),
                .noise = {},
                .validation = {}};
    for (size_t third = 0; third < 3; ++third)
        gap.thirds[third] = mean(third * n / 3, (third + 1) * n / 3);
    constexpr size_t stretches = 8;  // of steps, in each half
    double variance = 0;             // of a stretch's mean, in both halves together
    const size_t borders[] = {2 * n / 3, n - n / 6, n};
    for (size_t half = 0; half < 2; ++half) {
        const size_t first = borders[half], size = borders[half + 1] - first;
        gap.halves[half] = mean(first, first + size);
        if (size < stretches) continue;
        double means[stretches], sum = 0, squares = 0;
        for (size_t i = 0; i < stretches; ++i) {
            means[i] = mean(first + i * size / stretches, first + (i + 1) * size / stretches);
            sum += means[i];
        }
        for (const double of_stretch : means) squares += std::pow(of_stretch - sum / stretches, 2);
        variance += squares / (stretches - 1);
    }
    if (n >= 6 * stretches) gap.noise = std::sqrt(variance / stretches);
    const auto evaluated = finite_pairs(run_a.evaluations(), run_b.evaluations(), "val_loss");
    if (!evaluated.empty()) gap.validation = evaluated.back();
    return gap;
}

ComparisonReport report_on_gap(const fs::path& a, const fs::path& b, double most) {
    const LossGap gap = loss_gap(a, b);
    std::string text = concat("common steps    ", gap.steps, ", from ", gap.first_step, " to ",
                              gap.last_step, "\n");
    text += formatted("mean gap        %+.4f, %+.4f, %+.4f nats in the thirds of these steps\n",
                      gap.thirds[0], gap.thirds[1], gap.thirds[2]);
    text +=
        formatted("last third      %+.4f and %+.4f in its halves: ", gap.halves[0], gap.halves[1]);
    text += gap.noise ? formatted("%+.4f, with a standard error of %.4f\n",
                                  gap.halves[1] - gap.halves[0], *gap.noise)
                      : "too few steps to say whether the gap grows\n";
    if (gap.validation)
        text += formatted("validation      %.4f and %.4f at step %lld: a gap of %+.4f\n",
                          gap.validation->a, gap.validation->b,
                          static_cast<long long>(gap.validation->step),
                          gap.validation->b - gap.validation->a);
    const bool is_small = gap.at_the_end() <= most;
    if (!is_small)
        text +=
            concat("verdict         different: by ", formatted("%.4f", gap.at_the_end()),
                   " in the last third or at the end, and the gap may be ", formatted("%g", most));
    else if (gap.grows())
        text += "verdict         different: the gap grows in the last third";
    else
        text += concat("verdict         the last third and the end are within ",
                       formatted("%g", most), gap.noise ? ", and the gap does not grow" : "");
    return {std::move(text), is_small && !gap.grows()};
}

}  // namespace train_gpt
