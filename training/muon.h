// Muon over this rank's share of a store's matrices.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels/muon/muon.h"
#include "kernels/muon/newton_schulz.h"
#include "parallel/state/parameters.h"
#include "parallel/state/state_leases.h"

namespace train_gpt {

struct MuonOptions {
    NewtonSchulzList coefficients = NewtonSchulzList::quintic;
    MuonScale scale = MuonScale::rms;
};

class Muon {
  public:
    /// parameters.matrices must be set. `leases` must live longer than the object.
    Muon(ParameterStore& parameters, StateLeases& leases, Arena& arena, const MuonOptions& options);

    /// The scratch memory of the iteration's matrix products.
    size_t scratch_bytes(const Stream& stream) const;
    /// Runs the products of a step once, on random numbers.
    void warm_up(Stream& stream);
    /// Adds the gradients to the momentum, and finds the direction of every matrix. All ranks that
    /// share the state of a stage call it.
    void find_directions(Stream& stream, const MuonStep& args);
    /// Updates what this rank updates of a bucket's matrices.
    void update(Stream& stream, size_t bucket, const MuonStep& args);

  private:
    void make_segments();
    void orthogonalize(Stream& stream);

    ParameterStore& parameters_;
    StateLeases& leases_;
    MuonOptions options_;
    std::vector<std::vector<MuonSegment>> segments_;  // of each bucket
    void* workspace_ = nullptr;
};

}  // namespace train_gpt
