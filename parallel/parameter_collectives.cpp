#include "parallel/parameter_collectives.h"

#include <cassert>

#include "device/copy.h"
#include "kernels/convert.h"

namespace train_gpt {

ParameterCollectives::ParameterCollectives(const ParameterBuffers& buffers)
    : buffers_(buffers), units_missing_(buckets().size()) {}

void ParameterCollectives::connect(Communicator& communicator, StepClock* clock) {
    assert(communicator.size() == buffers_.sharding().size &&
           communicator.rank() == buffers_.sharding().rank);
    if (communicator.size() > 1)
        exchange_ =
            std::make_unique<Exchange>(buffers_.device(), communicator, sum_slot() + 1, clock);
}

void ParameterCollectives::acquire(Stream& stream, int unit) {
    if (!exchange_) return;
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit <= unit; ++b)
        exchange_->hold(stream, gather_slot(b));
}

void ParameterCollectives::begin_backward(Stream& stream) {
    for (size_t b = 0; b < units_missing_.size(); ++b) {
        const Bucket& bucket = buckets()[b];
        units_missing_[b] = bucket.last_unit - bucket.first_unit + 1;
        // Gradients of the micro-batch before may still be on their way from where these will be
        // written.
        if (buffers_.sharding().zero == 2 && exchange_) exchange_->hold(stream, reduce_slot(b));
    }
}

void ParameterCollectives::gradients_ready(Stream& stream, int unit) {
    if (!exchange_ || (buffers_.sharding().zero < 2 && !last_micro_batch_)) return;
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit <= unit; ++b)
        if (--units_missing_[b] == 0) reduce(stream, b);
}

void ParameterCollectives::reduce(Stream& stream, size_t b) {
    const Bucket& bucket = buckets()[b];
    const Range mine = buffers_.owned(bucket);
    const int64_t skipped = mine.first - bucket.range.first;
    float* const gradients = buffers_.bucket_gradients(b);
    exchange_->submit(stream, reduce_slot(b), [&](Stream& exchange) {
        Communicator& group = exchange_->communicator();
        const DType dtype = buffers_.sharding().reduce_dtype;
        const bool rounded = dtype == DType::bf16;
        void* const all = rounded ? static_cast<void*>(buffers_.rounded_gradients()) : gradients;
        void* const sums = static_cast<char*>(all) + skipped * static_cast<int64_t>(size_of(dtype));
        if (rounded)
            round_to_bf16(exchange, buffers_.rounded_gradients(), gradients, bucket.range.n);
        if (buffers_.sharding().zero == 0)
            group.all_reduce(exchange, all, bucket.range.n, dtype);
        else
            group.reduce_scatter(exchange, sums, all, bucket.shard, dtype);
        if (buffers_.sharding().zero == 2)
            widen(exchange, buffers_.owned_gradients(bucket), sums, dtype, mine.n,
                  !first_micro_batch_);
        else if (rounded)
            widen(exchange, gradients + skipped, sums, dtype, mine.n, false);
        if (last_micro_batch_ && exchange_->beside()) after_sums_(exchange, b);
    });
    // The memory that the bucket after the next one writes to was last used by the one before this.
    if (buffers_.sharding().zero == 2 && b + 1 < buckets().size() && bucket.first_unit > 0)
        exchange_->hold(stream, reduce_slot(b + 1));
}

void ParameterCollectives::skip_micro_batch(Stream& stream) {
    if (buffers_.sharding().zero < 2) return;
    first_micro_batch_ = false;
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
        if (exchange_) exchange_->hold(stream, reduce_slot(b));
        if (!exchange_ || !exchange_->beside()) after_sums_(stream, b);
    }
}

void ParameterCollectives::gather(Stream& stream, int b) {
    if (!exchange_ || buffers_.sharding().zero == 0) return;
    const Bucket& bucket = buckets()[static_cast<size_t>(b)];
    exchange_->submit(stream, gather_slot(static_cast<size_t>(b)), [&](Stream& exchange) {
        exchange_->communicator().all_gather(exchange, buffers_.weight_address(bucket.range.first),
                                             buffers_.weight_address(buffers_.owned(bucket).first),
                                             bucket.shard, buffers_.dtype());
    });
}

void ParameterCollectives::gather_all(Stream& stream) {
    for (size_t b = 0; b < buckets().size(); ++b) gather(stream, static_cast<int>(b));
}

void ParameterCollectives::sum_over_ranks(Stream& stream, double* data, int64_t n) {
    if (!exchange_) return;
    exchange_->submit(stream, sum_slot(), [&](Stream& exchange) {
        exchange_->communicator().all_reduce(exchange, data, n, DType::fp64);
    });
    exchange_->hold(stream, sum_slot());
}

}  // namespace train_gpt
