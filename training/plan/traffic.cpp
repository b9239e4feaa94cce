#include "training/plan/traffic.h"

#include <algorithm>
#include <vector>

namespace train_gpt {

namespace {

/// The weights that a pipeline rank's actions acquire, in order.
std::vector<UnitPass> passes_of(const PipelineSchedule& schedule, int rank,
                                const RankRegistry& registry) {
    std::vector<UnitPass> passes;
    for (const PipelineAction& action : schedule.ranks[static_cast<size_t>(rank)].actions) {
        if (!is_compute(action.work) || action.work == PipelineWork::backward_weights) continue;
        const Registry& stage =
            registry.stages[static_cast<size_t>(schedule.index_of(action.stage))];
        const UnitPass forward{stage.first_unit(), stage.last_unit()};
        passes.push_back(
            action.work == PipelineWork::forward ? forward : UnitPass{forward.last, forward.first});
    }
    return passes;
}

/// What the layers of a rank send, for each micro-batch of so many tokens.
int64_t context_bytes(const RunShape& shape, const RankRegistry& registry, int64_t tokens) {
    const DecoderSpec part = share_of_spec(shape.spec, shape.mesh.size(Axis::tensor));
    const int ranks = shape.mesh.size(Axis::context);
    int64_t bytes = 0;
    for (const Registry& stage : registry.stages)
        for (int l = 0; l < static_cast<int>(stage.blocks.size()); ++l) {
            const LayerSpec layer = part.layer(stage.first_layer + l);
            bytes += context_bytes_sent(tokens * 2 * layer.kv_width(), shape.dtype, ranks);
            if (layer.experts && gathers_counts(shape))
                bytes += counts_bytes_sent(
                    int64_t{shape.config.batch.micro_batch} * layer.experts.n_expert, ranks);
        }
    return bytes;
}

/// What the layers of a rank send along the tensor axis, for each micro-batch of which the rank's
/// context place has so many tokens.
int64_t tensor_bytes(const RunShape& shape, const RankRegistry& registry, int64_t tokens,
                     bool halves_apart) {
    TensorTraffic sent = tensor_traffic(shape, tokens, halves_apart);
    for (const Registry& stage : registry.stages)
        for (int l = 0; l < static_cast<int>(stage.blocks.size()); ++l, ++sent.layers)
            if (shape.spec.layer(stage.first_layer + l).qk_norm == QkNormKind::width)
                ++sent.layers_with_sums;
    sent.has_embedding = registry.stages.front().begins_model();
    sent.has_head = registry.stages.back().ends_model();
    return tensor_bytes_sent(sent);
}

/// What a rank sends of its state: gradients, weights and sums.
Traffic traffic_of_state(const RunShape& shape, const PipelineSchedule& schedule, int rank,
                         const RankRegistry& registry, bool of_any_rank = false) {
    Arena counting = Arena::counting(Device{});
    const ParameterBuffers buffers(counting, registry.parameters, shape.dtype,
                                   ParameterBuffers::Use::training, sharding_of(shape, rank));
    return state_traffic(shape.mesh, buffers,
                         passes_of(schedule, shape.mesh.at(Axis::pipeline, rank), registry),
                         schedule.shape.micro_batches, sums_of_step(shape), of_any_rank);
}

}  // namespace

TensorTraffic tensor_traffic(const RunShape& shape, int64_t tokens, bool halves_apart) {
    return {.rows = tokens,
            .ranks = shape.mesh.size(Axis::tensor),
            .width = shape.spec.n_embd,
            .dtype = shape.dtype,
            .recomputes_block = shape.recompute == Recompute::block,
            .keep_gathered = shape.config.parallel.tensor_keep_gathered,
            .halves_apart = halves_apart};
}

Traffic step_traffic(const RunShape& shape, const PipelineSchedule& schedule, int rank,
                     bool of_any_rank) {
    const MeshLayout& mesh = shape.mesh;
    const RankRegistry registry = registry_of_rank(shape, rank);
    const PipelineRank& actions =
        schedule.ranks[static_cast<size_t>(mesh.at(Axis::pipeline, rank))];
    const int micro_batches = schedule.shape.micro_batches;
    const int64_t tokens = int64_t{shape.config.batch.micro_batch} * shape.config.sequence_length(),
                  of_context = tokens / mesh.size(Axis::context),
                  of_tensor = of_context / mesh.size(Axis::tensor);
    Traffic traffic = traffic_of_state(shape, schedule, rank, registry, of_any_rank);
    const auto add = [&](Axis axis, int64_t bytes) {
        if (mesh.size(axis) > 1) traffic[mesh.group_name({axis})] += bytes;
    };
    add(Axis::pipeline, pipeline_bytes_sent(actions, of_tensor, shape.spec.n_embd, shape.dtype));
    add(Axis::context, micro_batches * context_bytes(shape, registry, tokens));
    add(Axis::tensor,
        micro_batches * tensor_bytes(shape, registry, of_context, schedule.halves_apart));
    return traffic;
}

int64_t state_bytes(const RunShape& shape, int rank) {
    int64_t bytes = 0;
    for (const auto& [group, sent] :
         traffic_of_state(shape, pipeline_schedule(pipeline_shape(shape)), rank,
                          registry_of_rank(shape, rank), true))
        bytes += sent;
    return bytes;
}

Traffic most_traffic(const RunShape& shape) {
    const PipelineSchedule schedule = pipeline_schedule(pipeline_shape(shape));
    Traffic most;
    for (const int rank : shape.mesh.first_ranks(Axis::pipeline))
        for (const auto& [group, bytes] : step_traffic(shape, schedule, rank, true))
            most[group] = std::max(most[group], bytes);
    return most;
}

}  // namespace train_gpt
