// What a model and its ranks do with a model's parameters in a training step: weights are leased to
// the model, gradients are reduced and weights gathered bucket by bucket, beside the model's work.
// Offload and packed copies will hang on the same calls: acquire(), prefetch() and gradients_ready().
#pragma once
#include <cassert>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/device.h"
#include "parallel/axes/tensor_group.h"
#include "parallel/mesh.h"
#include "parallel/state/exchange.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

/// The group that reduces and gathers a bucket.
Communicator& summing_group(const Mesh& mesh, const Sharding& sharding);
/// The group that adds up the gradients of an embedding which the first and the last pipeline rank
/// hold; null where there is none.
Communicator* tied_group(const Mesh& mesh, const Sharding& sharding);

/// The weights of a unit, for as long as the object lives; a default one has none.
class UnitLease {
  public:
    UnitLease() = default;
    UnitLease(const ParameterBuffers& buffers, int unit, int& leases)
        : buffers_(&buffers), unit_(unit), leases_(&leases) {
        ++leases;
    }
    ~UnitLease() {
        if (leases_) --*leases_;
    }
    UnitLease(const UnitLease&) = delete;
    UnitLease& operator=(const UnitLease&) = delete;

    /// Weight of parameter i, which is of this unit, in the compute dtype and padded shape. −1: none.
    Tensor weight(int i) const {
        if (i < 0) return {};
        assert(buffers_ && buffers_->parameters()[static_cast<size_t>(i)].unit == unit_);
        return buffers_->weight(i);
    }

  private:
    const ParameterBuffers* buffers_ = nullptr;
    int unit_ = -1;
    int* leases_ = nullptr;
};

/// In a training step the model calls begin_step(), and then for each micro-batch acquire() around
/// each use of a unit's weights, sink() for each gradient that it is about to write, and
/// gradients_ready() as soon as all gradients of a unit are written. A bucket whose units are ready
/// is reduced while the model computes the others: in the last micro-batch, or from ZeRO-2 on in
/// each. finish_gradients() then waits for the sums, the optimizer updates the buffers' pieces(),
/// and gather() collects each bucket's weights, for which the next acquire() waits. With ZeRO-3,
/// acquire() and prefetch() gather what is not in its buffer any more.
class ParameterCollectives {
  public:
    /// `buffers` must live longer than the object.
    explicit ParameterCollectives(const ParameterBuffers& buffers);
    /// The ranks with which buffers are exchanged, and registered. What the model's stream waits for
    /// counts as communication in `clock`. All ranks call it; `mesh` must live longer than the object.
    /// `tensor`: the ranks that add up gradients of whole tensors before; null: this one alone.
    void connect(const Mesh& mesh, StepClock* clock = nullptr, TensorGroup* tensor = nullptr);

    /// Later work of the stream finds the weights of the unit in place while the lease lives.
    UnitLease acquire(Stream& stream, int unit);
    /// The pass acquires the units from `unit` to `last` next, which is the lower number in a backward
    /// pass: with ZeRO-3 the first bucket of theirs that is not the one in use is gathered.
    void prefetch(Stream& stream, int unit, int last);

    /// `micro_batches`: how many this rank computes in the step; `most`: how many any rank does.
    void begin_step(int micro_batches, int most);
    /// Whether gradients are reduced, and weights acquired, together with the other ranks in each
    /// micro-batch of the step.
    bool reduces_every_micro_batch() const { return buffers_.sharding().zero >= 2; }
    /// Where a gradient of parameter i goes, for one kernel that writes it: the first one in a step
    /// (from ZeRO-2 on: in a micro-batch) overwrites, later ones add. −1: an empty sink. From ZeRO-2 on
    /// it goes where others were, so that later work of the stream finds those reduced.
    GradientSink sink(Stream& stream, int i);
    /// All gradients of a unit have been written for one more micro-batch. From ZeRO-2 on the units of
    /// a sweep (Parameter::sweep) become ready from its last one down, and nothing writes gradients of
    /// another sweep, or for another micro-batch, between the first of them and the last.
    void gradients_ready(Stream& stream, int unit);
    /// The same, with zeros, for a micro-batch that only other ranks have.
    void skip_gradients(Stream& stream, int unit);
    /// Whether the ranks' collectives run beside a backward pass, that of the last micro-batch or
    /// another.
    bool exchanges_beside(bool last) const {
        return group_ && exchange_->beside() && (last || reduces_every_micro_batch());
    }
    /// After this, work on the stream finds the step's gradient sums over all ranks in the buffers'
    /// pieces, and the work given to after_sums() done for every bucket.
    void finish_gradients(Stream& stream);
    /// Does `work` as soon as the gradient sums of a bucket are in its pieces: on a GPU with other
    /// ranks after the bucket's reduction, concurrently with the backward pass of earlier blocks.
    void after_sums(std::function<void(Stream&, size_t bucket)> work) {
        after_sums_ = std::move(work);
    }
    /// Collects the weights of a bucket from the ranks that have updated them; with ZeRO-3, only of
    /// those that the next forward pass begins with or that have a place of their own.
    void gather(Stream& stream, int bucket);
    void gather_all(Stream& stream);
    /// out [world·n] = in[n] of all ranks of the run, by rank, for later work of the stream. Not in a
    /// world of one.
    void gather_from_ranks(Stream& stream, double* out, const double* in, int64_t n);

  private:
    const std::vector<Bucket>& buckets() const { return buffers_.layout().buckets(); }
    void make_room(Stream& stream, int unit);
    void add_over_tensor(Stream& stream, size_t bucket);
    void reduce(Stream& stream, size_t bucket);
    /// Adds the sums of all groups that hold the same shards, in the order of the groups.
    void add_replicas(Stream& stream, size_t bucket);
    /// Of the bucket of a tied embedding the sums are complete only after add_tied().
    bool is_tied(size_t b) const;
    void add_tied(Stream& stream);
    // ZeRO-3
    bool is_leased(size_t bucket) const;
    void gather_unless_there(Stream& stream, size_t bucket);
    void gather_now(Stream& stream, size_t bucket);
    /// How often units of a bucket become ready in a micro-batch, and in a step.
    int units_of(size_t b) const { return buckets()[b].last_unit - buckets()[b].first_unit + 1; }
    int all_of(size_t b) const { return micro_batches_ * units_of(b); }
    // What is waited for each by itself: every bucket's reduction, that over replicas, every bucket's
    // weights, sums.
    int reduce_slot(size_t bucket) const { return static_cast<int>(bucket); }
    int replica_slot(size_t bucket) const { return static_cast<int>(buckets().size() + bucket); }
    int gather_slot(size_t bucket) const { return static_cast<int>(2 * buckets().size() + bucket); }
    int sum_slot() const { return 3 * static_cast<int>(buckets().size()); }
    int tied_slot() const { return sum_slot() + 1; }

    const ParameterBuffers& buffers_;
    std::unique_ptr<Exchange> exchange_;  // null in a world of one
    // The ranks that the state is split over, those that hold the same shards, and all ranks; null
    // where there is nothing to exchange with them.
    Communicator *group_ = nullptr, *replicas_ = nullptr, *everyone_ = nullptr;
    Communicator* ends_ = nullptr;        // tied_group()
    int tied_ = -1;                       // this rank's parameter that those share
    TensorGroup* tensor_ = nullptr;       // null: no other tensor-parallel ranks
    std::shared_ptr<void> registration_;  // of the buffers, with the group
    std::function<void(Stream&, size_t)> after_sums_ = [](Stream&, size_t) {};
    std::vector<int> leases_;    // of each unit, how many live
    std::vector<bool> written_;  // of each parameter: later gradients are added
    std::vector<int> ready_;     // of each bucket: how often its units became ready in this step
    int micro_batches_ = 1;
    // From ZeRO-2 on, of each bucket: its gradients are being written; and of each turn, the bucket
    // that was last.
    std::vector<bool> being_written_;
    std::optional<size_t> last_in_turn_[ParameterBuffers::turns];
    std::vector<bool> gathered_;  // of each bucket: its weights are in its buffer
    int acquired_ = 0;            // the unit that was acquired last
};

}  // namespace train_gpt
