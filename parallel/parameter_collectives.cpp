#include "parallel/parameter_collectives.h"

#include <algorithm>
#include <cassert>

#include "device/copy.h"
#include "kernels/convert.h"

namespace train_gpt {

ParameterCollectives::ParameterCollectives(const ParameterBuffers& buffers)
    : buffers_(buffers),
      leases_(static_cast<size_t>(buffers.units())),
      written_(buffers.parameters().size()),
      ready_(buckets().size()) {}

void ParameterCollectives::connect(const Mesh& mesh, StepClock* clock) {
    const Sharding& sharding = buffers_.sharding();
    assert(mesh.layout().world() == sharding.world);
    if (sharding.world == 1) return;
    exchange_ = std::make_unique<Exchange>(buffers_.device(), true, sum_slot() + 1, clock);
    everyone_ = &mesh.everyone();
    if (sharding.size == 1) return;
    group_ = &mesh.over({Axis::data, Axis::context});
    assert(group_->size() == sharding.size && group_->rank() == sharding.rank);
    Stream stream(buffers_.device());
    registration_ = group_->register_buffers(stream, buffers_.exchanged());
}

UnitLease ParameterCollectives::acquire(Stream& stream, int unit) {
    if (exchange_)
        for (size_t b = buffers_.first_bucket(unit);
             b < buckets().size() && buckets()[b].first_unit <= unit; ++b)
            exchange_->hold(stream, gather_slot(b));
    return {buffers_, unit, leases_[static_cast<size_t>(unit)]};
}

void ParameterCollectives::begin_step(int micro_batches, int most) {
    micro_batches_ = reduces_every_micro_batch() ? most : micro_batches;
    std::fill(written_.begin(), written_.end(), false);
    std::fill(ready_.begin(), ready_.end(), 0);
    units_ready_ = 0;
}

void ParameterCollectives::begin_backward(Stream& stream) {
    if (!reduces_every_micro_batch() || !group_ || units_ready_ > 0) return;
    // Gradients of the micro-batch before may still be on their way from where these will be
    // written.
    for (size_t b = 0; b < buckets().size(); ++b) exchange_->hold(stream, reduce_slot(b));
}

GradientSink ParameterCollectives::sink(int i) {
    if (i < 0) return {};
    const bool accumulate = written_[static_cast<size_t>(i)];
    written_[static_cast<size_t>(i)] = true;
    return {buffers_.gradient_of_micro_batch(i), DType::fp32, accumulate};
}

void ParameterCollectives::gradients_ready(Stream& stream, int unit) {
    units_ready_ = (units_ready_ + 1) % buffers_.units();
    if (reduces_every_micro_batch())
        for (size_t i = 0; i < written_.size(); ++i)
            if (buffers_.parameters()[i].unit == unit) written_[i] = false;
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit <= unit; ++b) {
        ++ready_[b];
        if (group_ && ready_[b] % (reduces_every_micro_batch() ? units_of(b) : all_of(b)) == 0)
            reduce(stream, b);
    }
}

void ParameterCollectives::reduce(Stream& stream, size_t b) {
    const Bucket& bucket = buckets()[b];
    const Range mine = buffers_.owned(bucket);
    const int64_t skipped = mine.first - bucket.range.first;
    float* const gradients = buffers_.bucket_gradients(b);
    exchange_->submit(stream, reduce_slot(b), [&](Stream& exchange) {
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
        if (reduces_every_micro_batch())
            widen(exchange, buffers_.owned_gradients(bucket), sums, dtype, mine.n,
                  ready_[b] > units_of(b));
        else if (rounded)
            widen(exchange, gradients + skipped, sums, dtype, mine.n, false);
        if (ready_[b] == all_of(b) && exchange_->beside()) after_sums_(exchange, b);
    });
    // The next bucket's gradients are written where those of the one before this were.
    if (reduces_every_micro_batch() && b + 1 < buckets().size() && bucket.first_unit > 0)
        exchange_->hold(stream, reduce_slot(b + 1));
}

void ParameterCollectives::skip_micro_batch(Stream& stream) {
    if (!reduces_every_micro_batch()) return;
    begin_backward(stream);
    for (int unit = buffers_.units() - 1; unit >= 0; --unit) {
        for (size_t b = buffers_.first_bucket(unit);
             b < buckets().size() && buckets()[b].first_unit == unit; ++b)
            clear(stream, buffers_.bucket_gradients(b),
                  static_cast<size_t>(buckets()[b].range.n) * sizeof(float));
        gradients_ready(stream, unit);
    }
}

void ParameterCollectives::finish_gradients(Stream& stream) {
    for (size_t b = 0; b < buckets().size(); ++b) {
        if (group_) exchange_->hold(stream, reduce_slot(b));
        if (!group_ || !exchange_->beside()) after_sums_(stream, b);
    }
}

void ParameterCollectives::gather(Stream& stream, int b) {
    assert(std::all_of(leases_.begin(), leases_.end(), [](int leases) { return leases == 0; }));
    if (!group_ || buffers_.sharding().zero == 0) return;
    const Bucket& bucket = buckets()[static_cast<size_t>(b)];
    exchange_->submit(stream, gather_slot(static_cast<size_t>(b)), [&](Stream& exchange) {
        group_->all_gather(exchange, buffers_.weight_address(bucket.range.first),
                           buffers_.weight_address(buffers_.owned(bucket).first), bucket.shard,
                           buffers_.dtype());
    });
}

void ParameterCollectives::gather_all(Stream& stream) {
    for (size_t b = 0; b < buckets().size(); ++b) gather(stream, static_cast<int>(b));
}

void ParameterCollectives::gather_from_ranks(Stream& stream, double* out, const double* in,
                                             int64_t n) {
    assert(everyone_);
    exchange_->submit(stream, sum_slot(), [&](Stream& exchange) {
        everyone_->all_gather(exchange, out, in, n, DType::fp64);
    });
    exchange_->hold(stream, sum_slot());
}

}  // namespace train_gpt
