// What ranks exchange of a model's parameters in a training step: gradients are reduced and weights
// gathered bucket by bucket, beside the model's work. Offload and packed copies will hang on the
// same calls: acquire(), release() and gradients_ready().
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device/device.h"
#include "parallel/exchange.h"
#include "parallel/parameter_buffers.h"

namespace train_gpt {

/// In a training step the model calls begin_micro_batch(), then acquire() and release() around each
/// use of a unit's weights, begin_backward(), and gradients_ready() as soon as all gradients of a
/// unit are written. A bucket whose units are ready is reduced while the model computes the others.
/// finish_gradients() then waits for the sums, the optimizer updates the buffers' pieces(), and
/// gather() collects each bucket's weights, for which the next acquire() waits.
class ParameterCollectives {
  public:
    /// `buffers` must live longer than the object.
    explicit ParameterCollectives(const ParameterBuffers& buffers);
    /// With whom buffers with sharding.size > 1 are exchanged. What the model's stream waits for
    /// counts as communication in `clock`.
    void connect(Communicator& communicator, StepClock* clock = nullptr);

    void acquire(Stream& stream, int unit);
    void release(int /*unit*/) {}

    /// Where the gradient of parameter i goes in the present micro-batch.
    GradientSink sink(int i) const {
        return {buffers_.gradient_of_micro_batch(i), DType::fp32,
                !first_micro_batch_ && buffers_.sharding().zero < 2};
    }
    /// first, last: of the micro-batches that this rank computes in the step.
    void begin_micro_batch(bool first, bool last) {
        first_micro_batch_ = first;
        last_micro_batch_ = last;
    }
    void begin_backward(Stream& stream);
    /// All gradients of a unit have been written for this micro-batch. Units become ready from the
    /// last one down.
    void gradients_ready(Stream& stream, int unit);
    /// In place of a micro-batch, on a rank that has one less than others: takes part in what they
    /// reduce in it.
    void skip_micro_batch(Stream& stream);
    /// Later work of the stream finds the gradient sums of the step, over all ranks, in the pieces
    /// of the buffers, and what after_sums() was given done for every bucket.
    void finish_gradients(Stream& stream);
    /// Does `work` as soon as the gradient sums of a bucket are in its pieces: on a GPU with other
    /// ranks behind the bucket's reduction, beside the backward pass of the blocks before it.
    void after_sums(std::function<void(Stream&, size_t bucket)> work) {
        after_sums_ = std::move(work);
    }
    /// Collects the weights of a bucket from the ranks that have updated them.
    void gather(Stream& stream, int bucket);
    void gather_all(Stream& stream);
    /// data[n] becomes its sum over ranks, for later work of the stream.
    void sum_over_ranks(Stream& stream, double* data, int64_t n);

  private:
    const std::vector<Bucket>& buckets() const { return buffers_.layout().buckets(); }
    void reduce(Stream& stream, size_t bucket);
    // What is waited for each by itself: every bucket's reduction, every bucket's weights, sums.
    int reduce_slot(size_t bucket) const { return static_cast<int>(bucket); }
    int gather_slot(size_t bucket) const { return static_cast<int>(buckets().size() + bucket); }
    int sum_slot() const { return 2 * static_cast<int>(buckets().size()); }

    const ParameterBuffers& buffers_;
    std::unique_ptr<Exchange> exchange_;  // null in a group of one
    std::function<void(Stream&, size_t)> after_sums_ = [](Stream&, size_t) {};
    std::vector<int> units_missing_;  // of each bucket, in this micro-batch
    bool first_micro_batch_ = true, last_micro_batch_ = true;
};

}  // namespace train_gpt
