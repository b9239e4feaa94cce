#include "training/config/unread_settings.h"

#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/json_text.h"
#include "training/config/config_keys.h"

namespace train_gpt {

std::string unread_setting(const Config& config, const DecoderSpec& decoder) {
    const Config::Model& m = config.model;
    const RopeScaling scaling = m.rope_scaling;
    const Balance balance = config.router.balance;
    struct Unread {
        bool is_read;
        const char* why;     // "… = VALUE " why
        const char* remedy;  // "; set it to DEFAULT, or " remedy
        std::vector<std::string_view> paths;
    };
    const std::string_view pattern = m.window_pattern;
    if (!pattern.empty() && decoder.window == 0 && m.window.value_or(1) > 0 &&
        pattern.substr(0, static_cast<size_t>(m.n_layer)).find('S') == pattern.npos)
        return concat("model.window_pattern = ", quoted(pattern), " gives none of the ", m.n_layer,
                      " layers the window; add an S, or set it to \"\" and model.window to 0");
    const Unread settings[] = {
        {!!decoder.experts,
         "is about experts, and the model has none",
         "set model.n_expert",
         {"model.n_expert_per_token", "model.n_ff_expert", "model.n_ff_shared", "model.shared_gate",
          "model.router", "model.router_normalise", "model.router_scale", "model.router_bias",
          "model.expert_bias", "model.expert_capacity", "model.dense_layers", "model.experts_every",
          "router.balance", "router.level", "router.balance_rate", "router.z_loss"}},
        {decoder.window > 0,
         "says which layers have a window, and none has one",
         "set model.window",
         {"model.window_pattern"}},
        {balance == Balance::loss,
         "is about the loss that balances experts, and router.balance is another",
         "set router.balance=loss",
         {"router.level"}},
        {balance != Balance::none,
         "balances experts, and router.balance = none",
         "set router.balance to loss or bias",
         {"router.balance_rate"}},
        {config.precision.fp8 != Fp8Recipe::off,
         "is about fp8, and precision.fp8 = off",
         "set precision.fp8 to delayed or current",
         {"precision.fp8_skip"}},
        {scaling != RopeScaling::none,
         "is about scaled frequencies, and model.rope_scaling = none",
         "set model.rope_scaling",
         {"model.rope_factor"}},
        {scaling == RopeScaling::llama3 || scaling == RopeScaling::yarn,
         "is about model.rope_scaling = llama3 or yarn, and it is neither",
         "set model.rope_scaling",
         {"model.rope_original_n_ctx"}},
        {scaling == RopeScaling::llama3,
         "is about model.rope_scaling = llama3, and it is another",
         "set model.rope_scaling=llama3",
         {"model.rope_low_freq_factor", "model.rope_high_freq_factor"}},
        {scaling == RopeScaling::yarn,
         "is about model.rope_scaling = yarn, and it is another",
         "set model.rope_scaling=yarn",
         {"model.rope_beta_fast", "model.rope_beta_slow", "model.rope_truncate",
          "model.rope_attention_factor"}}};
    const Config defaults;
    for (const Unread& unread : settings)
        for (const std::string_view path : unread.paths) {
            if (unread.is_read) continue;
            const ConfigKey& key = *find_config_key(path);
            const Json value = value_of(config, key), neutral = value_of(defaults, key);
            const bool is_off =
                value == Json(0) || value == Json(false) || value == "none" || value == "off";
            if (value == neutral || is_off) continue;
            return concat(path, " = ", to_text(value), " ", unread.why, "; set it to ",
                          to_text(neutral), ", or ", unread.remedy);
        }
    return "";
}

}  // namespace train_gpt
