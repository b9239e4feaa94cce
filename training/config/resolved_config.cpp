#include "training/config/resolved_config.h"

#include <algorithm>

#include "base/error.h"
#include "training/decisions.h"
#include "training/plan/fit.h"
#include "training/plan/plan_target.h"

namespace train_gpt {

Config resolve(Config config, const DecoderSpec& spec, DType dtype) {
    Config::Model& m = config.model;
    m.vocab_size = static_cast<int>(spec.vocab_size);
    m.n_kv_head = spec.n_kv_head;
    m.head_size = spec.head_size;
    m.n_ff = spec.n_ff;
    m.norm = spec.norm;
    m.norm_epsilon = spec.norm_epsilon;
    m.mlp = spec.mlp;
    m.bias = spec.biases;
    m.qk_norm = spec.qk_norm;
    m.window = spec.window;
    m.window_pattern = spec.window > 0 ? spec.window_pattern : "";
    m.sinks = spec.sinks;
    m.clamped_swiglu = spec.clamped.has_value();
    if (const ExpertSpec& e = spec.experts) {
        m.n_expert = e.n_expert;
        m.n_expert_per_token = e.n_expert_per_token;
        m.n_ff_expert = e.n_ff;
        m.n_ff_shared = e.n_ff_shared;
        m.shared_gate = e.shared_gate;
        m.router = e.rule.score;
        m.router_normalise = e.rule.normalise;
        m.router_scale = e.rule.scale;
        m.router_bias = e.router_bias;
        m.expert_bias = e.biases;
        if (config.router.balance != Balance::none)
            config.router.balance_rate = balance_rate(config);
    }
    m.tied_head = spec.tied_head;
    m.positions = spec.positions;
    m.init_std = spec.init_std;
    if (spec.is_rotary()) m.rope_theta = spec.rope.theta;
    config.batch.sequence_length = config.sequence_length();
    config.precision.dtype = dtype;
    return config;
}

ResolvedConfig resolve_here(const Config& given, int ranks, int local_ranks) {
    ResolvedConfig resolved{given, {}};
    Config& config = resolved.config;
    const Device device = open_device(given.device);
    const DType dtype = resolve_dtype(given.precision.dtype, device);
    config.device = device.is_cuda() ? "cuda" : "cpu";
    try {
        const DecoderSpec spec = spec_of(given, vocab_size_of(given));
        config = resolve(config, spec, dtype);
        const Choices kept = kept_choices(given);
        const RunShape shape(with_kept_sums(given, kept), spec, dtype, Recompute::none, ranks);
        const DeviceAndHost available = memory_for_a_rank(device, shape.mesh, local_ranks);
        const Choices usable = usable_choices(kept, available, shape, device);
        const RunShape open = with_kept(shape, usable);
        if (weighs_link(open))
            resolved.notes.emplace_back(
                "parallel.zero is chosen for a link whose speed is assumed; a run measures its "
                "own");
        const Choices chosen = choose_by_memory(usable, available, shape, device,
                                                planned_speeds(device, available, open));
        config.memory.offload = device.is_cuda() ? chosen.offload : words_of({});
        config.batch.micro_batch = chosen.micro_batch;
        config.memory.recompute = recompute_from(chosen.recompute);
        config.parallel.zero = chosen.zero;
        config.parallel.sums = chosen.sums;
    } catch (const Error& error) {
        if (config.model.vocab_size == 0) {
            config = resolve(config, spec_of(given, 1), dtype);
            config.model.vocab_size = 0;
        }
        resolved.notes.push_back(
            concat("not all of the configuration is resolved: ", error.what()));
    }
    return resolved;
}

}  // namespace train_gpt
