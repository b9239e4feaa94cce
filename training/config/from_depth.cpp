#include "training/config/from_depth.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/error.h"
#include "base/formatted.h"
#include "base/json_text.h"
#include "base/printable.h"
#include "training/config/config_keys.h"

namespace train_gpt {

namespace {

constexpr const char *nanochat = "nanochat (github.com/karpathy/nanochat)",
                     *step_law = "Step Law, Li et al. 2025, arXiv 2503.04715",
                     *chinchilla = "Chinchilla, Hoffmann et al. 2022, arXiv 2203.15556",
                     *to_zero = "Bergsma et al. 2025, arXiv 2502.15938",
                     *gpt3 = "GPT-3, Brown et al. 2020, arXiv 2005.14165";

/// A number with three significant digits.
double rounded(double value) { return std::stod(formatted("%.3g", value)); }

/// The power of two that is nearest to a number, by their ratio.
int64_t nearest_power_of_two(double value) {
    return int64_t{1} << std::max<int64_t>(0, std::llround(std::log2(value)));
}

}  // namespace

Config config_from_depth(int depth, std::vector<DepthRule>& rules) {
    Config config;
    const auto set = [&](const char* path, auto& key, auto value, const std::string& rule,
                         const char* source) {
        key = value;
        rules.push_back({.key = path,
                         .value = to_text(value_of(config, *find_config_key(path))),
                         .rule = rule,
                         .source = source});
    };
#define SET(member, ...) set(#member, config.member, __VA_ARGS__)
    SET(model.family, "llama", "RMSNorm and SwiGLU, as in the runs of Step Law", step_law);
    SET(model.n_layer, depth, "the depth", "");
    SET(model.n_embd, 64 * depth, "64 · depth", nanochat);
    SET(model.head_size, config.model.n_embd % 128 == 0 ? 128 : 64,
        "128 where that divides the width, else 64", nanochat);
    SET(model.n_head, config.model.n_embd / config.model.head_size, "width / head size", nanochat);
    SET(model.n_ctx, 2048, "2048", nanochat);

    const DecoderSpec spec = spec_of(config, 1);
    double parameters = 0;
    for (int i = 0; i < depth; ++i) parameters += spec.layer(i).matrix_parameters();
    const double tokens = 20 * parameters;
    SET(schedule.tokens, static_cast<int64_t>(tokens),
        concat("20 for each of the ", with_separators(static_cast<uint64_t>(parameters)),
               " parameters outside of the vocabulary"),
        chinchilla);
    const double batch = 0.58 * std::pow(tokens, 0.571);
    SET(batch.tokens_per_step, std::max<int64_t>(config.model.n_ctx, nearest_power_of_two(batch)),
        concat("0.58 · tokens^0.571 = ", with_separators(static_cast<uint64_t>(batch)),
               ", as a power of two"),
        step_law);
    SET(optimizer.learning_rate,
        rounded(1.79 * std::pow(parameters, -0.713) * std::pow(tokens, 0.307)),
        "1.79 · parameters^-0.713 · tokens^0.307", step_law);
    SET(optimizer.weight_decay, 0.1, "0.1", step_law);
    SET(optimizer.beta1, 0.9, "0.9", step_law);
    SET(optimizer.beta2, 0.95, "0.95", step_law);
    SET(optimizer.grad_clip, 1.0, "1", gpt3);
    const int64_t steps = (config.schedule.tokens - 1) / config.batch.tokens_per_step + 1;
    SET(schedule.warmup_steps, std::min<int64_t>(2000, (steps + 9) / 10),
        "a tenth of the steps, at most 2000", to_zero);
    SET(schedule.decay, "linear", "linear", to_zero);
    SET(schedule.final_fraction, 0.0, "to 0", to_zero);
#undef SET
    config.description = concat(
        "A Llama of depth ", depth,
        ", made by train_gpt config --depth: width, tokens, batch and rates by published rules.");
    config.run_dir = concat("runs/d", depth);
    return config;
}

std::string depth_config_text(int depth) {
    std::vector<DepthRule> rules;
    const Config config = config_from_depth(depth, rules);
    Json root = {{"description", config.description}, {"run_dir", config.run_dir}};
    for (const DepthRule& rule : rules)
        root[std::string(section_of_key(rule.key))][std::string(name_of_key(rule.key))] =
            parse_json(rule.value);
    return to_text(root, 4) + "\n";
}

std::string depth_rules_text(int depth) {
    std::vector<DepthRule> rules;
    config_from_depth(depth, rules);
    size_t widest_key = 0, widest_value = 0;
    for (const DepthRule& rule : rules) {
        widest_key = std::max(widest_key, rule.key.size());
        widest_value = std::max(widest_value, rule.value.size());
    }
    std::string text;
    for (const DepthRule& rule : rules)
        text += concat(rule.key, std::string(widest_key + 2 - rule.key.size(), ' '), rule.value,
                       std::string(widest_value + 2 - rule.value.size(), ' '), rule.rule,
                       rule.source.empty() ? "" : concat("  [", rule.source, "]"), "\n");
    return text;
}

}  // namespace train_gpt
