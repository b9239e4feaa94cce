#include "parallel/state/gradient_sums.h"

#include <algorithm>

namespace train_gpt {

namespace {

/// Which parameter the first and the last pipeline rank both hold, if this rank is one of them; −1:
/// none.
int tied_parameter(const std::vector<Parameter>& parameters, const Sharding& sharding) {
    if (!sharding.tied_ends || sharding.pipelines == 1) return -1;
    for (size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].has_copy || !parameters[i].tied_to.empty()) return static_cast<int>(i);
    return -1;
}

}  // namespace

std::vector<GradientSum> gradient_sums(const BucketLayout& layout,
                                       const std::vector<Parameter>& parameters,
                                       const Sharding& sharding) {
    const std::vector<Bucket>& buckets = layout.buckets();
    const bool each = sharding.reduces_each();
    const DType whole = sharding.is_exact() ? DType::int32 : DType::fp32,
                between = sharding.dtype_between_ranks();
    std::vector<GradientSum> sums;
    for (size_t b = 0; b < buckets.size(); ++b) {
        const Bucket& bucket = buckets[b];
        if (sharding.tensors > 1 && bucket.added_over_tensor.n > 0)
            sums.push_back({.over = SumOver::tensor,
                            .ranks = sharding.tensors,
                            .first_bucket = b,
                            .last_bucket = b,
                            .elements = bucket.added_over_tensor,
                            .dtype = whole,
                            .every_micro_batch = each});
        if (sharding.size > 1)
            sums.push_back({.over = SumOver::shards,
                            .ranks = sharding.size,
                            .first_bucket = b,
                            .last_bucket = b,
                            .elements = bucket.range,
                            .dtype = between,
                            .scattered = sharding.is_split(),
                            .every_micro_batch = each});
        if (sharding.replicas > 1)
            sums.push_back({.over = SumOver::replicas,
                            .ranks = sharding.replicas,
                            .first_bucket = b,
                            .last_bucket = b,
                            .elements = layout.shard_of(bucket, sharding.rank),
                            .dtype = between});
    }
    if (const int tied = tied_parameter(parameters, sharding); tied >= 0) {
        const Parameter& p = parameters[static_cast<size_t>(tied)];
        GradientSum sum{.over = SumOver::ends,
                        .ranks = sharding.is_split() ? int64_t{2} * sharding.size : 2,
                        .first_bucket = buckets.size(),
                        .elements = {layout.offset(tied), p.padded_numel()},
                        .parameter = tied,
                        .dtype = whole};
        for (size_t b = 0; b < buckets.size(); ++b) {
            if (buckets[b].first_unit > p.unit || p.unit > buckets[b].last_unit) continue;
            sum.first_bucket = std::min(sum.first_bucket, b);
            sum.last_bucket = b;
        }
        sums.push_back(sum);
    }
    return sums;
}

Axes axes_of(SumOver over, const Sharding& sharding) {
    static constexpr Axes none = {}, tensor = {Axis::tensor}, replica = {Axis::replica},
                          split = {Axis::shard, Axis::context}, all = {Axis::data, Axis::context};
    switch (over) {
        case SumOver::tensor:
            return tensor;
        case SumOver::replicas:
            return replica;
        case SumOver::ends:
            return sharding.is_split() ? split : none;
        case SumOver::shards:
            break;
    }
    return sharding.is_split() ? split : all;
}

Axis axis_of_exchange(SumOver over) {
    if (over == SumOver::tensor) return Axis::tensor;
    return over == SumOver::ends ? Axis::pipeline : Axis::data;
}

Communicator& group_of(SumOver over, const Mesh& mesh, const Sharding& sharding) {
    const Axes axes = axes_of(over, sharding);
    return over == SumOver::ends ? mesh.over_ends(axes) : mesh.over(axes);
}

std::string name_of(SumOver over, const MeshLayout& mesh, const Sharding& sharding) {
    const Axes axes = axes_of(over, sharding);
    return over == SumOver::ends ? mesh.ends_name(axes) : mesh.group_name(axes);
}

}  // namespace train_gpt
