// The pipeline axis: each of its places has some of the model's layers. The ranks pass activations
// on and gradients back (parallel/pipeline/pipeline_schedule.h).
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "parallel/mesh.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "parallel/size_problem.h"
#include "parallel/step_collectives.h"

namespace train_gpt {

struct PipelineOptions {
    PipelineKind kind = PipelineKind::one_f_one_b;
    int ranks = 1, stages_per_rank = 1;
    std::vector<int> layers_per_stage = {};  // empty: dealt by cost (stage_layers.h)
};

/// Why a model of so many layers cannot be cut into these stages; nothing if it can.
std::optional<SizeProblem> pipeline_problem(const PipelineOptions& options, int layers);

/// The number of micro-batches of each pipeline in a step is a multiple of this.
int micro_batches_multiple(PipelineKind kind, int ranks);

/// Makes the group along the axis. Returns the messages of micro-batches in both directions, and
/// the broadcast of a token's logits.
std::vector<StepCollective> collectives_of_pipeline(const Mesh& mesh, const StepSizes& sizes);

/// The bytes that a rank sends along the axis in a step. Each message has the activations of
/// `rows` tokens, or their gradients: `width` elements a token.
int64_t pipeline_bytes_sent(const PipelineRank& schedule, int64_t rows, int64_t width, DType dtype);

}  // namespace train_gpt
