// The optimizer over this rank's share of a store's parameters: global gradient norm, clipping and
// update, each in one pass. AdamW updates all elements, or Muon the matrices of blocks and AdamW
// the rest.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/spikes.h"
#include "model/router_counts.h"
#include "parallel/state/parameters.h"
#include "parallel/state/state_copy.h"
#include "parallel/state/state_leases.h"
#include "training/config/config.h"
#include "training/muon.h"

namespace train_gpt {

/// The optimizer's slots, with which a store is made: AdamW's moments m and v. A matrix that Muon
/// updates has m alone, its momentum. In 8 bits there are also slots for the scales of m and v.
std::vector<OptimizerSlot> optimizer_slots(StateDType dtype = StateDType::fp32);

struct OptimizerOptions {
    /// How many other sums over a step the ranks add up. The first one is the loss, in which the
    /// optimizer looks for spikes.
    int64_t sums = 0;
    bool skips_spikes = false;  // changes nothing at a spike
    /// If pipeline ranks hold parts of a model, the names of all of the model's tensors, by
    /// Parameter::id. Empty: the store holds all tensors.
    std::vector<std::string> names = {};
    /// With exact sums: how many gradients each sum of a step adds up (contributions_of_step()).
    int64_t contributions = 1;
    std::optional<MuonOptions> muon = {};  // set if the store has whole matrices
    /// From whose counts selection biases are updated; null if there are none.
    const RouterCounts* routers = nullptr;
};

/// The constants of a step.
struct OptimizerStep {
    AdamWStep adamw = {};
    MuonStep muon = {};
    float balance_rate = 0;  // of selection biases
};

/// Nothing if the optimizer is AdamW alone.
std::optional<MuonOptions> muon_options(const Config& config);
/// The rate of matrices that Muon updates, where the others have this rate.
double matrix_learning_rate(const Config& config, double rate);
/// The constants for the update of a step counted from 0, with this learning rate.
OptimizerStep optimizer_step(const Config& config, int64_t step, double rate);

class Optimizer {
  public:
    Optimizer(ParameterStore& parameters, Arena& arena, OptimizerOptions options = {});

    /// A step begins. Gradients have not been added yet.
    void begin_step(Stream& stream);

    /// This rank's sums over a step [sums], in the device's memory. The step's kernels add to them.
    double* sums_of_rank() { return sums_of_rank_; }
    /// The sums over all ranks [sums]. Valid after update().
    const double* sums() const { return sums_; }
    size_t sums_bytes() const { return static_cast<size_t>(sums_count_) * sizeof(double); }

    int64_t contributions() const { return contributions_; }

    /// Updates the weights once, from the gradient sums in the store.
    ///
    ///   scale        1 / valid target tokens of the step
    ///   clip         the largest global norm of the scaled gradient; 0: no clipping
    ///   state        of both parts of args: update() fills it in
    ///
    /// If the norm is not finite, this call and all later ones change nothing. After the update,
    /// the ranks gather the weights that other ranks have updated.
    ///
    /// If exact sums overflow, this call changes nothing but the grids, and later ones change
    /// nothing until clear_overflow().
    void update(Stream& stream, OptimizerStep args, float scale, float clip);

    /// Makes later work of the stream, which reads state where the buffers have it, wait until the
    /// updates have written it.
    void settle_state(Stream& stream) const { leases_.settle(stream); }
    /// From now on, updates wait until the copy has read what they change.
    void wait_for(const StateCopy& copy) { state_copy_ = &copy; }

    /// The scratch memory that an update needs.
    size_t scratch_bytes(const Stream& stream) const;
    /// Runs the matrix products of an update once.
    void warm_up(Stream& stream);

    /// What the last update decided, in the device's memory. The same on all ranks.
    const StepState* state_on_device() const { return state_; }
    /// Waits for all work on the device, and returns what the last update decided.
    StepState state() const;
    /// Reading and setting it waits for all work on the device.
    SpikeHistory spike_history() const;
    const SpikeHistory* spike_history_on_device() const { return history_; }
    void set_spike_history(const SpikeHistory& history);
    /// At one of the last two spikes, counted from 1, the tensor whose norm has grown most since
    /// the last step that was neither computed again nor stopped the run, and by what factor.
    /// Without such a step, as right after a resume, no tensor.
    struct Growth {
        std::string tensor;
        double factor = 1;
    };
    Growth grown_most(int64_t spike) const;
    /// After all work on the device: the step whose sums have overflowed can be computed again.
    void clear_overflow();
    /// The name of the first parameter whose gradient was not finite.
    std::string bad_parameter(const StepState& state) const;

  private:
    void make_segments(const RouterCounts* routers);
    /// The norm, from sums of squares in fp32 or in integers.
    void find_norm(Stream& stream, float scale, float clip);
    void find_exact_norm(Stream& stream, float scale, float clip);
    void watch_step(Stream& stream, float scale);
    size_t place_of(int parameter) const;  // among `names_`

    ParameterStore& parameters_;
    StateLeases leases_;
    Device device_;
    // For each bucket.
    std::vector<std::vector<NormSegment>> norm_segments_;
    std::vector<std::vector<AdamWSegment>> adamw_segments_;
    std::vector<std::vector<BalanceSegment>> balance_segments_;
    std::vector<std::string> names_;
    bool by_id_;    // names_ has all tensors of the model, and the store has a part of them
    Grids* grids_;  // null unless sums are exact
    int64_t contributions_, sums_count_, tensors_;
    // A sum of squares for each block of the gradients whose norm this rank counts, tensor by
    // tensor.
    double* partials_ = nullptr;
    std::vector<int64_t> partial_counts_;  // blocks of each tensor
    // Each holds the step's sums, then a sum of squares for each tensor. sums_of_rank_ is of this
    // rank, gathered_ has the sums of each rank one after the other, and sums_ has the totals. With
    // exact sums, only sums_ has all ranks' sums of squares.
    double *sums_of_rank_ = nullptr, *gathered_ = nullptr, *sums_ = nullptr;
    StepState* state_ = nullptr;
    SpikeHistory* history_ = nullptr;
    bool skips_spikes_;
    std::optional<Muon> muon_;
    const StateCopy* state_copy_ = nullptr;
    // Sums of squares [tensors_] of the step before; and [2, 2, tensors_] of the last two spikes
    // and before them.
    double *squares_before_ = nullptr, *kept_squares_ = nullptr;
};

}  // namespace train_gpt
