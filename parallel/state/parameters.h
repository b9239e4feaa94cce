// Parameters of a model as the layers below the model see them: named tensors in units, with their
// gradients and optimizer state.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "parallel/state/exchange.h"
#include "parallel/state/gradients.h"
#include "parallel/state/matrices.h"
#include "parallel/state/parameter_buffers.h"
#include "parallel/state/parameter_state.h"
#include "parallel/state/weights.h"

namespace train_gpt {

struct ParameterStoreOptions {
    DType dtype = DType::fp32;  // of the weights that a model computes with
    ParameterBuffers::Use use = ParameterBuffers::Use::training;
    Sharding sharding = {};
    std::vector<OptimizerSlot> slots = {};
    /// If sums are exact, all parameters of the model, by Parameter::id; null: the store has all.
    /// Only the constructor reads them.
    const std::vector<Parameter>* model = nullptr;
};

/// The buffers, and the members that work on them. A model leases `weights` and writes `gradients`.
/// Files and initial values come through `state`. An optimizer of whole matrices gets `matrices`.
/// Weights, gradients and matrices share one Exchange with the other ranks.
class ParameterStore : public ParameterBuffers {
  public:
    ParameterStore(Arena& arena, std::vector<Parameter> parameters, ParameterStoreOptions options);
    // The members refer to the buffers.
    ParameterStore(const ParameterStore&) = delete;
    ParameterStore& operator=(const ParameterStore&) = delete;

    /// The ranks with which buffers are exchanged, and registered. What the model's stream waits
    /// for counts as communication in `clock`. All ranks call it; `mesh` must live longer than the
    /// object. `tensor`: the ranks that add up gradients of whole tensors; null: this rank alone.
    void connect(const Mesh& mesh, StepClock* clock = nullptr, TensorGroup* tensor = nullptr);
    /// out [world·n] = in[n] of all ranks of the run, by rank, for later work of the stream. Not in
    /// a world of one.
    void gather_from_ranks(Stream& stream, double* out, const double* in, int64_t n);
    /// data[n] becomes its sum or its maximum over all ranks of the run, for later work of the
    /// stream.
    void reduce_over_ranks(Stream& stream, void* data, int64_t n, DType dtype,
                           Reduction reduction = Reduction::sum);
    /// Null unless sums are exact.
    Grids* grids() { return grids_ ? &*grids_ : nullptr; }
    const Grids* grids() const { return grids_ ? &*grids_ : nullptr; }

  private:
    std::unique_ptr<Exchange> exchange_;  // null in a world of one
    Communicator* everyone_ = nullptr;
    std::optional<Grids> grids_;

  public:
    Weights weights;
    Gradients gradients;
    ParameterState state;
    std::optional<Matrices> matrices;  // if an optimizer updates whole matrices (Sharding)
};

}  // namespace train_gpt
