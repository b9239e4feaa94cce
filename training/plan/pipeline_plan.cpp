#include "training/plan/pipeline_plan.h"

#include "base/error.h"
#include "base/formatted.h"
#include "base/printable.h"
#include "device/memory.h"
#include "training/report/pipeline_picture.h"

namespace train_gpt {

PipelineTimes stage_flops(const RunShape& shape) {
    const DecoderSpec& spec = shape.spec;
    // Per token, each product once; the unit is the model's first layer.
    const int T = shape.config.sequence_length();
    const double unit = spec.layer(0).flops_per_token(T) / 3,
                 head = 2.0 * static_cast<double>(spec.vocab_size) * spec.n_embd;
    PipelineTimes times;
    int l = 0;
    for (const int n : layers_of_stages(shape)) {
        double products = 0, attention = 0;
        for (const int end = l + n; l < end; ++l) {
            const LayerSpec layer = spec.layer(l);
            products += 2 * layer.matrix_parameters() / unit;
            attention += 4.0 * layer.attention_width() * layer.seen_keys(T) / unit;
        }
        const double forward = products + attention,
                     again = shape.recompute == Recompute::block ? forward : 0;
        times.stages.push_back({.forward = forward,
                                .backward_inputs = products + 2 * attention + again,
                                .backward_weights = products});
    }
    times.stages.back().forward += head / unit;
    times.stages.back().backward_inputs += 2 * head / unit;
    return times;
}

std::string pipeline_table(const RunShape& shape, const std::vector<DeviceAndHost>& memory) {
    const PipelineSchedule schedule = pipeline_schedule(pipeline_shape(shape));
    const int p = schedule.shape.ranks, m = schedule.shape.micro_batches;
    if (p == 1) return "";
    const std::vector<int> layers = layers_of_stages(shape);
    const PipelineTimeline timeline = simulate(schedule, stage_flops(shape));
    std::string text = formatted(
        "\npipeline of %d ranks, %s, %d micro-batch%s: bubble %.1f%% (calculated from FLOPs; sends "
        "take no time)\n  %4s %12s %14s %10s   %s\n",
        p, name_of(schedule.shape.kind), m, m == 1 ? "" : "es", 100 * timeline.idle_share(), "rank",
        "memory", "bubble", "layers", "micro-batches in flight");
    for (int r = 0; r < p; ++r) {
        std::string of_layers, in_flight;
        for (const int stage : schedule.stages_of(r)) {
            const char* plus = schedule.index_of(stage) == 0 ? "" : "+";
            of_layers += concat(plus, layers[static_cast<size_t>(stage)]);
            in_flight += concat(plus, schedule.slots[static_cast<size_t>(stage)]);
        }
        const double idle = timeline.idle[static_cast<size_t>(r)] / timeline.makespan;
        text += formatted("  %4d %12s %13.1f%% %10s   %s\n", r,
                          format_bytes(memory[static_cast<size_t>(r)].device).c_str(), 100 * idle,
                          of_layers.c_str(), in_flight.c_str());
    }
    return text;
}

std::string schedule_picture(const RunShape& shape, const std::vector<DeviceAndHost>& memory) {
    const PipelineSchedule schedule = pipeline_schedule(pipeline_shape(shape));
    const PipelineTimeline timeline = simulate(schedule, stage_flops(shape));
    std::vector<std::string> of_ranks;
    for (const DeviceAndHost& of_rank : memory) of_ranks.push_back(format_bytes(of_rank.device));
    const PipelineShape& of = schedule.shape;
    return pipeline_picture(
        schedule, timeline,
        {.title = concat("Pipeline of ", of.ranks, " ranks: ", name_of(of.kind)),
         .subtitle = concat(schedule.stages, " stages, ", of.micro_batches,
                            " micro-batches; calculated from FLOPs, 1 = forward pass of a layer"),
         .seconds = false,
         .memory = of_ranks});
}

}  // namespace train_gpt
