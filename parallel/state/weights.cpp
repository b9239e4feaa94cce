#include "parallel/state/weights.h"

#include <algorithm>
#include <string>

#include "device/trace.h"
#include "parallel/state/gradient_sums.h"

namespace train_gpt {

Weights::Weights(const ParameterBuffers& buffers)
    : buffers_(buffers),
      leases_(static_cast<size_t>(buffers.units())),
      gathered_(buckets().size(), buffers.holds_all_weights()) {}

void Weights::connect(const Mesh& mesh, Exchange& exchange) {
    const Sharding& sharding = buffers_.sharding();
    if (sharding.size == 1) return;
    group_ = &group_of(SumOver::shards, mesh, sharding);
    assert(group_->size() == sharding.size && group_->rank() == sharding.rank);
    exchange_ = &exchange;
    when_needed_ = !buffers_.holds_all_weights() || mesh.size(Axis::data) < mesh.layout().world();
    first_slot_ =
        exchange.add_slots(std::vector<std::string>(buckets().size(), mesh.name_of(*group_)));
}

UnitLease Weights::acquire(Stream& stream, int unit, For use) {
    const TraceSpan span(TraceTrack::host, "acquire unit", unit);
    acquired_ = unit;
    if (group_)
        for (size_t b = buffers_.first_bucket(unit);
             b < buckets().size() && buckets()[b].first_unit <= unit; ++b) {
            gather_unless_there(stream, b);
            assert(gathered_[b]);
            exchange_->hold(stream, slot(b));
        }
    const bool trains = use == For::training;
    if (trains) rounded_.round(stream, unit);
    return {buffers_, unit, leases_[static_cast<size_t>(unit)], trains ? &rounded_ : nullptr};
}

void Weights::prefetch(Stream& stream, int unit, int last) {
    if (!group_) return;
    const size_t now = buffers_.first_bucket(acquired_);
    const int step = unit <= last ? 1 : -1;
    while (unit != last && buffers_.first_bucket(unit) == now) unit += step;
    if (const size_t next = buffers_.first_bucket(unit); next != now)
        gather_unless_there(stream, next);
}

bool Weights::is_leased(size_t b) const {
    for (int unit = buckets()[b].first_unit; unit <= buckets()[b].last_unit; ++unit)
        if (leases_[static_cast<size_t>(unit)] > 0) return true;
    return false;
}

/// Gathers a bucket's weights, unless they are in its buffer, or with ZeRO-3, another bucket's,
/// which are in use, are there.
void Weights::gather_unless_there(Stream& stream, size_t b) {
    if (gathered_[b]) return;
    const int turn = buffers_.holds_all_weights() ? -1 : buffers_.turn_of_weights(b);
    for (size_t other = 0; turn >= 0 && other < buckets().size(); ++other) {
        if (other == b || !gathered_[other] || buffers_.turn_of_weights(other) != turn) continue;
        if (is_leased(other)) return;
        gathered_[other] = false;
    }
    gathered_[b] = true;
    gather_now(stream, b);
}

void Weights::finish(Stream& stream) {
    for (size_t b = 0; group_ && b < buckets().size(); ++b) exchange_->hold(stream, slot(b));
}

void Weights::gather(Stream& stream, int b) {
    assert(std::all_of(leases_.begin(), leases_.end(), [](int leases) { return leases == 0; }));
    if (!group_ || !buffers_.sharding().is_split()) return;
    const auto bucket = static_cast<size_t>(b);
    gathered_[bucket] = false;
    // The first buckets of blocks are as many as take turns.
    const bool is_first = buffers_.units() == 1 || bucket < buffers_.first_bucket(1) + 2;
    const bool has_place = !buffers_.holds_all_weights() && buffers_.turn_of_weights(bucket) < 0;
    if (!when_needed_ || has_place || is_first) gather_unless_there(stream, bucket);
}

void Weights::gather_now(Stream& stream, size_t b) {
    const Bucket& bucket = buckets()[b];
    for (int unit = bucket.first_unit; unit <= bucket.last_unit; ++unit) rounded_.forget(unit);
    exchange_->submit(stream, slot(b), [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "gather bucket", static_cast<int>(b));
        group_->all_gather(exchange, buffers_.bucket_weights(b), buffers_.owned_weights(bucket),
                           bucket.shard, buffers_.dtype());
    });
}

void Weights::gather_all(Stream& stream) {
    for (size_t b = 0; b < buckets().size(); ++b) gather(stream, static_cast<int>(b));
    gather_rest(stream);
}

void Weights::gather_rest(Stream& stream) {
    if (!group_ || !buffers_.holds_all_weights()) return;
    for (size_t b = 0; b < buckets().size(); ++b) {
        gather_unless_there(stream, b);
        exchange_->hold(stream, slot(b));
    }
}

}  // namespace train_gpt
