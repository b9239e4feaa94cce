#include "training/optimizer.h"

#include <utility>

#include "device/copy.h"
#include "device/trace.h"

namespace train_gpt {

namespace {

/// Whether a piece's gradient counts for the norm here: it counts once over all ranks and stages.
bool counts_for_norm(const ParameterStore& parameters, const ParameterStore::Piece& piece) {
    const Sharding& sharding = parameters.sharding();
    const Parameter& p = parameters.parameters()[static_cast<size_t>(piece.parameter)];
    const bool same_on_data_ranks =
        (sharding.zero == 0 && sharding.rank > 0) || sharding.replica > 0;
    const bool same_on_tensor_ranks = !p.split && sharding.tensor > 0;
    return !same_on_data_ranks && !same_on_tensor_ranks && p.tied_to.empty();
}

int64_t blocks_of(const ParameterStore::Piece& piece) {
    return (piece.range.n + norm_block - 1) / norm_block;
}

}  // namespace

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
        if (counts_for_norm(parameters_, piece))
            partial_counts_[place_of(piece.parameter)] += blocks_of(piece);
    const auto doubles = [&](int64_t n) {
        return static_cast<double*>(
            arena.take(static_cast<size_t>(n) * sizeof(double), Purpose::workspaces));
    };
    const int64_t n = sums_count_ + tensors_, ranks = parameters_.sharding().world;
    // As many on every rank; the last block of a tensor may be short.
    const BucketLayout& layout = parameters_.layout();
    partials_ = doubles((parameters_.sharding().zero == 0 ? layout.numel() : layout.shard_numel()) /
                            norm_block +
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
    parameters_.after_sums(
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
        if (counts_for_norm(parameters_, piece)) {
            norm_segments_[bucket].push_back(
                {.gradient = piece.gradient, .n = n, .partials = next});
            next += blocks_of(piece);
        }
        adamw_segments_[bucket].push_back(
            {.weights = piece.weights,
             .master = piece.master,
             .m = piece.m,
             .v = piece.v,
             .gradient = piece.gradient,
             .n = n,
             .decay = parameters_.parameters()[static_cast<size_t>(piece.parameter)].decay});
    }
}

void Optimizer::update(Stream& stream, AdamWStep args, float scale, float clip) {
    parameters_.finish_gradients(stream);
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
    return i < 0 ? "" : names_[static_cast<size_t>(i)];
}

}  // namespace train_gpt
