// What the routers of a model did in a training step: how often they chose each expert, over all
// micro-batches and ranks. The next step's balance follows from it, and metrics show it.
#pragma once
#include <cstdint>
#include <vector>

#include "base/tensor.h"
#include "device/memory.h"
#include "device/stream.h"
#include "kernels/experts/balance.h"
#include "model/spec.h"
#include "parallel/state/parameters.h"

namespace train_gpt {

/// The tokens over which a balance loss takes the experts' shares: each sequence, each micro-batch,
/// or a step, whose shares are taken from the step before.
enum class BalanceLevel : uint8_t { sequence, micro_batch, step };

/// Weights of the routers' auxiliary losses, which are means over tokens (kernels/experts/route.h).
/// They act through gradients alone: the losses that a run reports leave them out.
struct RouterLosses {
    float balance = 0;
    BalanceLevel level = BalanceLevel::step;
    float z_loss = 0;
};

/// The layers that have experts, in order: router r belongs to expert_layers(spec)[r].
std::vector<int> expert_layers(const DecoderSpec& spec);

/// The counts of a step on the host. Counts of experts are [routers, n_expert], in the order of the
/// layers that have experts.
struct RouterReport {
    int n_expert = 0;
    std::vector<int32_t> chosen = {};  // how often each expert was chosen
    std::vector<int32_t> mass = {};    // Σ of its probability, in a unit that is the same for all
    std::vector<float> biases = {};    // its selection bias in the step; empty if there are none
    // In how many sequences each router's probabilities were not finite
    std::vector<int32_t> not_finite = {};
    // How many routes of each router were dropped, if experts have a capacity; else empty
    std::vector<int32_t> dropped = {};

    int64_t routers() const { return n_expert > 0 ? std::ssize(chosen) / n_expert : 0; }
};

/// What a router did in a micro-batch of S sequences: counts int32 and probabilities fp32 [S, E].
struct RoutedBatch {
    Tensor counts, probabilities;
    int64_t tokens = 0;
    int64_t capacity = 0;  // routes that an expert takes of a sequence; 0: all
};

class RouterCounts {
  public:
    /// The counts of all the model's routers, whichever of them are on this rank. micro_batches: of
    /// the largest step, on all ranks. is_alone: this rank is the only one that counts. Takes
    /// nothing from the arena for a model without experts.
    RouterCounts(const DecoderSpec& spec, int64_t micro_batches, bool is_alone, Arena& arena);

    /// How many int32 all ranks add up in a step (add_over_ranks()).
    static int64_t totals(const DecoderSpec& spec);

    explicit operator bool() const { return routers_ > 0; }
    int64_t routers() const { return routers_; }

    void begin_step(Stream& stream);
    void add(Stream& stream, int router, const RoutedBatch& batch);
    /// Adds up the counts of all ranks. counts: whether this rank's counts are added. Only one of
    /// the ranks that route the same tokens adds its counts.
    void add_over_ranks(Stream& stream, ParameterStore& parameters, bool counts);
    /// After the step's update, of which this is the state.
    void finish_step(Stream& stream, const StepState* state);

    /// Each expert's share of router's choices in the last step, fp32 [1, E]; before the first one
    /// 1/E.
    Tensor load(int router) const { return load_.row_range(router, 1); }
    /// How often the router chose each expert in this step, int32 [1, E].
    Tensor chosen(int router) const { return totals_.row_range(router, 1); }
    /// How many sequences in this step had probabilities of the router that are not finite, int32
    /// [1, 1].
    Tensor not_finite(int router) const;
    /// How many routes the router's experts did not take in this step, int32 [1, 1]; absent without
    /// a capacity.
    Tensor dropped(int router) const;
    /// The memory that keeps the router's selection bias in fp32, [1, E].
    Tensor bias(int router) const { return biases_.row_range(router, 1); }

    /// The counts from which the load follows, for checkpoints. After all work on the device.
    std::vector<int32_t> last_counts() const;
    void set_last_counts(const std::vector<int32_t>& counts);
    /// The device's memory of the last counts, int32 [routers, n_expert].
    const Tensor& last_on_device() const { return last_; }

    /// Submits the copy of the counts to memory on the host, `place` 0 or 1. report() is what has
    /// arrived there.
    void copy_to_host(Stream& stream, int place);
    RouterReport report(int place) const;

  private:
    int64_t routers_ = 0, n_expert_ = 0;
    bool has_bias_ = false, has_capacity_ = false;
    float unit_ = 1;  // of mass
    Device device_;
    // int32: [2·routers, E], chosen and mass; not_finite and, with a capacity, dropped [routers],
    // together in whole rows
    Tensor totals_;
    Tensor last_, load_;          // of the last step: int32 and fp32 [routers, E]
    Tensor biases_, all_biases_;  // fp32 [routers, E]: −∞ of routers on other ranks; and of all
    Tensor host_totals_, host_biases_;  // of two steps
};

}  // namespace train_gpt
