// Where a model's tensors lie in flat buffers. The buffers are reduced, updated and gathered in
// buckets, and each bucket is split evenly over the ranks.
#pragma once
#include <cstdint>
#include <vector>

#include "parallel/range.h"
#include "parallel/state/parameter.h"

namespace train_gpt {

struct Bucket {
    Range range;  // in the flat buffers; ranks · shard elements
    int64_t shard = 0;
    int first_unit = 0, last_unit = 0;
    Range added_over_tensor = {};  // gradients that tensor-parallel ranks add up (Parameter)
};

/// Units 1 … lie in buckets of whole units of one sweep with at least bucket_elements each. The
/// bucket of a sweep's first unit may have fewer. Units are collected from the last one down,
/// because gradients become final in that order. Unit 0, the embedding, is final last and needed
/// first, and is as large as many of the others: it is cut into buckets of about bucket_elements. A
/// shard is a multiple of norm_block (adamw.h). Boundaries between shards lie between tensors or at
/// multiples of norm_block within a tensor: tensors of at least norm_block elements begin at a
/// multiple of it, and smaller ones do not cross one. Tensors whose gradients tensor-parallel ranks
/// add up are next to each other. The space that this and the even split leave free is padding,
/// which nothing reads.
class BucketLayout {
  public:
    BucketLayout(const std::vector<Parameter>& parameters, int ranks, int64_t bucket_elements);

    /// The offset of parameter i in the flat buffers, in elements; a multiple of 64.
    int64_t offset(int i) const { return offsets_[static_cast<size_t>(i)]; }
    int64_t numel() const { return numel_; }
    int64_t shard_numel() const { return numel_ / ranks_; }
    int ranks() const { return ranks_; }
    /// In the order of the flat buffers, which is the order of the forward pass.
    const std::vector<Bucket>& buckets() const { return buckets_; }
    /// The part of a bucket that belongs to a rank.
    Range shard_of(const Bucket& bucket, int rank) const {
        return {bucket.range.first + rank * bucket.shard, bucket.shard};
    }
    /// The offset of that part in a buffer that holds only a rank's shards, bucket after bucket.
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
