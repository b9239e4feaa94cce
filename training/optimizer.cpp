#include "training/optimizer.h"

#include <cmath>
#include <utility>

#include "device/copy.h"
#include "device/trace.h"

namespace train_gpt {

namespace {

int64_t blocks_of(const ParameterStore::Piece& piece) {
    return (piece.range.n + norm_block - 1) / norm_block;
}

}  // namespace

std::vector<OptimizerSlot> optimizer_slots(StateDType state) {
    if (state == StateDType::int8)
        return {{.name = "m", .dtype = DType::uint8, .coding = Coding::signs},
                {.name = "m.scale", .block = code_block},
                {.name = "v", .dtype = DType::uint8, .coding = Coding::roots},
                {.name = "v.scale", .block = code_block}};
    const DType dtype = state == StateDType::bf16 ? DType::bf16 : DType::fp32;
    return {{.name = "m", .dtype = dtype}, {.name = "v", .dtype = dtype, .of_matrices = false}};
}

std::optional<MuonOptions> muon_options(const Config& config) {
    const auto& o = config.optimizer;
    if (o.name != OptimizerName::muon) return {};
    return MuonOptions{o.muon_coefficients, o.muon_scale};
}

double matrix_learning_rate(const Config& config, double rate) {
    const auto& o = config.optimizer;
    return o.matrix_learning_rate > 0 ? rate / o.learning_rate * o.matrix_learning_rate : rate;
}

OptimizerStep optimizer_step(const Config& config, int64_t step, double rate) {
    const auto& o = config.optimizer;
    return {.adamw = {.learning_rate = static_cast<float>(rate),
                      .beta1 = static_cast<float>(o.beta1),
                      .beta2 = static_cast<float>(o.beta2),
                      .epsilon = static_cast<float>(o.epsilon),
                      .weight_decay = static_cast<float>(o.weight_decay),
                      .step = step + 1,
                      .cautious_decay = o.cautious_decay,
                      .seed = config.seed},
            .muon = {.learning_rate = static_cast<float>(matrix_learning_rate(config, rate)),
                     .momentum = static_cast<float>(o.momentum),
                     .weight_decay = static_cast<float>(o.weight_decay),
                     .nesterov = o.nesterov,
                     .dtype = o.muon_dtype,
                     .cautious_decay = o.cautious_decay},
            .balance_rate = static_cast<float>(balance_rate(config))};
}

Optimizer::Optimizer(ParameterStore& parameters, Arena& arena, OptimizerOptions options)
    : parameters_(parameters),
      leases_(arena, parameters),
      device_(arena.device()),
      norm_segments_(parameters.layout().buckets().size()),
      adamw_segments_(parameters.layout().buckets().size()),
      balance_segments_(parameters.layout().buckets().size()),
      names_(std::move(options.names)),
      by_id_(!names_.empty()),
      grids_(parameters.grids()),
      contributions_(options.contributions),
      sums_count_(options.sums),
      skips_spikes_(options.skips_spikes) {
    if (grids_) {
        names_.clear();
        for (const TensorPlace& place : grids_->layout().places())
            names_.insert(names_.end(), static_cast<size_t>(place.parts), place.name);
    } else if (!by_id_) {
        for (const Parameter& p : parameters_.parameters()) names_.push_back(p.name);
    }
    tensors_ = std::ssize(names_);
    const auto doubles = [&](int64_t n) {
        return static_cast<double*>(
            arena.take(static_cast<size_t>(n) * sizeof(double), Purpose::workspaces));
    };
    if (!grids_) {
        partial_counts_.resize(names_.size());
        for (const ParameterStore::Piece& piece : parameters_.pieces())
            if (piece.is_first_copy) partial_counts_[place_of(piece.parameter)] += blocks_of(piece);
        // As many on every rank; the last block of a tensor may be short.
        const BucketLayout& layout = parameters_.layout();
        partials_ =
            doubles((parameters_.sharding().is_split() ? layout.shard_numel() : layout.numel()) /
                        norm_block +
                    tensors_);
    }
    const int64_t n = sums_count_ + tensors_, ranks = parameters_.sharding().world;
    sums_of_rank_ = doubles(n);
    gathered_ = ranks > 1 ? doubles(ranks * n) : nullptr;
    sums_ = ranks > 1 ? doubles(n) : sums_of_rank_;
    state_ = static_cast<StepState*>(arena.take(sizeof(StepState), Purpose::workspaces));
    history_ = static_cast<SpikeHistory*>(arena.take(sizeof(SpikeHistory), Purpose::workspaces));
    squares_before_ = doubles(tensors_);
    kept_squares_ = doubles(4 * tensors_);
    if (options.muon) muon_.emplace(parameters, leases_, arena, *options.muon);
    if (arena.is_counting()) return;
    load_adamw(device_);

    const std::vector<double> zeros(static_cast<size_t>(n));
    copy_now(device_, sums_of_rank_, zeros.data(), zeros.size() * sizeof(double));
    copy_now(device_, squares_before_, zeros.data(),
             static_cast<size_t>(tensors_) * sizeof(double));
    set_spike_history({});
    const StepState fresh;
    copy_now(device_, state_, &fresh, sizeof fresh);
    make_segments(options.routers);
    parameters_.gradients.when_summed([this](Stream& stream, size_t bucket) {
        if (grids_)
            grids_->add_squares(stream, bucket);
        else
            norm_partials(stream, norm_segments_[bucket]);
    });
}

size_t Optimizer::place_of(int parameter) const {
    const auto i = static_cast<size_t>(parameter);
    return by_id_ ? parameters_.parameters()[i].id : i;
}

void Optimizer::make_segments(const RouterCounts* routers) {
    double* next = partials_;
    for (const ParameterStore::Piece& piece : parameters_.pieces()) {
        const auto bucket = static_cast<size_t>(piece.bucket);
        const int64_t n = piece.range.n;
        if (piece.is_first_copy && !grids_) {
            norm_segments_[bucket].push_back(
                {.gradient = piece.gradient, .n = n, .partials = next});
            next += blocks_of(piece);
        }
        if (parameters_.is_matrix(piece.parameter)) continue;
        const ParameterStore::Piece leased = leases_.leased(piece);
        const Parameter& p = parameters_.parameters()[static_cast<size_t>(piece.parameter)];
        if (p.update == Update::balance) {
            if (!routers) continue;
            balance_segments_[bucket].push_back({.weights = piece.weights,
                                                 .master = leased.master,
                                                 .first = piece.range.first,
                                                 .n = n,
                                                 .chosen = routers->chosen(p.router).as<int32_t>(),
                                                 .E = p.numel()});
            continue;
        }
        const size_t m = parameters_.slot_of("m"), v = parameters_.slot_of("v");
        // Elements of different parts have different random numbers.
        const int64_t part = p.is_part() ? p.held_by.rank : 0;
        adamw_segments_[bucket].push_back({.weights = piece.weights,
                                           .master = leased.master,
                                           .m = leased.slots[m],
                                           .v = leased.slots[v],
                                           .gradient = piece.gradient,
                                           .n = n,
                                           .decay = p.decay,
                                           .tensor = p.id,
                                           .first = (part << 40) + piece.range.first});
        AdamWSegment& segment = adamw_segments_[bucket].back();
        if (parameters_.slots()[m].coding != Coding::none) {
            segment.m_scales = reinterpret_cast<float*>(leased.slots[m + 1]);
            segment.v_scales = reinterpret_cast<float*>(leased.slots[v + 1]);
        }
        if (!grids_) continue;
        segment.sums = reinterpret_cast<const int32_t*>(piece.gradient);
        segment.exponents = grids_->exponents_of(piece);
    }
}

void Optimizer::begin_step(Stream& stream) {
    leases_.begin_step();
    if (grids_) grids_->begin_step(stream);
}

void Optimizer::update(Stream& stream, OptimizerStep args, float scale, float clip) {
    parameters_.gradients.finish(stream);
    parameters_.weights.finish(stream);
    if (state_copy_) state_copy_->hold_others(stream);
    if (grids_)
        find_exact_norm(stream, scale, clip);
    else
        find_norm(stream, scale, clip);
    watch_step(stream, scale);
    args.adamw.state = args.muon.state = state_;
    args.adamw.moments = args.muon.momentum_dtype =
        parameters_.slots()[parameters_.slot_of("m")].dtype;
    if (muon_) {
        if (state_copy_) state_copy_->hold_all(stream);
        muon_->find_directions(stream, args.muon);
    }
    for (size_t b = 0; b < adamw_segments_.size(); ++b) {
        {
            const TraceSpan span(TraceTrack::device, stream, "update bucket", static_cast<int>(b));
            if (state_copy_) state_copy_->hold_bucket(stream, b);
            leases_.acquire(stream, StateLeases::Part::elements, b);
            adamw(stream, adamw_segments_[b], args.adamw);
            if (muon_) muon_->update(stream, b, args.muon);
            balance_biases(stream, balance_segments_[b], args.balance_rate, state_);
            leases_.release(stream, StateLeases::Part::elements, b);
        }
        parameters_.weights.gather(stream, static_cast<int>(b));
    }
    if (grids_) grids_->update(stream, contributions_, &state_->overflow);
}

size_t Optimizer::scratch_bytes(const Stream& stream) const {
    return muon_ ? muon_->scratch_bytes(stream) : 0;
}

void Optimizer::warm_up(Stream& stream) {
    if (muon_) muon_->warm_up(stream);
}

void Optimizer::watch_step(Stream& stream, float scale) {
    if (sums_count_ == 0) return;  // no loss
    const double* const squares = sums_ + sums_count_;
    watch_for_spike(stream, {.history = history_,
                             .state = state_,
                             .loss = sums_,
                             .scale = double{scale},
                             .skips = skips_spikes_});
    const int64_t stride = 2 * tensors_;
    keep_at_spike(stream, state_,
                  {.to = kept_squares_, .stride = stride, .from = squares, .n = tensors_});
    keep_at_spike(
        stream, state_,
        {.to = kept_squares_ + tensors_, .stride = stride, .from = squares_before_, .n = tensors_});
    keep_if_taken(stream, state_, squares_before_, squares, tensors_);
}

SpikeHistory Optimizer::spike_history() const {
    SpikeHistory history;
    copy_now(device_, &history, history_, sizeof history);
    return history;
}

void Optimizer::set_spike_history(const SpikeHistory& history) {
    copy_now(device_, history_, &history, sizeof history);
}

Optimizer::Growth Optimizer::grown_most(int64_t spike) const {
    const auto n = static_cast<size_t>(tensors_);
    std::vector<double> kept(2 * n);
    copy_now(device_, kept.data(), kept_squares_ + spike % 2 * 2 * tensors_,
             kept.size() * sizeof(double));
    Growth most;
    for (size_t i = 0; i < n; ++i)
        if (const double factor = std::sqrt(kept[i] / kept[n + i]);
            kept[n + i] > 0 && factor > most.factor)
            most = {names_[i], factor};
    return most;
}

void Optimizer::find_norm(Stream& stream, float scale, float clip) {
    add_partials(stream, sums_of_rank_ + sums_count_, partials_, partial_counts_);
    if (sums_ != sums_of_rank_) {
        const int64_t n = sums_count_ + tensors_;
        parameters_.gather_from_ranks(stream, gathered_, sums_of_rank_, n);
        add_rows(stream, sums_, gathered_, parameters_.sharding().world, n);
    }
    finish_norm(stream, state_, sums_ + sums_count_, tensors_, scale, clip);
}

void Optimizer::find_exact_norm(Stream& stream, float scale, float clip) {
    if (sums_ != sums_of_rank_) {
        parameters_.gather_from_ranks(stream, gathered_, sums_of_rank_, sums_count_);
        add_rows(stream, sums_, gathered_, parameters_.sharding().world, sums_count_);
    }
    parameters_.reduce_over_ranks(stream, grids_->sums(), grids_->layout().sums(), DType::int64);
    grids_->finish(stream, sums_ + sums_count_, &state_->overflow);
    copy(stream, &state_->lost, grids_->lost(), sizeof state_->lost);
    finish_norm(stream, state_, sums_ + sums_count_, tensors_, scale, clip);
}

StepState Optimizer::state() const {
    StepState state;
    copy_now(device_, &state, state_, sizeof state);
    return state;
}

void Optimizer::clear_overflow() {
    const StepState fresh;
    copy_now(device_, state_, &fresh, sizeof fresh);
    if (grids_) grids_->forget_not_finite();  // of later steps, which come again
}

std::string Optimizer::bad_parameter(const StepState& state) const {
    const int i = state.bad_segment;
    return i < 0 ? "" : names_[static_cast<size_t>(i)];
}

}  // namespace train_gpt
