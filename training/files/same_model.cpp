#include "training/files/same_model.h"

#include <string>
#include <tuple>

#include "base/error.h"
#include "model/families/family.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

std::string word(bool on) { return on ? "on" : "off"; }

/// Throws Error where one model has experts and the other an MLP, or others.
void require_same_experts(const fs::path& directory, const DecoderSpec& found,
                          const DecoderSpec& wanted) {
    const std::string model = concat("the model in ", directory.string()),
                      remedy =
                          "; change the configuration, or choose another run_dir or "
                          "model.init_from";
    const ExpertSpec &have = found.experts, &want = wanted.experts;
    if (!have && want)
        throw Error(model, " has no experts, but the configuration has n_expert = ", want.n_expert,
                    "; make experts of its MLP with `train_gpt import --upcycle ", want.n_expert,
                    " ", directory.string(), " --out FOLDER`, and name FOLDER in model.init_from");
    if (have && !want)
        throw Error(model, " has experts (n_expert = ", have.n_expert,
                    "), but the configuration has none", remedy);
    if (!have) return;
    const auto require = [&](const char* key, const auto& one, const auto& other) {
        if (one != other)
            throw Error(model, " has ", key, " = ", one, ", but the configuration has ", other,
                        remedy);
    };
    const auto score = [](const ExpertSpec& e) {
        return std::string(e.rule.score == RouterScore::softmax ? "softmax" : "sigmoid");
    };
    require("n_expert", have.n_expert, want.n_expert);
    require("n_expert_per_token", have.n_expert_per_token, want.n_expert_per_token);
    require("n_ff_expert", have.n_ff, want.n_ff);
    require("n_ff_shared", have.n_ff_shared, want.n_ff_shared);
    require("shared_gate", word(have.shared_gate), word(want.shared_gate));
    require("router", score(have), score(want));
    require("router_normalise", word(have.rule.normalise), word(want.rule.normalise));
    require("router_scale", have.rule.scale, want.rule.scale);
    require("router_bias", word(have.router_bias), word(want.router_bias));
    require("expert_bias", word(have.biases), word(want.biases));
    if (have.selection_bias != want.selection_bias)
        throw Error(model, " has ", have.selection_bias ? "" : "no ",
                    "selection biases, but the configuration's router.balance is ",
                    want.selection_bias ? "" : "not ", "bias", remedy);
    for (int i = 0; i < found.n_layer; ++i)
        if (found.has_experts(i) != wanted.has_experts(i))
            throw Error(model, " has ", found.has_experts(i) ? "experts" : "an MLP", " in layer ",
                        i, ", but the configuration has ",
                        wanted.has_experts(i) ? "experts" : "an MLP",
                        " there (model.dense_layers, model.experts_every)", remedy);
}

}  // namespace

void require_same_model(const fs::path& directory, const DecoderSpec& found,
                        const DecoderSpec& wanted) {
    const auto require = [&](const char* key, const auto& have, const auto& want) {
        if (have != want)
            throw Error("the model in ", directory.string(), " has ", key, " = ", have,
                        ", but the configuration has ", want,
                        "; change the configuration, or choose another run_dir or model.init_from");
    };
    require("attention_softcap", found.attention_softcap, wanted.attention_softcap);
    require("head_softcap", found.head_softcap, wanted.head_softcap);
    require("n_layer", found.n_layer, wanted.n_layer);
    require_same_experts(directory, found, wanted);
    require("window", found.window, wanted.window);
    require("window_pattern", found.window_pattern, wanted.window_pattern);
    require("sinks", word(found.sinks), word(wanted.sinks));
    require("clamped_swiglu", word(found.clamped.has_value()), word(wanted.clamped.has_value()));
    if (found.family != wanted.family)
        throw Error("the model in ", directory.string(), " is of the family ",
                    found.family->model_type, ", but the configuration's is ",
                    wanted.family->model_type,
                    "; change the configuration, or choose another run_dir or model.init_from");
    require("n_head", found.n_head, wanted.n_head);
    require("n_kv_head", found.n_kv_head, wanted.n_kv_head);
    require("head_size", found.head_size, wanted.head_size);
    require("n_embd", found.n_embd, wanted.n_embd);
    require("n_ff", found.n_ff, wanted.n_ff);
    require("n_ctx", found.n_ctx, wanted.n_ctx);
    require("vocab_size", found.vocab_size, wanted.vocab_size);
    DecoderSpec same = wanted;
    same.init_std = found.init_std;
    same.init_residual_scaling = found.init_residual_scaling;
    same.init_zero_projections = found.init_zero_projections;
    same.experts.capacity = found.experts.capacity;
    same.dense_layers = found.dense_layers, same.experts_every = found.experts_every;
    if (found != same)
        throw Error(
            "the model in ", directory.string(),
            " has another norm, MLP, biases, head or positions than the configuration; its "
            "config.json says which; change the configuration, or choose another run_dir or "
            "model.init_from");
}

}  // namespace train_gpt
