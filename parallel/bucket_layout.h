// Where the tensors of a model lie in flat buffers, so that those can be reduced, updated and gathered in buckets, and each
// bucket split evenly over ranks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel/parameter.h"

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

struct Bucket {
    Range range;  // in the flat buffers; ranks · shard elements
    int64_t shard = 0;
    int first_unit = 0, last_unit = 0;
};

/// Units 1 … lie in buckets of whole units, at least bucket_elements each, gathered from the last unit down, because
/// gradients become final in that order. Unit 0, the embedding, is final last and needed first, and as large as many of
/// the others: it is cut into buckets of about bucket_elements. A shard is a multiple of norm_block (adamw.h), and borders
/// between shards lie on multiples of norm_block of a tensor's elements or between tensors: tensors of at least that size
/// begin on a multiple of it, smaller ones cross none. What this and the even split leave free is padding; nothing reads it.
class BucketLayout {
  public:
    BucketLayout(const std::vector<Parameter>& parameters, int ranks, int64_t bucket_elements);

    /// Of parameter i in the flat buffers; a multiple of 64.
    int64_t offset(int i) const { return offsets_[static_cast<size_t>(i)]; }
    int64_t numel() const { return numel_; }
    int64_t shard_numel() const { return numel_ / ranks_; }
    int ranks() const { return ranks_; }
    /// In the order of the flat buffers, which is that of the forward pass.
    const std::vector<Bucket>& buckets() const { return buckets_; }
    /// The part of a bucket that belongs to a rank.
    Range shard_of(const Bucket& bucket, int rank) const {
        return {bucket.range.first + rank * bucket.shard, bucket.shard};
    }
    /// Where that lies in a buffer that holds a rank's shards alone: bucket after bucket.
    int64_t shard_offset(const Bucket& bucket) const { return bucket.range.first / ranks_; }

  private:
    void add_buckets(const std::vector<Parameter>& parameters, int first_unit, int last_unit,
                     int64_t largest);

    int ranks_;
    std::vector<int64_t> offsets_;
    int64_t numel_ = 0;
    std::vector<Bucket> buckets_;
};

}  // namespace train_gpt
