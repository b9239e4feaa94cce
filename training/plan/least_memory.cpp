#include "training/plan/least_memory.h"

#include <algorithm>
#include <cassert>

#include "parallel/pipeline/pipeline_schedule.h"
#include "training/optimizer.h"

namespace train_gpt {

namespace {

/// Bytes of an element's master and of its slots.
double state_of_element(const RunShape& shape, const Parameter& p) {
    const auto& o = shape.config.optimizer;
    const bool is_matrix = o.name == OptimizerName::muon && p.update == Update::matrix;
    double bytes = shape.dtype == DType::fp32 ? 0 : sizeof(float);
    for (const OptimizerSlot& slot : optimizer_slots(o.state_dtype))
        if (slot.of_matrices || !is_matrix)
            bytes += static_cast<double>(size_of(slot.dtype)) / static_cast<double>(slot.block);
    return bytes;
}

/// Elements of a token that a block keeps for its backward pass.
double kept_width(const LayerSpec& layer, Recompute level, bool inputs_on_host) {
    const double width = inputs_on_host ? 0 : layer.n_embd;
    if (level == Recompute::block) return width;
    const ExpertSpec& e = layer.experts;
    return width + layer.qkv_width() + layer.attention_width() +
           (e ? 2.0 * (double{1} * e.n_expert_per_token * e.n_ff + e.n_ff_shared)
              : layer.up_width());
}

}  // namespace

LeastMemory::State& LeastMemory::State::operator+=(const State& other) {
    parameters += other.parameters, bytes += other.bytes;
    return *this;
}

LeastMemory::LeastMemory(const RunShape& shape) {
    const Registry& whole = *shape.whole;
    std::vector<State> units(static_cast<size_t>(whole.last_unit()) + 1);
    const auto state_of = [&](const Parameter& p) {
        const auto n = static_cast<double>(p.numel());
        return State{n, n * state_of_element(shape, p)};
    };
    for (const Parameter& p : whole.parameters) units[static_cast<size_t>(p.unit)] += state_of(p);
    const auto of_unit = [&](int unit) { return units[static_cast<size_t>(unit)]; };
    for (int l = 0; l < static_cast<int>(whole.blocks.size()); ++l) {
        State& layer = layers_.emplace_back(of_unit(whole.unit_of_block(l)));
        if (whole.unit_of_experts(l) != whole.unit_of_block(l))
            layer += of_unit(whole.unit_of_experts(l));
    }
    embedding_ = of_unit(whole.unit_of(whole.tokens));
    end_ = of_unit(whole.unit_of(whole.final_norm_w));
    if (whole.head == whole.tokens)
        tied_ = state_of(whole.parameters[static_cast<size_t>(whole.tokens)]);
}

double LeastMemory::bytes(const RunShape& shape, const std::vector<int>& layers) const {
    const MeshLayout& mesh = shape.mesh;
    const int p = mesh.size(Axis::pipeline);
    const Sharding sharding = sharding_of(shape, 0);
    const Offload offload = shape.offload();
    struct Rank {
        State state = {};
        double width = 0;
    };
    std::vector<Rank> ranks(static_cast<size_t>(p));
    int layer = 0;
    for (size_t stage = 0; stage < layers.size(); ++stage)
        for (const int end = layer + layers[stage]; layer < end; ++layer) {
            Rank& rank = ranks[static_cast<size_t>(rank_of_stage(static_cast<int>(stage), p))];
            rank.state += layers_[static_cast<size_t>(layer)];
            rank.width += kept_width(shape.spec.layer(layer), shape.recompute, offload.activations);
        }
    assert(layer == shape.spec.n_layer);
    ranks.front().state += embedding_;
    ranks.back().state += end_;
    if (p > 1) ranks.back().state += tied_;

    const double split = mesh.size({Axis::shard, Axis::context}),
                 element = static_cast<double>(size_of(shape.dtype)),
                 of_parameter = (sharding.reduces_each() ? sizeof(float) / split : sizeof(float)) +
                                (sharding.gathers_each() ? element / split : element),
                 of_state = offload.optimizer ? 0 : 1 / split;
    const double tokens = double{1} * shape.config.batch.micro_batch *
                          shape.config.sequence_length() / mesh.size(Axis::context);
    const int micro_batches = pipeline_shape(shape).micro_batches;
    double most = 0;
    for (int r = 0; r < p; ++r) {
        const auto& [state, width] = ranks[static_cast<size_t>(r)];
        // A rank has begun as many micro-batches as there are ranks from it to the last one before
        // the first of them comes back.
        const int in_flight = std::min(micro_batches, p - r);
        most = std::max(most, of_parameter * state.parameters + of_state * state.bytes +
                                  element * tokens * width * in_flight);
    }
    // With Muon, matrices have fewer slots, and a rank may have more of them than others.
    constexpr double of_average = 0.8;
    return of_average * most / mesh.size(Axis::tensor);
}

}  // namespace train_gpt
