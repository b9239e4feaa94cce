#include "parallel/state/parameter_collectives.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <utility>

#include "device/copy.h"
#include "device/trace.h"
#include "kernels/convert.h"

namespace train_gpt {

ParameterCollectives::ParameterCollectives(const ParameterBuffers& buffers)
    : buffers_(buffers),
      leases_(static_cast<size_t>(buffers.units())),
      written_(buffers.parameters().size()),
      ready_(buckets().size()),
      being_written_(buckets().size()),
      gathered_(buckets().size()) {}

void ParameterCollectives::connect(const Mesh& mesh, StepClock* clock, TensorGroup* tensor) {
    const Sharding& sharding = buffers_.sharding();
    assert(mesh.layout().world() == sharding.world);
    if (sharding.world == 1) return;
    everyone_ = &mesh.everyone();
    if (sharding.tensors > 1) tensor_ = tensor;
    assert(bool(tensor_) == (sharding.tensors > 1));
    ends_ = tied_group(mesh, sharding);
    for (size_t i = 0; ends_ && i < buffers_.parameters().size(); ++i) {
        const Parameter& p = buffers_.parameters()[i];
        if (p.has_copy || !p.tied_to.empty()) tied_ = static_cast<int>(i);
    }
    if (sharding.size > 1) group_ = &summing_group(mesh, sharding);
    if (sharding.replicas > 1) replicas_ = &mesh.along(Axis::replica);
    std::vector<std::string> groups(static_cast<size_t>(tied_slot()) + 1, mesh.name_of(*everyone_));
    if (ends_) groups[static_cast<size_t>(tied_slot())] = mesh.name_of(*ends_);
    for (size_t b = 0; b < buckets().size(); ++b) {
        const auto is_of = [&](int slot, const Communicator* group) {
            if (group) groups[static_cast<size_t>(slot)] = mesh.name_of(*group);
        };
        is_of(reduce_slot(b), group_);
        is_of(replica_slot(b), replicas_);
        is_of(gather_slot(b), group_);
    }
    exchange_ = std::make_unique<Exchange>(buffers_.device(), true, std::move(groups), clock);
    if (!group_) return;
    assert(group_->size() == sharding.size && group_->rank() == sharding.rank);
    Stream stream(buffers_.device());
    registration_ = group_->register_buffers(stream, buffers_.exchanged());
}

Communicator& summing_group(const Mesh& mesh, const Sharding& sharding) {
    return sharding.zero == 0 ? mesh.over({Axis::data, Axis::context})
                              : mesh.over({Axis::shard, Axis::context});
}

Communicator* tied_group(const Mesh& mesh, const Sharding& sharding) {
    if (!sharding.tied_ends || sharding.pipelines == 1) return nullptr;
    return sharding.zero == 0 ? &mesh.over_ends({}) : &mesh.over_ends({Axis::shard, Axis::context});
}

UnitLease ParameterCollectives::acquire(Stream& stream, int unit) {
    const TraceSpan span(TraceTrack::host, "acquire unit", unit);
    acquired_ = unit;
    if (group_)
        for (size_t b = buffers_.first_bucket(unit);
             b < buckets().size() && buckets()[b].first_unit <= unit; ++b) {
            gather_unless_there(stream, b);
            assert(buffers_.holds_all_weights() || gathered_[b]);
            exchange_->hold(stream, gather_slot(b));
        }
    return {buffers_, unit, leases_[static_cast<size_t>(unit)]};
}

void ParameterCollectives::prefetch(Stream& stream, int unit, int last) {
    if (!group_ || buffers_.holds_all_weights()) return;
    const size_t now = buffers_.first_bucket(acquired_);
    const int step = unit <= last ? 1 : -1;
    while (unit != last && buffers_.first_bucket(unit) == now) unit += step;
    if (const size_t next = buffers_.first_bucket(unit); next != now)
        gather_unless_there(stream, next);
}

bool ParameterCollectives::is_leased(size_t b) const {
    for (int unit = buckets()[b].first_unit; unit <= buckets()[b].last_unit; ++unit)
        if (leases_[static_cast<size_t>(unit)] > 0) return true;
    return false;
}

/// With ZeRO-3: gathers a bucket's weights, unless they are in its buffer or another bucket's, which
/// are in use, are there.
void ParameterCollectives::gather_unless_there(Stream& stream, size_t b) {
    if (buffers_.holds_all_weights() || gathered_[b]) return;
    const int turn = buffers_.turn_of_weights(b);
    for (size_t other = 0; turn >= 0 && other < buckets().size(); ++other) {
        if (other == b || !gathered_[other] || buffers_.turn_of_weights(other) != turn) continue;
        if (is_leased(other)) return;
        gathered_[other] = false;
    }
    gathered_[b] = true;
    gather_now(stream, b);
}

void ParameterCollectives::begin_step(int micro_batches, int most) {
    micro_batches_ = reduces_every_micro_batch() ? most : micro_batches;
    std::fill(written_.begin(), written_.end(), false);
    std::fill(ready_.begin(), ready_.end(), 0);
    std::fill(being_written_.begin(), being_written_.end(), false);
}

/// Before gradients of a unit are written for a micro-batch: those that were written to the same
/// memory before may still be on their way.
void ParameterCollectives::make_room(Stream& stream, int unit) {
    if (!reduces_every_micro_batch() || !group_) return;
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit <= unit; ++b) {
        if (being_written_[b]) continue;
        being_written_[b] = true;
        size_t before = b;
        if (const int turn = buffers_.turn_of_gradients(b); turn >= 0)
            before = std::exchange(last_in_turn_[turn], b).value_or(b);
        assert(before == b || !being_written_[before]);
        exchange_->hold(stream, reduce_slot(before));
    }
}

GradientSink ParameterCollectives::sink(Stream& stream, int i) {
    if (i < 0) return {};
    make_room(stream, buffers_.parameters()[static_cast<size_t>(i)].unit);
    const bool accumulate = written_[static_cast<size_t>(i)];
    written_[static_cast<size_t>(i)] = true;
    return {buffers_.gradient_of_micro_batch(i), DType::fp32, accumulate};
}

void ParameterCollectives::gradients_ready(Stream& stream, int unit) {
    if (reduces_every_micro_batch())
        for (size_t i = 0; i < written_.size(); ++i)
            if (buffers_.parameters()[i].unit == unit) written_[i] = false;
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit <= unit; ++b) {
        ++ready_[b];
        if (ready_[b] % (reduces_every_micro_batch() ? units_of(b) : all_of(b)) != 0) continue;
        being_written_[b] = false;
        add_over_tensor(stream, b);
        if (group_) reduce(stream, b);
    }
}

void ParameterCollectives::add_over_tensor(Stream& stream, size_t b) {
    const Bucket& bucket = buckets()[b];
    const Range added = bucket.added_over_tensor;
    if (tensor_)
        tensor_->add_up_gradients(
            stream, buffers_.bucket_gradients(b) + (added.first - bucket.range.first), added.n);
}

void ParameterCollectives::reduce(Stream& stream, size_t b) {
    const Bucket& bucket = buckets()[b];
    const Range mine = buffers_.owned(bucket);
    const int64_t skipped = mine.first - bucket.range.first;
    float* const gradients = buffers_.bucket_gradients(b);
    const bool last = ready_[b] == all_of(b);
    exchange_->submit(stream, reduce_slot(b), [&](Stream& exchange) {
        if (tensor_) tensor_->hold_gradients(exchange);
        const TraceSpan span(TraceTrack::exchange, exchange, "reduce bucket", static_cast<int>(b));
        const DType dtype = buffers_.sharding().reduce_dtype;
        const bool rounded = dtype == DType::bf16;
        void* const all = rounded ? static_cast<void*>(buffers_.rounded_gradients()) : gradients;
        void* const sums = static_cast<char*>(all) + skipped * static_cast<int64_t>(size_of(dtype));
        if (rounded)
            round_to_bf16(exchange, buffers_.rounded_gradients(), gradients, bucket.range.n);
        if (buffers_.sharding().zero == 0)
            group_->all_reduce(exchange, all, bucket.range.n, dtype);
        else
            group_->reduce_scatter(exchange, sums, all, bucket.shard, dtype);
        if (reduces_every_micro_batch()) {
            float* const owned = buffers_.owned_gradients(bucket);
            widen(exchange, owned, sums, dtype, mine.n, ready_[b] > units_of(b));
        } else if (rounded && !replicas_) {
            widen(exchange, gradients + skipped, sums, dtype, mine.n, false);
        }
        if (last && !replicas_ && exchange_->beside() && !is_tied(b)) after_sums_(exchange, b);
    });
    if (last && replicas_) add_replicas(stream, b);
}

void ParameterCollectives::add_replicas(Stream& stream, size_t b) {
    const Bucket& bucket = buckets()[b];
    const Range mine = buffers_.owned(bucket);
    const int64_t skipped = mine.first - bucket.range.first;
    exchange_->submit(stream, replica_slot(b), [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "add replicas", static_cast<int>(b));
        float* const sums = reduces_every_micro_batch() ? buffers_.owned_gradients(bucket)
                                                        : buffers_.bucket_gradients(b) + skipped;
        if (buffers_.sharding().reduce_dtype == DType::bf16) {
            bf16* rounded = buffers_.rounded_gradients();
            // Where no other micro-batch was added, the group's sums are still there, rounded.
            if (reduces_every_micro_batch())
                round_to_bf16(exchange, rounded, sums, mine.n);
            else
                rounded += skipped;
            replicas_->all_reduce(exchange, rounded, mine.n, DType::bf16);
            widen(exchange, sums, rounded, DType::bf16, mine.n, false);
        } else {
            replicas_->all_reduce(exchange, sums, mine.n, DType::fp32);
        }
        if (exchange_->beside() && !is_tied(b)) after_sums_(exchange, b);
    });
}

void ParameterCollectives::skip_gradients(Stream& stream, int unit) {
    make_room(stream, unit);
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit == unit; ++b)
        clear(stream, buffers_.bucket_gradients(b),
              static_cast<size_t>(buckets()[b].range.n) * sizeof(float));
    gradients_ready(stream, unit);
}

bool ParameterCollectives::is_tied(size_t b) const {
    if (tied_ < 0) return false;
    const int unit = buffers_.parameters()[static_cast<size_t>(tied_)].unit;
    return buckets()[b].first_unit <= unit && unit <= buckets()[b].last_unit;
}

/// Adds the gradient sums of both holders of a tied embedding. Each element is one rank's of those
/// that split the state, so that two ranks contribute to its sum and the others zeros.
void ParameterCollectives::add_tied(Stream& stream) {
    exchange_->submit(stream, tied_slot(), [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "add tied embedding");
        const int64_t n = buffers_.parameters()[static_cast<size_t>(tied_)].padded_numel();
        float* const all = buffers_.gradient_of_micro_batch(tied_);
        const auto pieces = buffers_.pieces_of(tied_);
        const auto bytes = [](int64_t elements) {
            return static_cast<size_t>(elements) * sizeof(float);
        };
        // The pieces are within `all`, unless gradient sums have a buffer of their own.
        const bool apart = reduces_every_micro_batch();
        int64_t end = 0;
        for (const ParameterBuffers::Piece& piece : pieces) {
            clear(exchange, all + end, bytes(piece.range.first - end));
            end = piece.range.end();
            if (apart)
                copy(exchange, all + piece.range.first, piece.gradient, bytes(piece.range.n));
        }
        clear(exchange, all + end, bytes(n - end));
        ends_->all_reduce(exchange, all, n, DType::fp32);
        for (const ParameterBuffers::Piece& piece : pieces)
            if (apart)
                copy(exchange, piece.gradient, all + piece.range.first, bytes(piece.range.n));
    });
    exchange_->hold(stream, tied_slot());
}

void ParameterCollectives::finish_gradients(Stream& stream) {
    // Of a whole model this has happened: the embedding's gradient, its last, waits for a gather
    // after these sums. No stage but the first has such a gather.
    if (tensor_) tensor_->wait_gradients(stream);
    for (size_t b = 0; b < buckets().size(); ++b) {
        if (group_) exchange_->hold(stream, reduce_slot(b));
        if (replicas_) exchange_->hold(stream, replica_slot(b));
        if (group_) exchange_->hold(stream, gather_slot(b));
    }
    if (tied_ >= 0) add_tied(stream);
    for (size_t b = 0; b < buckets().size(); ++b)
        if (!group_ || !exchange_->beside() || is_tied(b)) after_sums_(stream, b);
}

void ParameterCollectives::gather(Stream& stream, int b) {
    assert(std::all_of(leases_.begin(), leases_.end(), [](int leases) { return leases == 0; }));
    if (!group_ || buffers_.sharding().zero == 0) return;
    const auto bucket = static_cast<size_t>(b);
    if (buffers_.holds_all_weights()) return gather_now(stream, bucket);
    // The first buckets of blocks are as many as take turns.
    gathered_[bucket] = false;
    const bool is_first = buffers_.units() == 1 || bucket < buffers_.first_bucket(1) + 2;
    if (buffers_.turn_of_weights(bucket) < 0 || is_first) gather_unless_there(stream, bucket);
}

void ParameterCollectives::gather_now(Stream& stream, size_t b) {
    const Bucket& bucket = buckets()[b];
    exchange_->submit(stream, gather_slot(b), [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "gather bucket", static_cast<int>(b));
        group_->all_gather(exchange, buffers_.bucket_weights(b), buffers_.owned_weights(bucket),
                           bucket.shard, buffers_.dtype());
    });
}

void ParameterCollectives::gather_all(Stream& stream) {
    for (size_t b = 0; b < buckets().size(); ++b) gather(stream, static_cast<int>(b));
}

void ParameterCollectives::gather_from_ranks(Stream& stream, double* out, const double* in,
                                             int64_t n) {
    assert(everyone_);
    exchange_->submit(stream, sum_slot(), [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "gather sums");
        everyone_->all_gather(exchange, out, in, n, DType::fp64);
    });
    exchange_->hold(stream, sum_slot());
}

}  // namespace train_gpt
