// Sets of characters.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace train_gpt {

/// A set of Unicode code points.
class CodePoints {
  public:
    static constexpr char32_t limit = 0x110000;  // beyond the last code point

    CodePoints() = default;
    /// The code points from `first` to `last`, both included.
    CodePoints(char32_t first, char32_t last) : edges_{first, last + 1} {}
    /// Runs that lie outside and inside in turn, by their lengths.
    static CodePoints of_runs(std::span<const uint32_t> lengths);

    bool contains(char32_t code) const;
    bool empty() const { return edges_.empty(); }
    /// Where membership changes: the first code point inside, the first outside again, and so on.
    const std::vector<char32_t>& edges() const { return edges_; }

    void add(const CodePoints& other);
    CodePoints intersection(const CodePoints& other) const;
    CodePoints complement() const;

    bool operator==(const CodePoints&) const = default;
    auto operator<=>(const CodePoints&) const = default;

  private:
    /// The code points that are in at least `least` of two sets.
    static CodePoints in_at_least(int least, const CodePoints& a, const CodePoints& b);

    std::vector<char32_t> edges_;
};

}  // namespace train_gpt
