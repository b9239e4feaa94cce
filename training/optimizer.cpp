#include "training/optimizer.h"

#include <utility>

#include "device/copy.h"
#include "device/trace.h"

namespace train_gpt {

namespace {

constexpr size_t adamw_m = 0, adamw_v = 1;  // in optimizer_slots()

int64_t blocks_of(const ParameterStore::Piece& piece) {
    return (piece.range.n + norm_block - 1) / norm_block;
}

}  // namespace

std::vector<OptimizerSlot> optimizer_slots() { return {{"m"}, {"v"}}; }

Optimizer::Optimizer(ParameterStore& parameters, Arena& arena, int64_t sums,
                     std::vector<std::string> names)
    : parameters_(parameters),
      device_(arena.device()),
      norm_segments_(parameters.layout().buckets().size()),
      adamw_segments_(parameters.layout().buckets().size()),
      names_(std::move(names)),
      by_id_(!names_.empty()),
      sums_count_(sums) {
    if (!by_id_)
        for (const Parameter& p : parameters_.parameters()) names_.push_back(p.name);
    tensors_ = std::ssize(names_);
    partial_counts_.resize(names_.size());
    for (const ParameterStore::Piece& piece : parameters_.pieces())
        if (piece.is_first_copy) partial_counts_[place_of(piece.parameter)] += blocks_of(piece);
    const auto doubles = [&](int64_t n) {
        return static_cast<double*>(
            arena.take(static_cast<size_t>(n) * sizeof(double), Purpose::workspaces));
    };
    const int64_t n = sums_count_ + tensors_, ranks = parameters_.sharding().world;
    // As many on every rank; the last block of a tensor may be short.
    const BucketLayout& layout = parameters_.layout();
    partials_ = doubles(
        (parameters_.sharding().is_split() ? layout.shard_numel() : layout.numel()) / norm_block +
        tensors_);
    sums_of_rank_ = doubles(n);
    gathered_ = ranks > 1 ? doubles(ranks * n) : nullptr;
    sums_ = ranks > 1 ? doubles(n) : sums_of_rank_;
    state_ = static_cast<StepState*>(arena.take(sizeof(StepState), Purpose::workspaces));
    if (arena.is_counting()) return;

    const std::vector<char> zeros(static_cast<size_t>(n) * sizeof(double));
    copy_now(device_, sums_of_rank_, zeros.data(), zeros.size());
    const StepState fresh;
    copy_now(device_, state_, &fresh, sizeof fresh);
    make_segments();
    parameters_.gradients.when_summed(
        [this](Stream& stream, size_t bucket) { norm_partials(stream, norm_segments_[bucket]); });
}

size_t Optimizer::place_of(int parameter) const {
    const auto i = static_cast<size_t>(parameter);
    return by_id_ ? parameters_.parameters()[i].id : i;
}

void Optimizer::make_segments() {
    double* next = partials_;
    for (const ParameterStore::Piece& piece : parameters_.pieces()) {
        const auto bucket = static_cast<size_t>(piece.bucket);
        const int64_t n = piece.range.n;
        if (piece.is_first_copy) {
            norm_segments_[bucket].push_back(
                {.gradient = piece.gradient, .n = n, .partials = next});
            next += blocks_of(piece);
        }
        adamw_segments_[bucket].push_back(
            {.weights = piece.weights,
             .master = piece.master,
             .m = piece.floats(adamw_m),
             .v = piece.floats(adamw_v),
             .gradient = piece.gradient,
             .n = n,
             .decay = parameters_.parameters()[static_cast<size_t>(piece.parameter)].decay});
    }
}

void Optimizer::update(Stream& stream, AdamWStep args, float scale, float clip) {
    parameters_.gradients.finish(stream);
    parameters_.weights.finish(stream);
    add_partials(stream, sums_of_rank_ + sums_count_, partials_, partial_counts_);
    if (sums_ != sums_of_rank_) {
        const int64_t n = sums_count_ + tensors_;
        parameters_.gather_from_ranks(stream, gathered_, sums_of_rank_, n);
        add_rows(stream, sums_, gathered_, parameters_.sharding().world, n);
    }
    finish_norm(stream, state_, sums_ + sums_count_, tensors_, scale, clip);
    args.state = state_;
    for (size_t b = 0; b < adamw_segments_.size(); ++b) {
        {
            const TraceSpan span(TraceTrack::device, stream, "update bucket", static_cast<int>(b));
            adamw(stream, adamw_segments_[b], args);
        }
        parameters_.weights.gather(stream, static_cast<int>(b));
    }
}

StepState Optimizer::state() const {
    StepState state;
    copy_now(device_, &state, state_, sizeof state);
    return state;
}

std::string Optimizer::bad_parameter(const StepState& state) const {
    const int i = state.bad_segment;
    return i < 0 ? "" : names_[static_cast<size_t>(i)];
}

}  // namespace train_gpt
