// Predictions beside published speeds (docs/planning.md). PLANNER_TABLE=FILE writes the table of
// the docs, and PLANNER_VALUES=FILE the fitted values for the table of efficiencies.
#include "test/training/plan_truth.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>

#include "base/formatted.h"
#include "test/catch.h"

using namespace train_gpt;

namespace {

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

double share_within(const std::vector<double>& errors, double most) {
    const auto n = std::count_if(errors.begin(), errors.end(),
                                 [&](double error) { return std::abs(error) <= most; });
    return static_cast<double>(n) / static_cast<double>(errors.size());
}

std::vector<double> sizes_of(std::vector<double> errors) {
    for (double& error : errors) error = std::abs(error);
    return errors;
}

/// FLOPs per second of a GPU at the published speed.
double published_flops(const TruthRow& row) {
    return row.tokens_per_second *
           row.shape.spec.flops_per_token(row.shape.config.sequence_length());
}

bool is_own(const TruthRow& row) { return row["system"] == "train_gpt"; }

/// What a lookup by GPU, precision and recomputation says about a row, from fitted rows of other
/// models: their median. Where there are none, those of the GPU and precision, or the precision.
double looked_up(const std::vector<TruthRow>& rows, const TruthRow& row) {
    for (const std::vector<const char*>& keys :
         {std::vector<const char*>{"gpu", "precision", "recompute"},
          {"gpu", "precision"},
          {"gpu"},
          {"precision"}}) {
        std::vector<double> found;
        for (const TruthRow& other : rows)
            if (other.is_fitted() && !is_own(other) && other["model"] != row["model"] &&
                std::ranges::all_of(keys, [&](const char* key) { return other[key] == row[key]; }))
                found.push_back(published_flops(other));
        if (!found.empty()) return median(found) / published_flops(row) - 1;
    }
    return 1;
}

void write_table(const char* path, const std::vector<TruthRow>& rows,
                 const std::vector<double>& errors) {
    std::ofstream out(path);
    out << "| system | model | GPUs | mesh (tensor, pipeline × stages, context), ZeRO | sequence, "
           "micro-batch, batch | precision, recompute | published | predicted | |\n"
           "|---|---|---|---|---|---|---|---|---|\n";
    for (size_t i = 0; i < rows.size(); ++i) {
        const TruthRow& r = rows[i];
        out << "| " << r["system"] << " | " << r["model"] << " | " << r["gpus"] << " × " << r["gpu"]
            << " | " << r["tp"] << ", " << r["pp"] << (r["vp"].empty() ? "" : " × " + r["vp"])
            << ", " << r["cp"] << ", " << r["zero"] << " | " << r["seq"] << ", " << r["micro_batch"]
            << ", " << r["global_batch"] << " | " << r["precision"]
            << (r["recompute"].empty() ? "" : ", " + r["recompute"]) << " | "
            << formatted("%.0f | %.0f | %+.1f %% |\n", r.tokens_per_second,
                         r.tokens_per_second * (1 + errors[i]), 100 * errors[i]);
    }
}

}  // namespace

TEST_CASE("predictions for models that the fit has not seen are near published speeds",
          "[plan][truth][.][long]") {
    const std::vector<TruthRow> rows = truth_rows("test/fixtures/planner_truth.csv");
    REQUIRE(rows.size() > 300);
    const TruthFit fit(rows);

    // The table in the program has these values.
    const std::vector<double> shipped = efficiency_values();
    std::string values;
    for (size_t i = 0; i < shipped.size(); ++i) {
        CAPTURE(efficiency_table()[i].name);
        CHECK(shipped[i] == Approx(fit.values()[i]).epsilon(0.02));
        values += concat(efficiency_table()[i].name, formatted(" %.4g\n", fit.values()[i]));
    }
    if (const char* path = std::getenv("PLANNER_VALUES")) std::ofstream(path) << values;

    std::vector<double> errors(rows.size()), of_public, of_lookup;
    std::set<std::string> models;
    for (const TruthRow& row : rows) models.insert(row["model"]);
    for (const std::string& model : models) {
        const std::vector<double> without = fit.without(model);
        for (size_t i = 0; i < rows.size(); ++i)
            if (rows[i]["model"] == model)
                errors[i] = predicted(rows[i], without) / rows[i].tokens_per_second - 1;
    }
    for (size_t i = 0; i < rows.size(); ++i) {
        if (is_own(rows[i])) continue;
        of_public.push_back(errors[i]);
        of_lookup.push_back(looked_up(rows, rows[i]));
    }
    if (const char* path = std::getenv("PLANNER_TABLE")) write_table(path, rows, errors);
    const double middle = median(sizes_of(of_public)), within = share_within(of_public, 0.2);
    const double middle_of_lookup = median(sizes_of(of_lookup)),
                 within_of_lookup = share_within(of_lookup, 0.2);
    std::printf(
        "%zu rows of %zu models: median error %.1f %%, within 20 %%: %.1f %%; a lookup: %.1f %%, "
        "%.1f %%; nine of ten within %.1f %%\n",
        of_public.size(), models.size(), 100 * middle, 100 * within, 100 * middle_of_lookup,
        100 * within_of_lookup, 100 * [&] {
            std::vector<double> sorted = sizes_of(of_public);
            std::sort(sorted.begin(), sorted.end());
            return sorted[sorted.size() * 9 / 10];
        }());
    CHECK(middle <= 0.08);
    CHECK(within >= 0.9);
    CHECK(middle < middle_of_lookup);
    CHECK(within > within_of_lookup);
}

TEST_CASE("of two ways to divide a step that differ by 5 percent, the faster one is named",
          "[plan][truth][.][long]") {
    const std::vector<TruthRow> rows = truth_rows("test/fixtures/planner_truth.csv");
    int pairs = 0, right = 0;
    for (size_t i = 0; i < rows.size(); ++i)
        for (size_t j = 0; j < i; ++j) {
            const TruthRow &a = rows[i], &b = rows[j];
            const auto same = [&](const char* key) { return a[key] == b[key]; };
            const bool comparable = std::ranges::all_of(
                std::vector<const char*>{"system", "model", "layers", "seq", "gpus", "gpu",
                                         "global_batch", "precision", "recompute"},
                same);
            const bool same_mesh = std::ranges::all_of(
                std::vector<const char*>{"tp", "pp", "cp", "dp_or_fsdp", "zero"}, same);
            const double published = a.tokens_per_second / b.tokens_per_second;
            if (!comparable || same_mesh || std::abs(published - 1) <= 0.05) continue;
            const double both =
                predicted(a, efficiency_values()) / predicted(b, efficiency_values());
            ++pairs;
            right += (both > 1) == (published > 1);
        }
    std::printf("%d of %d pairs\n", right, pairs);
    CHECK(pairs >= 8);
    CHECK(right >= 0.87 * pairs);
}
