#include "parallel/bucket_layout.h"

#include "kernels/adamw.h"

namespace train_gpt {

namespace {

// Tensors start on multiples of this many elements: 64-byte alignment for bf16 and fp32 alike.
constexpr int64_t alignment = 64;

int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

BucketLayout::BucketLayout(const std::vector<Parameter>& parameters, int ranks,
                           int64_t bucket_elements)
    : ranks_(ranks), offsets_(parameters.size()) {
    const int units = parameters.back().unit + 1;
    std::vector<int64_t> unit_numel(static_cast<size_t>(units));
    for (const Parameter& p : parameters)
        unit_numel[static_cast<size_t>(p.unit)] += p.padded_numel();

    // The first unit of each bucket, from the last one down.
    std::vector<int> first_units;
    int64_t gathered = 0;
    for (int unit = units - 1; unit > 0; --unit) {
        gathered += unit_numel[static_cast<size_t>(unit)];
        if (gathered < bucket_elements && unit > 1) continue;
        first_units.push_back(unit);
        gathered = 0;
    }
    add_buckets(parameters, 0, 0, std::max<int64_t>(bucket_elements, 1));
    for (size_t i = first_units.size(); i-- > 0;)
        add_buckets(parameters, first_units[i], i > 0 ? first_units[i - 1] - 1 : units - 1,
                    INT64_MAX);
}

/// Lays the tensors of the units behind what there is, in one bucket, or in several of about `largest` elements.
void BucketLayout::add_buckets(const std::vector<Parameter>& parameters, int first_unit,
                               int last_unit, int64_t largest) {
    int64_t end = 0;  // from numel_ on
    for (const bool small : {false, true}) {
        for (size_t i = 0; i < parameters.size(); ++i) {
            const Parameter& p = parameters[i];
            const int64_t n = p.padded_numel();
            if (p.unit < first_unit || p.unit > last_unit || (n < norm_block) != small) continue;
            end = rounded_up(end, alignment);
            if (!small || end % norm_block + n > norm_block) end = rounded_up(end, norm_block);
            offsets_[i] = numel_ + end;
            end += n;
        }
    }
    const int64_t whole = ranks_ * norm_block;  // of this a bucket is a multiple
    const int64_t size = largest > end ? rounded_up(end, whole) : rounded_up(largest, whole);
    for (int64_t done = 0; done < end; done += size) {
        const int64_t n = std::min(size, rounded_up(end - done, whole));
        buckets_.push_back({.range = {numel_, n},
                            .shard = n / ranks_,
                            .first_unit = first_unit,
                            .last_unit = last_unit});
        numel_ += n;
    }
}

}  // namespace train_gpt
