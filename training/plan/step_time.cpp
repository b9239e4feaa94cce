#include "training/plan/step_time.h"

#include <algorithm>

#include "base/dtype.h"
#include "model/block_inputs.h"
#include "model/spec.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "training/plan/traffic.h"

namespace train_gpt {

StepTime::StepTime(const RunShape& shape, const Device& device, const Speeds& speeds)
    : speeds_(speeds),
      fixed_tokens_(device.is_cuda() ? 1024 : 64),
      hides_(device.is_cuda() ? 0.8 : 0) {
    constexpr double efficiency = 0.5;
    const int parts = shape.mesh.size(Axis::tensor) * shape.mesh.size(Axis::pipeline);
    if (speeds.flops == 0) return;
    token_ = shape.spec.flops_per_token(shape.config.sequence_length()) / parts /
             (efficiency * speeds.flops);
    constexpr double of_fp8 = 0.85;  // as steps on an H100 (docs/measurements.md)
    if (device.has_own_memory() && shape.config.precision.fp8 != Fp8Recipe::off) token_ *= of_fp8;
}

double StepTime::of(const RunShape& shape, int64_t offloaded_state) const {
    constexpr double cost[] = {1, 1.04, 1.33};  // by recompute level
    const Config& config = shape.config;
    const int ranks = shape.mesh.size(Axis::data);
    const int64_t busiest = (config.micro_batches_per_step() + ranks - 1) / ranks,
                  tokens = int64_t{config.batch.micro_batch} * config.sequence_length() /
                           config.parallel.context;
    const double micro_batch = (static_cast<double>(tokens) + fixed_tokens_) * token_ *
                               cost[static_cast<size_t>(shape.recompute)];
    const double compute = static_cast<double>(busiest) * micro_batch;
    const double idle = idle_micro_batches(config.parallel.schedule, config.parallel.pipeline,
                                           config.parallel.stages_per_rank);
    const bool in_every_one = sharding_of(shape, 0).reduces_each();
    return compute + idle * micro_batch + exposed(shape, in_every_one ? compute : micro_batch) +
           offloaded(shape, offloaded_state, compute, busiest);
}

/// What exchanges add, if they run beside so much time of computing.
double StepTime::exposed(const RunShape& shape, double beside) const {
    if (speeds_.link == 0) return 0;
    constexpr double not_free = 0.15;  // multiprocessors and bandwidth that exchanges take
    const double all = static_cast<double>(state_bytes(shape)) / speeds_.link,
                 hidden = std::min(all, hides_ * beside);
    return all - hidden + not_free * hidden;
}

double layers_from_host(const RunShape& shape) {
    const int stages = shape.mesh.size(Axis::pipeline);
    if (stages > 1) return double(shape.spec.n_layer) / stages;
    return BlockInputs::layers_from_host(shape.spec.n_layer);
}

/// What offloading adds to so much time of computing so many micro-batches.
double StepTime::offloaded(const RunShape& shape, int64_t state, double compute,
                           int64_t micro_batches) const {
    if (speeds_.host == 0 || speeds_.flops == 0) return 0;
    double time = static_cast<double>(state) / speeds_.host;
    if (shape.offload().activations) {
        const Config& config = shape.config;
        const double tokens = double(config.batch.micro_batch) * config.sequence_length() /
                              (config.parallel.context * config.parallel.tensor),
                     bytes = tokens * shape.spec.n_embd * double(size_of(shape.dtype));
        const double out = double(shape.spec.n_layer) / shape.mesh.size(Axis::pipeline),
                     back = layers_from_host(shape);
        const double moved =
            (out + back) * bytes * static_cast<double>(micro_batches) / speeds_.host;
        time += moved - std::min(moved, 0.8 * compute);
    }
    return time;
}

}  // namespace train_gpt
