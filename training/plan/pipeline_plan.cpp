#include "training/plan/pipeline_plan.h"

#include "base/error.h"
#include "base/formatted.h"
#include "base/printable.h"
#include "training/plan/plan.h"
#include "training/report/pipeline_picture.h"
#include "training/trainer.h"

namespace train_gpt {

PipelineTimes stage_flops(const Config& config, const DecoderSpec& spec, Recompute recompute) {
    // Per token, each product once; the unit is the model's first layer.
    const int T = config.sequence_length();
    const double unit = spec.layer(0).flops_per_token(T) / 3,
                 head = 2.0 * static_cast<double>(spec.vocab_size) * spec.n_embd;
    PipelineTimes times;
    int l = 0;
    for (const int n : layers_of_stages(config, spec)) {
        double products = 0, attention = 0;
        for (const int end = l + n; l < end; ++l) {
            const LayerSpec layer = spec.layer(l);
            products += 2 * layer.matrix_parameters() / unit;
            attention += 2.0 * layer.attention_width() * T / unit;
        }
        const double forward = products + attention,
                     again = recompute == Recompute::block ? forward : 0;
        times.stages.push_back({.forward = forward,
                                .backward_inputs = products + 2 * attention + again,
                                .backward_weights = products});
    }
    times.stages.back().forward += head / unit;
    times.stages.back().backward_inputs += 2 * head / unit;
    return times;
}

namespace {

/// Of the first rank of each stage.
std::vector<std::string> memory_of_stages(const Config& config, const DecoderSpec& spec,
                                          DType dtype, Recompute recompute, const Device& device,
                                          int world) {
    const MeshLayout mesh = mesh_of(config, world);
    std::vector<std::string> memory;
    for (int i = 0; i < mesh.size(Axis::pipeline); ++i)
        memory.push_back(format_bytes(plan_memory(config, spec, dtype, recompute, device, world,
                                                  i * mesh.stride(Axis::pipeline))
                                          .total_bytes()));
    return memory;
}

}  // namespace

std::string pipeline_table(const Config& config, const DecoderSpec& spec, DType dtype,
                           Recompute recompute, const Device& device, int world) {
    const MeshLayout mesh = mesh_of(config, world);
    const PipelineSchedule schedule = pipeline_schedule(pipeline_shape(config, mesh));
    const int p = schedule.shape.ranks, m = schedule.shape.micro_batches;
    if (p == 1) return "";
    const std::vector<int> layers = layers_of_stages(config, spec);
    const PipelineTimeline timeline = simulate(schedule, stage_flops(config, spec, recompute));
    const std::vector<std::string> memory =
        memory_of_stages(config, spec, dtype, recompute, device, world);
    std::string text = formatted(
        "\npipeline of %d ranks, %s, %d micro-batch%s: bubble %.1f%% (calculated from FLOPs; sends "
        "take no time)\n  %4s %12s %14s %10s   %s\n",
        p, name_of(schedule.shape.kind), m, m == 1 ? "" : "es", 100 * timeline.idle_share(), "rank",
        "memory", "bubble", "layers", "micro-batches in flight");
    for (int r = 0; r < p; ++r) {
        std::string of_layers, in_flight;
        for (int stage = r; stage < schedule.stages; stage += p) {
            const char* plus = stage == r ? "" : "+";
            of_layers += concat(plus, layers[static_cast<size_t>(stage)]);
            in_flight += concat(plus, schedule.slots[static_cast<size_t>(stage)]);
        }
        const double idle = timeline.idle[static_cast<size_t>(r)] / timeline.makespan;
        text +=
            formatted("  %4d %12s %13.1f%% %10s   %s\n", r, memory[static_cast<size_t>(r)].c_str(),
                      100 * idle, of_layers.c_str(), in_flight.c_str());
    }
    return text;
}

std::string planned_picture(const Config& given, const Device& device, int world) {
    if (given.parallel.pipeline == 1)
        throw Error(
            "--picture draws the schedule of a pipeline, and parallel.pipeline is 1; set it to 2 "
            "or more");
    const DecoderSpec spec = spec_of(given, vocab_size_of(given));
    const DType dtype = resolve_dtype(given.precision.dtype, device);
    const Fit fit = fit_into(memory_available(device), given, spec, dtype, device, world);
    Config config = given;
    config.batch.micro_batch = fit.micro_batch;
    const PipelineSchedule schedule =
        pipeline_schedule(pipeline_shape(config, mesh_of(config, world)));
    const PipelineTimeline timeline = simulate(schedule, stage_flops(config, spec, fit.recompute));
    const PipelineShape& shape = schedule.shape;
    return pipeline_picture(
        schedule, timeline,
        {.title = concat("Pipeline of ", shape.ranks, " ranks: ", name_of(shape.kind)),
         .subtitle = concat(schedule.stages, " stages, ", shape.micro_batches,
                            " micro-batches; calculated from FLOPs, 1 = forward pass of a layer"),
         .seconds = false,
         .memory = memory_of_stages(config, spec, dtype, fit.recompute, device, world)});
}

}  // namespace train_gpt
