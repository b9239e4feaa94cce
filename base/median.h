// The median of numbers.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

namespace train_gpt {

/// The mean of the middle two for an even number of values; NaN for none.
inline double median(std::vector<double> values) {
    if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
    std::ranges::sort(values);
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

}  // namespace train_gpt
