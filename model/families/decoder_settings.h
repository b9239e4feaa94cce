// What a configuration, or a config.json, says of a model, from which a family makes a DecoderSpec
// (Family::spec).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/spec.h"

namespace train_gpt {

/// What a configuration says of a model: its extents, and where it departs from its family.
struct DecoderSettings {
    int64_t n_layer = 0, n_head = 0, n_embd = 0, n_ctx = 0, vocab_size = 0;
    int64_t n_kv_head = 0, head_size = 0, n_ff = 0;  // 0: the family's
    std::optional<Norm> norm = {};
    double norm_epsilon = 0;  // 0: the family's
    std::optional<Mlp> mlp = {};
    std::optional<Biases> biases = {};
    std::optional<QkNormKind> qk_norm = {};
    std::optional<bool> tied_head = {};
    double attention_softcap = 0, head_softcap = 0;  // 0: none
    std::optional<int> window = {};                  // 0: none
    std::string window_pattern = {};                 // empty: the family's
    std::optional<bool> sinks = {}, clamped_swiglu = {};
    ClampedSwiglu clamped = {};  // if SwiGLU is clamped
    // A mixture of experts; 0: the family's, which is none for families of dense models
    int64_t n_expert = 0, n_expert_per_token = 0, n_ff_expert = 0;
    std::optional<int> n_ff_shared = {};
    std::optional<bool> shared_gate = {};
    std::optional<RouterScore> router = {};
    std::optional<bool> router_normalise = {};
    double router_scale = 0;
    std::optional<bool> router_bias = {}, expert_bias = {};
    bool selection_bias = false;
    double expert_capacity = 0;  // ExpertSpec::capacity
    std::vector<int> dense_layers = {};
    int experts_every = 1;
    std::optional<Positions> positions = {};
    double init_std = 0;  // 0: the family's
    bool init_residual_scaling = true;
    bool init_zero_projections = false;
    double rope_theta = 0;              // 0: the family's
    RopeFrequencies rope_scaling = {};  // all but D and theta
};

}  // namespace train_gpt
