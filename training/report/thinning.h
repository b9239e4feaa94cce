// Curves with more points than a screen has pixels, thinned without losing any extreme.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

namespace train_gpt {

/// Points of a curve, in the order of x.
struct Curve {
    std::vector<double> x, y;

    size_t size() const { return x.size(); }
    void add(double at, double value) {
        x.push_back(at);
        y.push_back(value);
    }
};

/// Divides the range of x into `pixels` equal intervals. Keeps the point with the smallest y and
/// the point with the largest y in each interval; of equal points, the first. Also keeps the first
/// and the last point of the curve. A curve of at most 2·pixels points is kept whole. Points whose
/// y is not finite are removed first.
Curve thinned(std::span<const double> x, std::span<const double> y, int pixels);

/// The running mean of a curve. At point i of n it is the mean of the points from i − k to i + k,
/// with k = min(n/25, i/4): a loss falls steeply at first. Near the end of the curve, points that
/// do not exist are left out. Points whose y is not finite are removed first.
Curve running_mean(std::span<const double> x, std::span<const double> y);

}  // namespace train_gpt
