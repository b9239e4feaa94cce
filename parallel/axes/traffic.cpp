#include "parallel/axes/traffic.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace train_gpt {

namespace {

/// How many elements of whole buckets are gathered in a step with these passes.
int64_t gathered_elements(const ParameterBuffers& buffers, const std::vector<UnitPass>& passes) {
    const std::vector<Bucket>& buckets = buffers.layout().buckets();
    if (buffers.holds_all_weights()) return buffers.layout().numel();
    int64_t all = 0;
    std::vector<size_t> in_turn;
    for (size_t b = 0; b < buckets.size(); ++b) {
        if (buffers.turn_of_weights(b) >= 0)
            in_turn.push_back(b);
        else
            all += buckets[b].range.n;
    }
    constexpr size_t none = SIZE_MAX;
    size_t held[2] = {none, none};
    const auto use = [&](size_t b) {
        const int turn = buffers.turn_of_weights(b);
        if (turn < 0) return;
        size_t& place = held[turn];
        if (place != b) all += buckets[b].range.n;
        place = b;
    };
    // After an update, those with which the next forward pass begins.
    for (size_t i = 0; i < std::min<size_t>(2, in_turn.size()); ++i) use(in_turn[i]);
    for (const UnitPass& pass : passes) {
        const int step = pass.first <= pass.last ? 1 : -1;
        for (int unit = pass.first; unit != pass.last + step; unit += step)
            use(buffers.first_bucket(unit));
    }
    return all;
}

}  // namespace

Traffic state_traffic(const MeshLayout& mesh, const ParameterBuffers& buffers,
                      const std::vector<UnitPass>& passes, int64_t micro_batches, int64_t sums) {
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
    for (const Parameter& p : buffers.parameters()) {
        if (!s.tied_ends || !(p.has_copy || !p.tied_to.empty())) continue;
        const int64_t holders = s.zero == 0 ? 2 : 2 * s.size;
        traffic[s.zero == 0 ? mesh.ends_name({}) : mesh.ends_name({Axis::shard, Axis::context})] +=
            2 * p.padded_numel() * int64_t{sizeof(float)} * (holders - 1) / holders;
    }
    if (s.size == 1) return traffic;
    const auto reduced = static_cast<int64_t>(size_of(s.reduce_dtype)),
               weight = static_cast<int64_t>(size_of(buffers.dtype()));
    const int64_t n = buffers.layout().numel(), others = s.size - 1;
    const std::string group = s.zero == 0 ? mesh.group_name({Axis::data, Axis::context})
                                          : mesh.group_name({Axis::shard, Axis::context});
    const int64_t reductions = s.zero == 0 ? 2 : s.zero == 1 ? 1 : micro_batches;
    traffic[group] += reductions * reduced * n / s.size * others;
    if (s.zero > 0) traffic[group] += weight * gathered_elements(buffers, passes) / s.size * others;
    if (s.replicas > 1)
        traffic[mesh.group_name({Axis::replica})] +=
            2 * reduced * (n / s.size) * (s.replicas - 1) / s.replicas;
    return traffic;
}

}  // namespace train_gpt
