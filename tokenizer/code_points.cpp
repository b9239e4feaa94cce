#include "tokenizer/code_points.h"

#include <algorithm>
#include <array>

namespace train_gpt {

CodePoints CodePoints::of_runs(std::span<const uint32_t> lengths) {
    CodePoints set;
    if (std::ranges::equal(lengths, std::array{0u}))
        return set;  // as the tables write no code points
    char32_t at = 0;
    for (const uint32_t length : lengths) set.edges_.push_back(at += length);
    return set;
}

bool CodePoints::contains(char32_t code) const {
    const auto after = std::upper_bound(edges_.begin(), edges_.end(), code);
    return (after - edges_.begin()) % 2 == 1;
}

CodePoints CodePoints::in_at_least(int least, const CodePoints& a, const CodePoints& b) {
    CodePoints result;
    size_t in_a = 0, in_b = 0;  // edges passed
    while (in_a < a.edges_.size() || in_b < b.edges_.size()) {
        const char32_t next_a = in_a < a.edges_.size() ? a.edges_[in_a] : limit + 1;
        const char32_t next_b = in_b < b.edges_.size() ? b.edges_[in_b] : limit + 1;
        const char32_t at = std::min(next_a, next_b);
        if (next_a == at) ++in_a;
        if (next_b == at) ++in_b;
        const bool inside = static_cast<int>(in_a % 2 + in_b % 2) >= least;
        if (inside != (result.edges_.size() % 2 == 1)) result.edges_.push_back(at);
    }
    return result;
}

void CodePoints::add(const CodePoints& other) { *this = in_at_least(1, *this, other); }

CodePoints CodePoints::intersection(const CodePoints& other) const {
    return in_at_least(2, *this, other);
}

CodePoints CodePoints::complement() const {
    CodePoints result = *this;
    std::vector<char32_t>& edges = result.edges_;
    if (!edges.empty() && edges.front() == 0)
        edges.erase(edges.begin());
    else
        edges.insert(edges.begin(), 0);
    if (edges.back() == limit)
        edges.pop_back();
    else
        edges.push_back(limit);
    return result;
}

}  // namespace train_gpt
