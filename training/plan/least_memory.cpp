#include "training/plan/least_memory.h"

#include <algorithm>
#include <cassert>

#include "model/block.h"
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

/// Bytes of activations that a block keeps of each token for its backward pass, its input aside.
double kept_bytes(const LayerSpec& layer, DType dtype, Recompute level) {
    double bytes = 0;
    for (const Activation& a : block_activations(layer, dtype)) {
        const bool of_tokens = a.rows_of == RowsOf::tokens || a.rows_of == RowsOf::ranks_tokens;
        if (of_tokens && !is_shared(a, level, false))
            bytes += static_cast<double>(size_of(a.dtype)) * static_cast<double>(a.each * a.width);
    }
    return bytes;
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
        auto& kept = kept_.emplace_back();
        for (const Recompute level : recompute_levels)
            kept[static_cast<size_t>(level)] = kept_bytes(shape.spec.layer(l), shape.dtype, level);
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
    const auto element = static_cast<double>(size_of(shape.dtype));
    struct Rank {
        State state = {};
        double kept = 0;  // bytes of each token
    };
    std::vector<Rank> ranks(static_cast<size_t>(p));
    int layer = 0;
    for (size_t stage = 0; stage < layers.size(); ++stage)
        for (const int end = layer + layers[stage]; layer < end; ++layer) {
            Rank& rank = ranks[static_cast<size_t>(rank_of_stage(static_cast<int>(stage), p))];
            rank.state += layers_[static_cast<size_t>(layer)];
            rank.kept += kept_[static_cast<size_t>(layer)][static_cast<size_t>(shape.recompute)];
            if (!offload.activations) rank.kept += element * shape.spec.n_embd;
        }
    assert(layer == shape.spec.n_layer);
    ranks.front().state += embedding_;
    ranks.back().state += end_;
    if (p > 1) ranks.back().state += tied_;

    const double split = mesh.size({Axis::shard, Axis::context}),
                 of_parameter = (sharding.reduces_each() ? sizeof(float) / split : sizeof(float)) +
                                (sharding.gathers_each() ? element / split : element),
                 of_state = offload.optimizer ? 0 : 1 / split;
    const double tokens = double{1} * shape.config.batch.micro_batch *
                          shape.config.sequence_length() / mesh.size(Axis::context);
    const int micro_batches = pipeline_shape(shape).micro_batches;
    double most = 0;
    for (int r = 0; r < p; ++r) {
        const auto& [state, kept] = ranks[static_cast<size_t>(r)];
        // A rank has begun as many micro-batches as there are ranks from it to the last one before
        // the first of them comes back.
        const int in_flight = std::min(micro_batches, p - r);
        most = std::max(most, of_parameter * state.parameters + of_state * state.bytes +
                                  tokens * kept * in_flight);
    }
    // With Muon, matrices have fewer slots, and a rank may have more of them than others.
    constexpr double of_average = 0.8;
    return of_average * most / mesh.size(Axis::tensor);
}

}  // namespace train_gpt
