#include "parallel/traffic.h"

#include <algorithm>
#include <vector>

namespace train_gpt {

namespace {

/// How many elements of whole buckets are gathered in a step.
int64_t gathered_elements(const ParameterBuffers& buffers, int64_t micro_batches) {
    const std::vector<Bucket>& buckets = buffers.layout().buckets();
    if (buffers.holds_all_weights()) return buffers.layout().numel();
    int64_t all = 0;
    std::vector<int64_t> in_turn;
    for (size_t b = 0; b < buckets.size(); ++b) {
        all += buckets[b].range.n;
        if (buffers.turn_of_weights(b) >= 0) in_turn.push_back(buckets[b].range.n);
    }
    for (size_t i = 0; i < in_turn.size(); ++i) {
        if (i >= 2) all += (micro_batches - 1) * in_turn[i];  // forward passes after the first
        if (i + 2 < in_turn.size()) all += micro_batches * in_turn[i];  // backward passes
    }
    return all;
}

}  // namespace

Traffic state_traffic(const MeshLayout& mesh, const ParameterBuffers& buffers,
                      int64_t micro_batches, int64_t sums) {
    const Sharding& s = buffers.sharding();
    Traffic traffic;
    const Axes everyone = {Axis::pipeline, Axis::data, Axis::context, Axis::tensor};
    if (mesh.world() > 1)
        traffic[mesh.group_name(everyone)] += (mesh.world() - 1) * sums * int64_t{sizeof(double)};
    if (s.tensors > 1) {
        int64_t added = 0;
        for (const Bucket& bucket : buffers.layout().buckets()) added += bucket.added_over_tensor.n;
        traffic[mesh.group_name({Axis::tensor})] += (s.zero >= 2 ? micro_batches : 1) * 2 * added *
                                                    int64_t{sizeof(float)} * (s.tensors - 1) /
                                                    s.tensors;
    }
    if (s.size == 1) return traffic;
    const auto reduced = static_cast<int64_t>(size_of(s.reduce_dtype)),
               weight = static_cast<int64_t>(size_of(buffers.dtype()));
    const int64_t n = buffers.layout().numel(), others = s.size - 1;
    const std::string group = s.zero == 0 ? mesh.group_name({Axis::data, Axis::context})
                                          : mesh.group_name({Axis::shard, Axis::context});
    const int64_t reductions = s.zero == 0 ? 2 : s.zero == 1 ? 1 : micro_batches;
    traffic[group] += reductions * reduced * n / s.size * others;
    if (s.zero > 0)
        traffic[group] += weight * gathered_elements(buffers, micro_batches) / s.size * others;
    if (s.replicas > 1)
        traffic[mesh.group_name({Axis::replica})] +=
            2 * reduced * (n / s.size) * (s.replicas - 1) / s.replicas;
    return traffic;
}

}  // namespace train_gpt
