// Comparisons of two runs' records, written by hand: what differs first, by how much, and when.
#include "training/report/compare_runs.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

struct Step {
    int64_t step;
    double loss, norm;
};

void write_metrics(const std::string& run, const std::vector<Step>& steps) {
    std::filesystem::create_directories(run);
    std::string text;
    for (const auto& [step, loss, norm] : steps) {
        Json line{{"step", step}, {"loss", loss}, {"grad_norm", norm}};
        text += to_text(line) + "\n";
    }
    write(run + "/metrics.jsonl", text);
}

/// Lines with fingerprints of tensors a, b and c; `odd`: those of step, tensor and kind that are
/// other than usual.
struct Odd {
    int64_t step;
    const char *tensor, *kind;
};
void write_fingerprints(const std::string& run, const std::vector<int64_t>& steps,
                        const std::vector<Odd>& odd = {}) {
    std::string text;
    for (const int64_t step : steps) {
        Json tensors = Json::object();
        for (const char* tensor : {"a", "b", "c"})
            for (const char* kind : {"gradient", "master", "m", "v"})
                tensors[tensor][kind] = "0123456789abcdef";
        for (const auto& [at, tensor, kind] : odd)
            if (at == step) tensors[tensor][kind] = "0123456789abcdee";
        text += to_text(Json{{"step", step}, {"tensors", tensors}}) + "\n";
    }
    write(run + "/fingerprints.jsonl", text);
}

}  // namespace

TEST_CASE("two runs are compared at the steps that both have logged", "[compare_runs]") {
    const TemporaryDirectory directory;
    const std::string a = directory / "a", b = directory / "b";
    const double eps = std::ldexp(1.0, static_cast<int>(random_int(-50, -4)));
    write_metrics(a, {{1, 4, 1}, {2, 3, 1}, {4, 2, 1}, {6, 2, 1}, {7, 9, 9}});
    write_metrics(b, {{2, 3, 1}, {3, 9, 9}, {4, 2, 1 + eps}, {6, 2 + 4 * eps, 1}, {8, 9, 9}});
    const RunComparison found = compare_runs(a, b);
    CHECK(found.steps == 3);
    CHECK(found.only_a == 2);
    CHECK(found.first_step == 2);
    CHECK(found.last_step == 6);
    REQUIRE(found.columns.size() == 2);
    const RunComparison::Column &loss = found.columns[0], &norm = found.columns[1];
    REQUIRE(loss.first);
    REQUIRE(norm.first);
    CHECK(loss.first->step == 6);
    CHECK(norm.first->step == 4);
    CHECK(norm.largest->difference() == eps / (1 + eps));
    CHECK(found.first_difference() == &norm);
    CHECK(found.largest_difference() == 4 * eps / (2 + 4 * eps));
    CHECK(compare_runs(a, b, {.after = 0, .to = 3}).same());

    // The verdict's edge is the largest difference itself.
    const double largest = found.largest_difference();
    CHECK(report_on_comparison(a, b, largest).within);
    CHECK_FALSE(report_on_comparison(a, b, std::nextafter(largest, 0)).within);
    CHECK_FALSE(report_on_comparison(a, b, 0).within);
    CHECK(report_on_comparison(a, a, 0).within);
}

TEST_CASE("a loss that is not a number equals only another one", "[compare_runs]") {
    const TemporaryDirectory directory;
    const std::string a = directory / "a", b = directory / "b";
    const double nan = std::numeric_limits<double>::quiet_NaN();
    write_metrics(a, {{1, 4, 1}, {2, nan, 1}});
    write_metrics(b, {{1, 4, 1}, {2, 3, 1}});
    CHECK(report_on_comparison(a, a, 0).within);
    CHECK_FALSE(report_on_comparison(a, b, 1e9).within);
    CHECK_FALSE(report_on_comparison(b, a, 1e9).within);
}

TEST_CASE("runs without a common step are not called the same", "[compare_runs]") {
    const TemporaryDirectory directory;
    const std::string a = directory / "a", b = directory / "b";
    write_metrics(a, {{1, 4, 1}, {5, 3, 1}});
    write_metrics(b, {{2, 4, 1}, {6, 3, 1}});
    try {
        report_on_comparison(a, b, 0);
        FAIL("they were compared");
    } catch (const Error& error) {
        CHECK(contains(error.what(), "no logged step in common"));
        CHECK(contains(error.what(), a + " has logged steps from 1 to 5"));
    }
}

TEST_CASE("fingerprints name the first kind that a step computes, and count its tensors",
          "[compare_runs]") {
    const TemporaryDirectory directory;
    const std::string a = directory / "a", b = directory / "b";
    const std::vector<Step> steps{{10, 4, 1}, {20, 3, 1}, {30, 2, 1}};
    write_metrics(a, steps);
    write_metrics(b, steps);
    write_fingerprints(a, {10, 20, 30});
    const auto difference = [&](const std::vector<Odd>& odd) {
        write_fingerprints(b, {10, 20, 25, 30}, odd);
        const RunComparison found = compare_runs(a, b);
        CHECK(found.fingerprints == 3);
        CHECK(found.same() == !found.state);
        CHECK(report_on_comparison(a, b, 0).within == found.same());
        CHECK(report_on_comparison(a, b, 1e-9).within);
        return found.state ? concat(found.state->after, "-", found.state->step, " ",
                                    found.state->what.described())
                           : "";
    };
    CHECK(difference({}) == "");
    CHECK(difference({{25, "a", "m"}}) == "");  // not in both
    CHECK(difference({{20, "b", "master"}, {30, "a", "gradient"}}) == "10-20 master of b");
    CHECK(difference({{10, "b", "v"}, {10, "b", "master"}}) == "-1-10 v of b");
    CHECK(difference({{20, "c", "m"}, {20, "a", "v"}, {20, "a", "master"}}) == "10-20 m of c");
    CHECK(difference({{30, "b", "gradient"}, {30, "c", "gradient"}, {30, "a", "m"}}) ==
          "20-30 gradient of b and another tensor");
    CHECK(difference({{30, "b", "m"}, {30, "c", "m"}, {30, "a", "m"}}) ==
          "20-30 m of a and 2 other tensors");
}

TEST_CASE("the gap of two runs' losses is a mean over thirds of their common steps",
          "[compare_runs]") {
    const TemporaryDirectory directory;
    const std::string a = directory / "a", b = directory / "b";
    const int64_t n = random_int(6, 60);
    std::vector<Step> of_a, of_b;
    std::vector<double> gaps;
    for (int64_t step = 1; step <= 2 * n; ++step) {
        const double loss = 3 + random_normal(1)[0] / 8, gap = random_normal(1)[0] / 8;
        of_a.push_back({step, loss, 1});
        if (step % 2 == 0) continue;  // b has logged every other step
        of_b.push_back({step, loss + gap, 2});
        gaps.push_back(gap);
    }
    of_b.push_back({4 * n, 1, 1});
    write_metrics(a, of_a);
    write_metrics(b, of_b);
    // Each step belongs to the third that its place among the common steps says.
    double sums[3] = {}, halves[2] = {};
    int64_t counts[3] = {}, sixths[2] = {};
    for (int64_t i = 0; i < n; ++i) {
        int third = 0;
        while (i >= (third + 1) * n / 3) ++third;
        sums[third] += gaps[static_cast<size_t>(i)], ++counts[third];
        if (third < 2) continue;
        const int half = i >= n - n / 6 ? 1 : 0;
        halves[half] += gaps[static_cast<size_t>(i)], ++sixths[half];
    }
    LossGap found = loss_gap(a, b);
    INFO(n << " common steps");
    CHECK(found.steps == n);
    CHECK(found.first_step == 1);
    CHECK(found.last_step == 2 * n - 1);
    // Losses near 4 and their sums are rounded to 53 bits.
    const double bound = 64 * 8 * 0x1p-52;
    for (int third = 0; third < 3; ++third)
        CHECK(std::abs(found.thirds[third] - sums[third] / static_cast<double>(counts[third])) <=
              bound);
    for (int half = 0; half < 2; ++half)
        CHECK(std::abs(found.halves[half] - halves[half] / static_cast<double>(sixths[half])) <=
              bound);
    CHECK(!found.validation);

    // The last step that both have evaluated counts, and so does a gap below zero.
    for (const auto& [run, losses] : {std::pair{a, std::vector<double>{5, 4, 3}}, {b, {5, 2, 1}}}) {
        std::ofstream more(run + "/metrics.jsonl", std::ios::app);
        for (size_t i = 0; i < losses.size(); ++i)
            more << to_text(Json{{"step", static_cast<int64_t>(i + (run == a ? 1 : 0))},
                                 {"val_loss", losses[i]}})
                 << "\n";
    }
    found = loss_gap(a, b);
    REQUIRE(found.validation);
    CHECK(found.validation->step == 2);
    CHECK(found.validation->b - found.validation->a == 1 - 4);
    CHECK(found.at_the_end() == 3);
    CHECK(report_on_gap(a, b, 3).within == !found.grows());
    CHECK(!report_on_gap(a, b, std::nextafter(3.0, 0)).within);
}

TEST_CASE("a gap grows if its last sixth exceeds the one before by twice the standard error",
          "[compare_runs]") {
    const TemporaryDirectory directory;
    const std::string a = directory / "a", b = directory / "b";
    const auto n = static_cast<size_t>(random_int(48, 400));
    const size_t middle = n - n / 6;
    const double side = random_int(0, 1) == 0 ? 1 : -1;  // b above or below a
    // Gaps far from zero, whose neighbours are alike.
    std::vector<double> losses, gaps;
    for (double drift = 0; gaps.size() < n;) {
        drift = 0.8 * drift + random_normal(1)[0] / 64;
        losses.push_back(3 + random_normal(1)[0] / 8);
        gaps.push_back(side * (1 + drift));
    }
    // A variance is half the mean square of the differences of two values.
    const auto mean = [&](size_t first, size_t end) {
        return std::accumulate(gaps.begin() + static_cast<std::ptrdiff_t>(first),
                               gaps.begin() + static_cast<std::ptrdiff_t>(end), 0.0) /
               static_cast<double>(end - first);
    };
    double variance = 0;
    for (const auto& [first, end] : {std::pair{2 * n / 3, middle}, {middle, n}})
        for (size_t i = 0; i < 8; ++i)
            for (size_t j = 0; j < 8; ++j) {
                const size_t size = end - first;
                const double difference = mean(first + i * size / 8, first + (i + 1) * size / 8) -
                                          mean(first + j * size / 8, first + (j + 1) * size / 8);
                variance += difference * difference / (2 * 8 * 7);
            }
    const double noise = std::sqrt(variance / 8);
    const double growth = std::abs(mean(middle, n)) - std::abs(mean(2 * n / 3, middle));
    INFO(n << " steps, a standard error of " << noise);
    for (const double times : {1.99, 2.01}) {  // a shift of a whole half leaves the noise as it is
        std::vector<Step> of_a, of_b;
        for (size_t i = 0; i < n; ++i) {
            const auto step = static_cast<int64_t>(i + 1);
            const double shift = i < middle ? 0 : side * (times * noise - growth);
            of_a.push_back({step, losses[i], 1});
            of_b.push_back({step, losses[i] + gaps[i] + shift, 1});
        }
        write_metrics(a, of_a);
        write_metrics(b, of_b);
        const LossGap found = loss_gap(a, b);
        REQUIRE(found.noise);
        CHECK(std::abs(*found.noise - noise) <= 1e-9 * noise);
        CHECK(found.grows() == (times > 2));
        const ComparisonReport report = report_on_gap(a, b, 10);
        CHECK(report.within == (times < 2));
        CHECK(contains(report.text, times > 2 ? "different: the gap grows in the last third"
                                              : "within 10, and the gap does not grow"));
    }
}

TEST_CASE("a gap needs six losses in common", "[compare_runs]") {
    const TemporaryDirectory directory;
    const std::string a = directory / "a", b = directory / "b";
    write_metrics(a, {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {5, 1, 1}, {6, NAN, 1}});
    write_metrics(b, {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {5, 1, 1}, {6, 1, 1}});
    CHECK(contains(error_of([&] { (void)loss_gap(a, b); }),
                   "these runs have 5 steps with a loss in common"));
    write_metrics(a, {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {5, 1, 1}, {6, 1, 1}});
    const ComparisonReport report = report_on_gap(a, b, 0);
    CHECK(report.within);
    CHECK(contains(report.text, "too few steps to say whether the gap grows"));
}
