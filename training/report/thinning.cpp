#include "training/report/thinning.h"

#include <algorithm>
#include <cmath>

namespace train_gpt {

namespace {

/// The points that are finite, and whose sums and margins are finite, too.
Curve finite(std::span<const double> x, std::span<const double> y) {
    constexpr double most = 1e290;
    Curve curve;
    for (size_t i = 0; i < x.size(); ++i)
        if (std::abs(y[i]) < most) curve.add(x[i], y[i]);
    return curve;
}

}  // namespace

Curve thinned(std::span<const double> all_x, std::span<const double> all_y, int pixels) {
    Curve curve = finite(all_x, all_y);
    const size_t n = curve.size();
    if (n <= 2 * static_cast<size_t>(pixels)) return curve;
    const std::vector<double>&x = curve.x, &y = curve.y;
    const double scale = pixels / std::max(x.back() - x.front(), 1e-300);
    const auto pixel_of = [&](size_t i) {
        return std::min(pixels - 1, static_cast<int>((x[i] - x.front()) * scale));
    };
    Curve kept;
    kept.add(x[0], y[0]);
    for (size_t begin = 0, end; begin < n; begin = end) {
        size_t low = begin, high = begin;
        for (end = begin; end < n && pixel_of(end) == pixel_of(begin); ++end) {
            if (y[end] < y[low]) low = end;
            if (y[end] > y[high]) high = end;
        }
        const size_t first = std::min(low, high), second = std::max(low, high);
        if (first > 0) kept.add(x[first], y[first]);
        if (second != first) kept.add(x[second], y[second]);
        if (end == n && second != n - 1) kept.add(x[n - 1], y[n - 1]);
    }
    return kept;
}

Curve running_mean(std::span<const double> all_x, std::span<const double> all_y) {
    Curve curve = finite(all_x, all_y);
    const size_t n = curve.size(), most = n / 25;
    std::vector<double> sum(n + 1);
    for (size_t i = 0; i < n; ++i) sum[i + 1] = sum[i] + curve.y[i];
    for (size_t i = 0; i < n; ++i) {
        const size_t reach = std::min(most, i / 4), first = i - reach,
                     end = std::min(i + reach + 1, n);
        curve.y[i] = (sum[end] - sum[first]) / static_cast<double>(end - first);
    }
    return curve;
}

}  // namespace train_gpt
