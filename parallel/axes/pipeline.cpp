#include "parallel/axes/pipeline.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace train_gpt {

namespace {

/// What is wrong with parallel.layers_per_stage; empty: nothing.
std::string problem_of(const std::vector<int>& layers_per_stage, int layers, int stages) {
    if (layers_per_stage.size() != static_cast<size_t>(stages))
        return concat("parallel.layers_per_stage has ", layers_per_stage.size(),
                      " numbers, but the pipeline has ", stages,
                      " stages (parallel.pipeline · parallel.stages_per_rank); give one for each");
    int64_t sum = 0;
    for (size_t stage = 0; stage < layers_per_stage.size(); ++stage) {
        if (layers_per_stage[stage] < 1)
            return concat("parallel.layers_per_stage gives stage ", stage, " ",
                          layers_per_stage[stage], " layers; each stage needs at least 1");
        sum += layers_per_stage[stage];
    }
    return sum == layers
               ? ""
               : concat("parallel.layers_per_stage adds up to ", sum, " layers, but the model has ",
                        layers, "; change its numbers or model.n_layer");
}

}  // namespace

std::optional<SizeProblem> pipeline_problem(const PipelineOptions& options, int layers) {
    const int ranks = options.ranks, v = options.stages_per_rank;
    const std::vector<int>& given = options.layers_per_stage;
    const bool interleaved = options.kind == PipelineKind::interleaved;
    if (ranks == 1 && v > 1)
        return SizeProblem{.text =
                               concat("parallel.stages_per_rank = ", v,
                                      " needs a pipeline; set parallel.pipeline to 2 or more, or "
                                      "parallel.stages_per_rank to 1")};
    if (ranks == 1 && !given.empty() && given != std::vector<int>{layers})
        return SizeProblem{
            .text =
                "parallel.layers_per_stage needs a pipeline; set parallel.pipeline to 2 or "
                "more, or parallel.layers_per_stage to []"};
    if (ranks == 1) return {};
    if (interleaved ? v < 2 : v > 1)
        return SizeProblem{
            .text = concat("parallel.stages_per_rank = ", v, " does not fit parallel.schedule = \"",
                           name_of(options.kind), "\""),
            .key = "parallel.stages_per_rank",
            .value = v,
            .most = 1024,
            .afterwards = interleaved ? "" : ", and \"interleaved\" has several stages per rank"};
    if (v > 1 && ranks <= layers && layers < ranks * v)
        return SizeProblem{.text = concat("parallel.stages_per_rank = ", v, " makes ", ranks * v,
                                          " stages of parallel.pipeline = ", ranks,
                                          " ranks, but model.n_layer = ", layers,
                                          ", and each stage needs a layer"),
                           .key = "parallel.stages_per_rank",
                           .value = v,
                           .most = v,
                           .does = "fits"};
    if (layers < ranks)
        return SizeProblem{
            .text = concat("parallel.pipeline = ", ranks, " is more than model.n_layer = ", layers,
                           ", and each pipeline rank needs a layer"),
            .key = "parallel.pipeline",
            .value = ranks,
            .most = layers,
            .does = "fits"};
    const std::string problem = given.empty() ? "" : problem_of(given, layers, ranks * v);
    return problem.empty() ? std::nullopt : std::optional(SizeProblem{.text = problem});
}

int micro_batches_multiple(PipelineKind kind, int ranks) {
    return ranks > 1 && kind == PipelineKind::interleaved ? ranks : 1;
}

std::vector<StepCollective> collectives_of_pipeline(const Mesh& mesh, const StepSizes& sizes) {
    using Kind = StepCollective::Kind;
    if (mesh.size(Axis::pipeline) == 1) return {};
    Communicator* const group = &mesh.along(Axis::pipeline);
    std::vector<StepCollective> all;
    for (const int64_t tokens : sizes.tokens)
        all.push_back(
            {Kind::messages, group, sizes.dtype, tokens / mesh.size(Axis::tensor) * sizes.width});
    all.push_back({Kind::broadcast, group, DType::fp32, sizes.vocabulary});
    return all;
}

int64_t pipeline_bytes_sent(const PipelineRank& schedule, int64_t rows, int64_t width,
                            DType dtype) {
    const auto messages = std::ranges::count_if(
        schedule.actions, [](const PipelineAction& action) { return is_send(action.work); });
    return messages * rows * width * static_cast<int64_t>(size_of(dtype));
}

}  // namespace train_gpt
