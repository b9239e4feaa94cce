// A range of elements, rows or columns.
#pragma once
#include <algorithm>
#include <cstdint>

namespace train_gpt {

/// Elements [first, first + n).
struct Range {
    int64_t first = 0, n = 0;

    int64_t end() const { return first + n; }
    bool operator==(const Range&) const = default;
};

inline Range intersection(const Range& a, const Range& b) {
    const int64_t first = std::max(a.first, b.first);
    return {first, std::max<int64_t>(0, std::min(a.end(), b.end()) - first)};
}

/// The first multiple from n on.
constexpr int64_t rounded_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace train_gpt
