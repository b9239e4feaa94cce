#include "training/optimizer.h"

#include "kernels/copy.h"

namespace train_gpt {

Optimizer::Optimizer(ParameterStore& parameters, Arena& arena)
    : parameters_(parameters), device_(arena.device()) {
    const int count = static_cast<int>(parameters_.parameters().size());
    int64_t blocks = 0;
    for (int i = 0; i < count; ++i) {
        const Parameter& p = parameters_.parameters()[static_cast<size_t>(i)];
        partial_counts_.push_back((p.padded_numel() + norm_block - 1) / norm_block);
        blocks += partial_counts_.back();
    }
    partials_ = static_cast<double*>(arena.take(static_cast<size_t>(blocks) * sizeof(double), Purpose::workspaces));
    state_ = static_cast<StepState*>(arena.take(sizeof(StepState), Purpose::workspaces));
    if (arena.is_counting()) return;

    const StepState fresh;
    copy_now(device_, state_, &fresh, sizeof fresh);
    double* partials = partials_;
    for (int i = 0; i < count; ++i) {
        const Parameter& p = parameters_.parameters()[static_cast<size_t>(i)];
        const int64_t n = p.padded_numel();
        norm_segments_.push_back({.gradient = parameters_.gradient(i), .n = n, .partials = partials});
        partials += partial_counts_[static_cast<size_t>(i)];
        adamw_segments_.push_back({.weights = parameters_.rounded_weight(i),
                                   .master = parameters_.master(i),
                                   .m = parameters_.moment1(i),
                                   .v = parameters_.moment2(i),
                                   .gradient = parameters_.gradient(i),
                                   .n = n,
                                   .decay = p.decay});
    }
}

void Optimizer::update(Stream& stream, AdamWStep args, float scale, float clip) {
    norm_partials(stream, norm_segments_);
    finish_norm(stream, state_, partials_, partial_counts_, scale, clip);
    args.state = state_;
    adamw(stream, adamw_segments_, args);
}

StepState Optimizer::state() const {
    StepState state;
    copy_now(device_, &state, state_, sizeof state);
    return state;
}

std::string Optimizer::bad_parameter(const StepState& state) const {
    const int i = state.bad_segment;
    return i < 0 ? "" : parameters_.parameters()[static_cast<size_t>(i)].name;
}

}  // namespace train_gpt
