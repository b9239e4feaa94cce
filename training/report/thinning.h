// Curves with more points than a screen has pixels, thinned without losing any extreme.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

namespace train_gpt {

/// Points of a curve; x does not fall.
struct Curve {
    std::vector<double> x, y;

    size_t size() const { return x.size(); }
    void add(double at, double value) {
        x.push_back(at);
        y.push_back(value);
    }
};

/// Divides the range of x into `pixels` equal intervals and keeps the points of the smallest and of
/// the largest y in each (of equal ones the first), and the first and the last point, in their
/// order. A curve of at most 2·pixels points is kept whole. Points whose y is not finite are left
/// out before.
Curve thinned(std::span<const double> x, std::span<const double> y, int pixels);

/// The running mean: at each point the mean of the n/25 points before and after it, of n. Point i
/// takes i/4 of them at most, since a loss falls steeply at first; near the last one, those that
/// there are. Points whose y is not finite are left out before.
Curve running_mean(std::span<const double> x, std::span<const double> y);

/// Without the points between two others of the same y: what is drawn stays the same.
Curve without_repetitions(const Curve& curve);

}  // namespace train_gpt
