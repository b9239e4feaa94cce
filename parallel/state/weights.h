// The weights of a training run as a model uses them: leased unit by unit, gathered bucket by
// bucket beside the model's work. acquire() also makes the codes of products in fp8
// (rounded_weights.h).
#pragma once
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "parallel/mesh.h"
#include "parallel/state/exchange.h"
#include "parallel/state/parameter_buffers.h"
#include "parallel/state/rounded_weights.h"

namespace train_gpt {

/// The weights of a unit, for as long as the object lives; a default one has none.
class UnitLease {
  public:
    UnitLease() = default;
    UnitLease(const ParameterBuffers& buffers, int unit, int& leases,
              const RoundedWeights* rounded = nullptr)
        : buffers_(&buffers), unit_(unit), leases_(&leases), rounded_(rounded) {
        ++leases;
    }
    ~UnitLease() {
        if (leases_) --*leases_;
    }
    UnitLease(const UnitLease&) = delete;
    UnitLease& operator=(const UnitLease&) = delete;

    explicit operator bool() const { return buffers_ != nullptr; }
    /// The weight of parameter i of this unit, in the compute dtype and padded shape. −1: none.
    Tensor weight(int i) const {
        if (i < 0) return {};
        assert(buffers_ && buffers_->parameters()[static_cast<size_t>(i)].unit == unit_);
        return buffers_->weight(i);
    }
    /// Weight of parameter i as products read it: in fp8 if the lease is for a training pass and
    /// the product is in fp8.
    Operand operand(int i) const {
        return rounded_ ? rounded_->operand(i, weight(i)) : Operand(weight(i));
    }

  private:
    const ParameterBuffers* buffers_ = nullptr;
    int unit_ = -1;
    int* leases_ = nullptr;
    const RoundedWeights* rounded_ = nullptr;
};

/// The model calls acquire() around each use of a unit's weights. After an update, gather()
/// collects each bucket's weights, for which the next acquire() waits. acquire() and prefetch()
/// submit two kinds of gathers later: with ZeRO-3, the gathers of buckets that have no memory yet;
/// and on a mesh with other axes than data, all gathers but the first. Collectives of a GPU's
/// communicators start in the order in which they are submitted. On such a mesh the next forward
/// pass also exchanges data along other axes, which must not wait for the weights of all layers.
class Weights {
  public:
    /// `buffers` must live longer than the object.
    explicit Weights(const ParameterBuffers& buffers);
    /// The ranks that gather weights. All ranks call it; `mesh` and `exchange` must live longer
    /// than the object.
    void connect(const Mesh& mesh, Exchange& exchange);

    /// The products of training passes that are in fp8, by parameter (RoundedWeights).
    void use_fp8(std::vector<const ProductScales*> scales, Arena& arena) {
        rounded_ = RoundedWeights(buffers_, std::move(scales), arena);
    }
    /// Says that another step begins, with other weights.
    void begin_step() { rounded_.forget_all(); }

    /// What a lease is for: training passes may compute products in fp8.
    enum class For : uint8_t { training, other };
    /// Later work of the stream finds the weights of the unit in place while the lease lives.
    UnitLease acquire(Stream& stream, int unit, For use = For::other);
    /// The pass acquires the units from `unit` to `last` next; in a backward pass `last` is the
    /// lower number. Gathers the first bucket of these units that is not in use, unless its weights
    /// are there.
    void prefetch(Stream& stream, int unit, int last);

    /// Later work of the stream may change the weights that this rank updates: no gather reads them
    /// any more.
    void finish(Stream& stream);
    /// Collects the weights of a bucket from the ranks that have updated them, now or when they are
    /// needed. Buckets that the next forward pass begins with are gathered now. With ZeRO-3, so are
    /// buckets that have a place of their own.
    void gather(Stream& stream, int bucket);
    void gather_all(Stream& stream);
    /// Later work of the stream finds all weights for which there is memory in place.
    void gather_rest(Stream& stream);

  private:
    const std::vector<Bucket>& buckets() const { return buffers_.layout().buckets(); }
    bool is_leased(size_t bucket) const;
    void gather_unless_there(Stream& stream, size_t bucket);
    void gather_now(Stream& stream, size_t bucket);
    int slot(size_t bucket) const { return first_slot_ + static_cast<int>(bucket); }

    const ParameterBuffers& buffers_;
    RoundedWeights rounded_;
    Exchange* exchange_ = nullptr;
    int first_slot_ = 0;             // of the buckets' gathers
    Communicator* group_ = nullptr;  // the ranks that share the state; null: this rank alone
    std::vector<int> leases_;        // of each unit, how many live
    bool when_needed_ = false;       // gathers are submitted, at the earliest
    std::vector<bool> gathered_;     // of each bucket: its weights are, or will be, in its buffer
    int acquired_ = 0;               // the unit that was acquired last
};

}  // namespace train_gpt
