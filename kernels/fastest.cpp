#include "kernels/fastest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace train_gpt {

namespace {

constexpr double cannot_run = std::numeric_limits<double>::infinity();

// Seconds for the timed runs of each part, if candidates are not slower.
constexpr double for_screening = 0.2, for_finals = 0.2;
constexpr size_t always_tried = 4, finalists = 5;
constexpr int most_turns = 5;
// A single run of less than this is not timed exactly.
constexpr double exact_seconds = 2e-4;
constexpr double most_runs = 20;

/// The mean seconds of each candidate's two timed runs; cannot_run also for those left out.
std::vector<double> screen(size_t count, const TimeCandidate& time) {
    std::vector<double> seconds(count, cannot_run);
    double spent = 0;
    size_t tried = 0;
    for (; tried < count && (tried < always_tried || spent < for_screening / 2); ++tried) {
        if (time(tried, 1) == cannot_run) continue;
        seconds[tried] = time(tried, 1);
        spent += seconds[tried];
    }
    for (size_t i = tried; i-- > 0;)
        if (seconds[i] != cannot_run) seconds[i] = (seconds[i] + time(i, 1)) / 2;
    return seconds;
}

/// The upper of the middle two for an even number of values.
double upper_median(std::vector<double> values) {
    const auto middle = values.begin() + std::ssize(values) / 2;
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

}  // namespace

size_t fastest(size_t count, const TimeCandidate& time) {
    const std::vector<double> screened = screen(count, time);
    std::vector<size_t> best(count);
    std::iota(best.begin(), best.end(), size_t{0});
    std::erase_if(best, [&](size_t i) { return screened[i] == cannot_run; });
    std::ranges::stable_sort(best, {}, [&](size_t i) { return screened[i]; });
    best.resize(std::min(best.size(), finalists));
    if (best.size() < 2) return best.empty() ? count : best.front();

    double turn_seconds = 0;
    for (const size_t i : best) turn_seconds += std::max(screened[i], exact_seconds);
    const int turns =
        static_cast<int>(std::clamp(for_finals / turn_seconds, 1.0, 1.0 * most_turns));
    std::vector<std::vector<double>> seconds(best.size());
    for (int turn = 0; turn < turns; ++turn) {
        for (size_t k = 0; k < best.size(); ++k) {
            const size_t which = (k + static_cast<size_t>(turn)) % best.size();
            const double runs = std::ceil(exact_seconds / std::max(screened[best[which]], 1e-9));
            seconds[which].push_back(
                time(best[which], static_cast<int>(std::clamp(runs, 1.0, most_runs))));
        }
    }
    return best[static_cast<size_t>(std::ranges::min_element(seconds, {}, upper_median) -
                                    seconds.begin())];
}

}  // namespace train_gpt
