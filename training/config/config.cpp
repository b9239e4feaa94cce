#include "training/config/config.h"

#include "model/families/family.h"

namespace train_gpt {

double balance_rate(const Config& config) {
    const auto& r = config.router;
    return r.balance_rate > 0 ? r.balance_rate : r.balance == Balance::bias ? 1e-3 : 1e-2;
}

RouterLosses router_losses(const Config& config) {
    const auto& r = config.router;
    return {.balance = r.balance == Balance::loss ? static_cast<float>(balance_rate(config)) : 0.0f,
            .level = r.level,
            .z_loss = static_cast<float>(r.z_loss)};
}

DecoderSpec spec_of(const Config& config, int64_t vocab_size) {
    const std::string where = "the model";
    const Config::Model& m = config.model;
    return family_of(m.family, where)
        .spec({.n_layer = m.n_layer,
               .n_head = m.n_head,
               .n_embd = m.n_embd,
               .n_ctx = m.n_ctx,
               .vocab_size = vocab_size,
               .n_kv_head = m.n_kv_head,
               .head_size = m.head_size,
               .n_ff = m.n_ff,
               .norm = m.norm,
               .norm_epsilon = m.norm_epsilon,
               .mlp = m.mlp,
               .biases = m.bias,
               .qk_norm = m.qk_norm,
               .tied_head = m.tied_head,
               .attention_softcap = m.attention_softcap,
               .head_softcap = m.head_softcap,
               .window = m.window,
               .window_pattern = m.window_pattern,
               .sinks = m.sinks,
               .clamped_swiglu = m.clamped_swiglu,
               .n_expert = m.n_expert,
               .n_expert_per_token = m.n_expert_per_token,
               .n_ff_expert = m.n_ff_expert,
               .n_ff_shared = m.n_ff_shared,
               .shared_gate = m.shared_gate,
               .router = m.router,
               .router_normalise = m.router_normalise,
               .router_scale = m.router_scale,
               .router_bias = m.router_bias,
               .expert_bias = m.expert_bias,
               .selection_bias = config.router.balance == Balance::bias,
               .expert_capacity = m.expert_capacity,
               .dense_layers = m.dense_layers,
               .experts_every = m.experts_every,
               .positions = m.positions,
               .init_std = m.init_std,
               .init_residual_scaling = m.init_residual_scaling,
               .init_zero_projections = m.init_zero_projections,
               .rope_theta = m.rope_theta,
               .rope_scaling = {.scaling = m.rope_scaling,
                                .factor = m.rope_factor,
                                .low_frequency_factor = m.rope_low_freq_factor,
                                .high_frequency_factor = m.rope_high_freq_factor,
                                .original_context = m.rope_original_n_ctx,
                                .yarn = {.beta_fast = m.rope_beta_fast,
                                         .beta_slow = m.rope_beta_slow,
                                         .truncate = m.rope_truncate,
                                         .attention_factor = m.rope_attention_factor}}},
              where);
}

}  // namespace train_gpt
