// The collectives of a training step as plain data. Each axis says which ones its groups have
// (parallel/axes/). All are done once before memory is planned (first_collectives.h).
#pragma once
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "parallel/communicator.h"

namespace train_gpt {

/// One collective, with the arguments that Communicator takes.
struct StepCollective {
    enum class Kind : uint8_t {
        all_reduce,
        reduce_scatter,
        all_gather,
        broadcast,
        messages,  // from each rank to the next one and to the one before; the ends are neighbours
        all_to_all,  // half of `count` from each rank to each other one
    };

    Kind kind = Kind::all_reduce;
    Communicator* group = nullptr;
    DType dtype = DType::fp32;
    int64_t count = 0;

    auto operator<=>(const StepCollective&) const = default;
};

/// Numbers over which all ranks of a run agree in a step: losses, norms, and counts of routers.
struct StepNumbers {
    int64_t fp64 = 0;   // sums that each rank gathers from every rank
    int64_t int64 = 0;  // integers of exact sums (Grids::sums()), which are added up
    int64_t int32 = 0;  // counts of routers (RouterCounts), which are added up
    int64_t fp32 = 0;   // selection biases, of which the maximum is taken
    int64_t amax = 0;   // largest magnitudes of fp8 operands, of which the maximum is taken
};

/// What the sizes of a step's collectives follow from, beside the parameters.
struct StepSizes {
    DType dtype = DType::fp32;  // of weights and activations
    StepNumbers sums = {};
    int64_t grids = 0;  // grids whose largest elements all ranks compare before the first step
    /// The tokens of a micro-batch on a rank of the context axis. Several, if the micro-batch is
    /// still to be chosen: the fewest, the most, and some between.
    std::vector<int64_t> tokens = {};
    std::vector<int64_t> head_rows = {};  // how many rows' logits are computed at a time
    int64_t width = 0;                    // n_embd
    std::vector<int64_t> kv_widths = {};  // of keys or values, in layers of a tensor-parallel rank
    /// The counts of experts in a micro-batch that the ranks of the context axis gather in a layer.
    std::vector<int64_t> expert_counts = {};
    int64_t vocabulary = 0;    // rows of the head with padding, on all ranks together
    int tensor_chunks = 1;     // TensorOptions::chunks
    bool norms_width = false;  // TensorTraffic::layers_with_sums is not 0
};

}  // namespace train_gpt
