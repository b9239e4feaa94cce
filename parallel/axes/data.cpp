#include "parallel/axes/data.h"

#include <algorithm>
#include <map>
#include <utility>

#include "parallel/state/gradient_sums.h"
#include "parallel/state/matrices.h"

namespace train_gpt {

Sharding sharding_of(const MeshLayout& mesh, int rank, const DataOptions& options) {
    const bool splits = options.zero > 0 && mesh.size({Axis::shard, Axis::context}) > 1;
    const Axes summed = {Axis::data, Axis::context}, split = {Axis::shard, Axis::context};
    return {.rank = splits ? mesh.at(split, rank) : mesh.at(summed, rank),
            .size = splits ? mesh.size(split) : mesh.size(summed),
            .replica = splits ? mesh.at(Axis::replica, rank) : 0,
            .replicas = splits ? mesh.size(Axis::replica) : 1,
            .tensor = mesh.at(Axis::tensor, rank),
            .tensors = mesh.size(Axis::tensor),
            .pipeline = mesh.at(Axis::pipeline, rank),
            .pipelines = mesh.size(Axis::pipeline),
            .tied_ends = options.tied_head && mesh.size(Axis::pipeline) > 1,
            .world = mesh.world(),
            .zero = splits ? options.zero : 0,
            .bucket_elements = options.bucket_elements,
            .sums = options.sums,
            .matrices = options.matrices,
            .state_on_host = options.state_on_host};
}

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
    // After an update, the two buckets with which the next forward pass begins.
    for (size_t i = 0; i < std::min<size_t>(2, in_turn.size()); ++i) use(in_turn[i]);
    for (const UnitPass& pass : passes) {
        const int step = pass.first <= pass.last ? 1 : -1;
        for (int unit = pass.first; unit != pass.last + step; unit += step)
            use(buffers.first_bucket(unit));
    }
    return all;
}

}  // namespace

std::vector<StepCollective> collectives_of_data(const Mesh& mesh,
                                                const std::vector<Parameter>& parameters,
                                                const Sharding& sharding, const StepSizes& sizes) {
    using Kind = StepCollective::Kind;
    // All ranks make all groups. The sums of some ranks are over fewer groups.
    Communicator& shards = group_of(SumOver::shards, mesh, sharding);
    if (sharding.replicas > 1) group_of(SumOver::replicas, mesh, sharding);
    if (sharding.tensors > 1) group_of(SumOver::tensor, mesh, sharding);
    if (sharding.tied_ends) group_of(SumOver::ends, mesh, sharding);
    const BucketLayout layout(parameters, sharding.size, sharding.bucket_elements);
    std::vector<StepCollective> all;
    if (sharding.matrices && sharding.size * sharding.tensors > 1) {
        // Two halves, as large as a matrix's parts on all ranks.
        int64_t most = 0;
        for (const Parameter& p : parameters)
            if (p.update == Update::matrix) most = std::max(most, p.numel());
        Communicator& group = group_of_matrices(mesh, sharding);
        all.push_back({Kind::all_to_all, &group, sharding.matrices->dtype,
                       2 * std::max<int64_t>(1, most / group.size())});
    }
    for (const GradientSum& sum : gradient_sums(layout, parameters, sharding)) {
        const Kind kind = sum.scattered ? Kind::reduce_scatter : Kind::all_reduce;
        const int64_t count = sum.scattered ? sum.elements.n / sum.ranks : sum.elements.n;
        all.push_back({kind, &group_of(sum.over, mesh, sharding), sum.dtype, count});
    }
    if (shards.size() > 1 && sharding.is_split())
        for (const Bucket& bucket : layout.buckets())
            all.push_back({Kind::all_gather, &shards, sizes.dtype, bucket.shard});
    return all;
}

Traffic state_traffic(const MeshLayout& mesh, const ParameterBuffers& buffers,
                      const std::vector<UnitPass>& passes, int64_t micro_batches,
                      const StepNumbers& sums, bool of_any_rank) {
    const Sharding& s = buffers.sharding();
    Traffic traffic;
    if (mesh.world() > 1)
        traffic[mesh.group_name(all_axes)] +=
            (mesh.world() - 1) * sums.fp64 * int64_t{sizeof(double)} +
            2 * (mesh.world() - 1) * sums.int64 * int64_t{sizeof(int64_t)} / mesh.world() +
            2 * (mesh.world() - 1) * sums.int32 * int64_t{sizeof(int32_t)} / mesh.world() +
            2 * (mesh.world() - 1) * sums.fp32 * int64_t{sizeof(float)} / mesh.world() +
            2 * (mesh.world() - 1) * sums.amax * int64_t{sizeof(float)} / mesh.world();
    // Bytes of whole groups, of which each rank sends (ranks − 1) / ranks
    std::map<SumOver, std::pair<int64_t, int64_t>> moved;
    for (const GradientSum& sum : gradient_sums(buffers.layout(), buffers.parameters(), s)) {
        auto& [ranks, bytes] = moved[sum.over];
        ranks = sum.ranks;
        bytes += (sum.every_micro_batch ? micro_batches : 1) * sum.bytes_moved();
    }
    if (s.size > 1 && s.is_split()) {
        auto& [ranks, bytes] = moved[SumOver::shards];
        bytes +=
            gathered_elements(buffers, passes) * static_cast<int64_t>(size_of(buffers.dtype()));
    }
    for (const auto& [over, of_group] : moved) {
        const auto& [ranks, bytes] = of_group;
        traffic[name_of(over, mesh, s)] += bytes * (ranks - 1) / ranks;
    }
    if (s.matrices && s.size * s.tensors > 1) {
        Arena counting = Arena::counting(buffers.device());
        const Matrices matrices(counting, buffers);
        traffic[name_of_matrix_group(mesh, s)] +=
            of_any_rank ? matrices.most_bytes_sent() : matrices.bytes_sent();
    }
    return traffic;
}

}  // namespace train_gpt
