#include "training/config/resolved_config.h"

#include "model/spec.h"

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

}  // namespace train_gpt
