#include "training/optimizer.h"

#include "device/copy.h"

namespace train_gpt {

Optimizer::Optimizer(ParameterStore& parameters, Arena& arena, int64_t sums)
    : parameters_(parameters),
      device_(arena.device()),
      norm_segments_(parameters.layout().buckets().size()),
      adamw_segments_(parameters.layout().buckets().size()),
      sums_count_(sums) {
    std::vector<int64_t> first_partial;
    for (const Parameter& p : parameters_.parameters()) {
        first_partial.push_back(partials_);
        partial_counts_.push_back((p.padded_numel() + norm_block - 1) / norm_block);
        partials_ += partial_counts_.back();
    }
    const size_t bytes = static_cast<size_t>(sums_count_ + partials_) * sizeof(double);
    sums_of_rank_ = static_cast<double*>(arena.take(bytes, Purpose::workspaces));
    // In a group of one, the sums over all ranks are this rank's.
    sums_ = parameters_.sharding().size == 1
                ? sums_of_rank_
                : static_cast<double*>(arena.take(bytes, Purpose::workspaces));
    state_ = static_cast<StepState*>(arena.take(sizeof(StepState), Purpose::workspaces));
    if (arena.is_counting()) return;

    const std::vector<char> zeros(bytes);
    copy_now(device_, sums_of_rank_, zeros.data(), bytes);
    const StepState fresh;
    copy_now(device_, state_, &fresh, sizeof fresh);
    for (const ParameterStore::Piece& piece : parameters_.pieces()) {
        const size_t i = static_cast<size_t>(piece.parameter);
        const int64_t block = piece.range.first / norm_block, n = piece.range.n;
        norm_segments_[static_cast<size_t>(piece.bucket)].push_back(
            {.gradient = piece.gradient,
             .n = n,
             .partials = sums_of_rank_ + sums_count_ + first_partial[i] + block});
        adamw_segments_[static_cast<size_t>(piece.bucket)].push_back(
            {.weights = piece.weights,
             .master = piece.master,
             .m = piece.m,
             .v = piece.v,
             .gradient = piece.gradient,
             .n = n,
             .decay = parameters_.parameters()[i].decay});
    }
    parameters_.after_sums(
        [this](Stream& stream, size_t bucket) { norm_partials(stream, norm_segments_[bucket]); });
}

void Optimizer::update(Stream& stream, AdamWStep args, float scale, float clip) {
    parameters_.finish_gradients(stream);
    if (sums_ != sums_of_rank_) {
        // With ZeRO-0 every rank has all partials already.
        const int64_t together = sums_count_ + (parameters_.sharding().zero == 0 ? 0 : partials_);
        copy(stream, sums_, sums_of_rank_,
             static_cast<size_t>(sums_count_ + partials_) * sizeof(double));
        parameters_.sum_over_ranks(stream, sums_, together);
    }
    finish_norm(stream, state_, sums_ + sums_count_, partial_counts_, scale, clip);
    args.state = state_;
    for (size_t b = 0; b < adamw_segments_.size(); ++b) {
        adamw(stream, adamw_segments_[b], args);
        parameters_.gather(stream, static_cast<int>(b));
    }
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
