#include "parallel/state/bucket_layout.h"

#include <algorithm>
#include <cassert>

#include "base/error.h"
#include "kernels/adamw.h"

namespace train_gpt {

namespace {

// Tensors start on multiples of this many elements: 64-byte alignment for bf16 and fp32 alike.
constexpr int64_t tensor_alignment = 64;
// Each bucket is a separate exchange; a run with more of them would do little but start exchanges.
constexpr int64_t most_buckets = 1 << 20;

}  // namespace

BucketLayout::BucketLayout(const std::vector<Parameter>& parameters, int ranks,
                           int64_t bucket_elements)
    : ranks_(ranks), offsets_(parameters.size()) {
    const auto by_unit = [](const Parameter& a, const Parameter& b) { return a.unit < b.unit; };
    assert(std::is_sorted(parameters.begin(), parameters.end(), by_unit));
    const int units = parameters.back().unit + 1;
    std::vector<int64_t> unit_numel(static_cast<size_t>(units));
    std::vector<int> sweeps(unit_numel.size());  // of units
    for (const Parameter& p : parameters) {
        unit_numel[static_cast<size_t>(p.unit)] += p.padded_numel();
        sweeps[static_cast<size_t>(p.unit)] = p.sweep;
    }

    // The first unit of each bucket, from the last bucket down.
    std::vector<int> first_units;
    int64_t gathered = 0;
    for (auto unit = unit_numel.size() - 1; unit > 0; --unit) {
        gathered += unit_numel[unit];
        const bool is_first = unit == 1 || sweeps[unit - 1] != sweeps[unit];
        if (gathered < bucket_elements && !is_first) continue;
        first_units.push_back(static_cast<int>(unit));
        gathered = 0;
    }
    const int64_t whole = ranks_ * norm_block;
    const int64_t pieces = unit_numel[0] / rounded_up(std::max<int64_t>(bucket_elements, 1), whole);
    if (pieces > most_buckets)
        throw Error("buckets of ", bucket_elements, " gradients cut the embedding's ",
                    unit_numel[0], " into ", pieces, ", and ", most_buckets,
                    " are the most; raise parallel.bucket_mb");
    add_buckets(parameters, 0, 0, std::max<int64_t>(bucket_elements, 1));
    for (size_t i = first_units.size(); i-- > 0;)
        add_buckets(parameters, first_units[i], i > 0 ? first_units[i - 1] - 1 : units - 1,
                    INT64_MAX);
}

/// Appends the tensors of the units, in one bucket, or in several of about `largest` elements.
void BucketLayout::add_buckets(const std::vector<Parameter>& parameters, int first_unit,
                               int last_unit, int64_t largest) {
    const auto first_of = [&](int unit) {
        return static_cast<size_t>(
            std::partition_point(parameters.begin(), parameters.end(),
                                 [&](const Parameter& p) { return p.unit < unit; }) -
            parameters.begin());
    };
    const size_t first = first_of(first_unit), after = first_of(last_unit + 1);
    int64_t end = 0;  // relative to numel_
    Range added;
    // Among tensor-parallel ranks, the tensors whose gradients they add up are together.
    struct Group {
        bool small, adds;
    };
    constexpr Group groups[] = {{false, false}, {false, true}, {true, true}, {true, false}};
    const auto adds = [&](const Parameter& p) { return p.held_by.ranks > 1 && p.adds_over_tensor; };
    for (const Group& group : groups) {
        for (size_t i = first; i < after; ++i) {
            const int64_t n = parameters[i].padded_numel();
            const bool small = n < norm_block;
            if (small != group.small || adds(parameters[i]) != group.adds) continue;
            end = rounded_up(end, tensor_alignment);
            if (!small || end % norm_block + n > norm_block) end = rounded_up(end, norm_block);
            offsets_[i] = numel_ + end;
            end += n;
            if (!group.adds) continue;
            if (added.n == 0) added.first = offsets_[i];
            added.n = numel_ + end - added.first;
        }
    }
    const int64_t whole = ranks_ * norm_block;  // a bucket is a multiple of this
    const int64_t size = largest > end ? rounded_up(end, whole) : rounded_up(largest, whole);
    for (int64_t done = 0; done < end; done += size) {
        const int64_t n = std::min(size, rounded_up(end - done, whole));
        buckets_.push_back({.range = {numel_, n},
                            .shard = n / ranks_,
                            .first_unit = first_unit,
                            .last_unit = last_unit,
                            .added_over_tensor = intersection(added, {numel_, n})});
        numel_ += n;
    }
}

}  // namespace train_gpt
