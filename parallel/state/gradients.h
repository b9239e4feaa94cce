// The gradients of a training step: where kernels write them, and their sums over micro-batches and
// ranks, which are reduced bucket by bucket beside the model's work.
#pragma once
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "parallel/axes/tensor.h"
#include "parallel/mesh.h"
#include "parallel/state/exchange.h"
#include "parallel/state/gradient_sums.h"
#include "parallel/state/grids.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

/// In a training step the model calls begin_step(), and then for each micro-batch sink() for each
/// gradient that it is about to write, and ready() as soon as all gradients of a unit are written.
/// A bucket whose units are ready is reduced while the model computes the others: in the last
/// micro-batch, or with ZeRO-2 and 3 in each. finish() then waits for the sums, which are in the
/// buffers' pieces(). If sums are exact, each contribution to a gradient is rounded to its grid and
/// added to integers (Grids).
class Gradients {
  public:
    /// `buffers` and `grids` must live longer than the object. grids: null unless sums are exact.
    explicit Gradients(const ParameterBuffers& buffers, Grids* grids = nullptr);
    /// Sets the ranks that add up gradients, and registers buffers with them. All ranks call it;
    /// `mesh` and `exchange` must live longer than the object. `tensor`: the ranks that first add
    /// up gradients of whole tensors; null: this rank alone.
    void connect(const Mesh& mesh, Exchange& exchange, TensorGroup* tensor);

    /// `micro_batches`: how many this rank computes in the step; `most`: how many any rank does.
    void begin_step(int micro_batches, int most);
    /// Whether a micro-batch's gradients stand alone (Sharding).
    bool stand_alone() const { return buffers_.sharding().gradients_stand_alone(); }
    /// Whether the ranks reduce gradients, and acquire weights, together in each micro-batch of the
    /// step.
    bool reduces_each() const { return buffers_.sharding().reduces_each(); }
    /// With exact sums: while `only` is true, gradients are not added, and the ranks do not reduce
    /// them. Their largest elements are found, from which the first grids follow.
    void look_only(bool only) { looks_only_ = only; }
    /// Where a gradient of parameter i goes, for one kernel that writes it: the first one in a step
    /// overwrites, later ones add. Where gradients stand alone, the first one in a micro-batch
    /// overwrites, and gradients that were there before have been reduced for later work of the
    /// stream. −1: an empty sink.
    GradientSink sink(Stream& stream, int i);
    /// The bytes of a parameter's gradient.
    size_t bytes_of(int i) const {
        return static_cast<size_t>(buffers_.parameters()[static_cast<size_t>(i)].padded_numel()) *
               sizeof(float);
    }
    /// A sink for a kernel that computes few rows (GradientSink::exact), once in a micro-batch.
    GradientSink sink_of_rows(Stream& stream, int i);
    /// What has been written of a unit is one contribution to its gradients, and what will be
    /// written is another one: exact sums round each by itself.
    void end_contribution(Stream& stream, int unit);
    /// All gradients of a unit have been written for one more micro-batch. Where ranks reduce in
    /// each micro-batch, the units of a sweep (Parameter::sweep) become ready from the last unit
    /// down, and nothing writes gradients of another sweep, or for another micro-batch, between the
    /// first of them and the last.
    void ready(Stream& stream, int unit);
    /// Takes part with zeros, for a micro-batch that only other ranks have.
    void skip(Stream& stream, int unit);
    /// Whether the ranks' collectives run beside a backward pass. `last`: the pass of the last
    /// micro-batch.
    bool exchanges_beside(bool last) const {
        return has_shards() && exchange_->beside() && (last || reduces_each());
    }
    /// Calls `work` as soon as the sums of a bucket over all ranks are in its pieces: on a GPU with
    /// other ranks after the bucket's last reduction, concurrently with the backward pass of
    /// earlier blocks; else, and for a tied embedding's bucket always, in finish().
    void when_summed(std::function<void(Stream&, size_t bucket)> work) {
        when_summed_ = std::move(work);
    }
    /// With exact sums: the first micro-batch of this rank, counted from 0, whose gradient was not
    /// finite, in the first step that had such a gradient. steps_ago: how many steps have begun
    /// since. Call it after all work on the device.
    std::optional<int> first_not_finite(int64_t steps_ago = 0) const;
    /// After this, work on the stream finds the step's sums over all ranks in the buffers' pieces,
    /// and what when_summed() was given has been called for every bucket.
    void finish(Stream& stream);

  private:
    static constexpr int64_t most_micro_batches = int64_t{1} << 31;

    const std::vector<Bucket>& buckets() const { return buffers_.layout().buckets(); }
    void make_room(Stream& stream, int unit);
    void add_over_ranks(Stream& stream, const GradientSum& sum);
    void add_over_ends(Stream& stream);
    /// The sums of a bucket are complete only in finish().
    bool completes_late(size_t bucket) const { return ends_sum_ && ends_sum_->has(bucket); }
    /// How often units of a bucket become ready in a micro-batch, and in a step.
    int units_of(size_t b) const { return buckets()[b].last_unit - buckets()[b].first_unit + 1; }
    /// The number of what a unit writes now; later steps have greater numbers.
    int64_t number_of(int unit) const {
        return steps_ * most_micro_batches + ready_of_unit_[static_cast<size_t>(unit)];
    }
    int all_of(size_t b) const { return micro_batches_ * units_of(b); }
    bool has_shards() const { return groups_.contains(SumOver::shards); }
    /// A slot of the exchange for each bucket's sums over shards, for each bucket's sums over
    /// replicas, and for the sum over the pipeline's ends.
    int slot(SumOver over, size_t bucket = 0) const {
        return groups_.at(over).first_slot + static_cast<int>(bucket);
    }

    const ParameterBuffers& buffers_;
    Grids* grids_;
    bool looks_only_ = false;
    // The sums that each bucket goes through, in order; empty before connect().
    std::vector<std::vector<GradientSum>> sums_of_;
    std::optional<GradientSum> ends_sum_;  // of a tied embedding that another stage holds, too
    Exchange* exchange_ = nullptr;
    struct Group {
        Communicator* ranks = nullptr;
        int first_slot = 0;  // of the exchange
    };
    std::map<SumOver, Group> groups_;     // the groups with other ranks, but for SumOver::tensor
    TensorGroup* tensor_ = nullptr;       // tensor-parallel ranks; null where this rank is alone
    std::shared_ptr<void> registration_;  // of the buffers, with the group of shards
    std::function<void(Stream&, size_t)> when_summed_ = [](Stream&, size_t) {};
    std::vector<std::vector<int>> of_unit_;  // parameters
    std::vector<bool> written_;              // of each parameter: later gradients are added
    // With exact sums, of each parameter: it has a contribution, and later ones are added.
    std::vector<bool> summed_;
    // With exact sums: the parameter whose rows were added since the last end_contribution().
    std::optional<int> has_rows_;
    ExactRows rows_;
    std::vector<int> ready_;  // of each bucket: how often its units became ready in this step
    std::vector<int> ready_of_unit_;
    int64_t steps_ = 0;
    int micro_batches_ = 1;
    // Where ranks reduce in each micro-batch, of each bucket: its gradients are being written.
    std::vector<bool> being_written_;
    // Of each turn: the bucket that used the buffer last.
    std::optional<size_t> last_in_turn_[ParameterBuffers::turns];
};

}  // namespace train_gpt
