// What a configuration, or a config.json, says of a model, from which a family makes a DecoderSpec
// (Family::spec).
#pragma once
#include <cstdint>
#include <optional>

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
    std::optional<bool> qk_norm = {}, tied_head = {};
    double attention_softcap = 0, head_softcap = 0;  // 0: none
    std::optional<Positions> positions = {};
    double init_std = 0;  // 0: the family's
    bool init_residual_scaling = true;
    bool init_zero_projections = false;
    double rope_theta = 0;              // 0: the family's
    RopeFrequencies rope_scaling = {};  // all but D and theta
};

}  // namespace train_gpt
