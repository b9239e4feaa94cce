#include "training/config.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "model/families/family.h"
#include "parallel/stage_layers.h"
#include "training/config_keys.h"
#include "training/config_parser.h"

namespace train_gpt {

namespace {

/// a · b · c, or 2^63 - 1 when that is larger.
int64_t saturating_product(int64_t a, int64_t b, int64_t c = 1) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product))
        return std::numeric_limits<int64_t>::max();
    return product;
}

DecoderSpec decoder_spec(const Config& config, int64_t vocab_size, const std::string& where) {
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
               .positions = m.positions,
               .init_std = m.init_std,
               .init_residual_scaling = m.init_residual_scaling,
               .rope_theta = m.rope_theta,
               .rope_scaling = {.scaling = m.rope_scaling,
                                .factor = m.rope_factor,
                                .low_frequency_factor = m.rope_low_freq_factor,
                                .high_frequency_factor = m.rope_high_freq_factor,
                                .original_context = m.rope_original_n_ctx}},
              where);
}

void check_model(const Config& config, const std::string& name) {
    const auto& model = config.model;
    const bool has_head_size = model.head_size > 0 || model.family == "qwen3";
    if (!has_head_size && model.n_embd % model.n_head != 0) {
        const int64_t size = std::max<int64_t>(1, (model.n_embd + model.n_head / 2) / model.n_head);
        throw Error(name, ": model.n_embd = ", model.n_embd,
                    " does not divide into model.n_head = ", model.n_head,
                    " heads of equal size; the nearest n_embd that does is ", size * model.n_head);
    }
    constexpr int max_head_size = 256;
    if (!has_head_size && model.n_embd / model.n_head > max_head_size) {
        int heads = (model.n_embd + max_head_size - 1) / max_head_size;
        while (model.n_embd % heads != 0) ++heads;
        throw Error(name, ": model.n_embd / model.n_head = ", model.n_embd / model.n_head,
                    " is the size of a head, which may be ", max_head_size,
                    " at most; use n_head = ", heads, " or more");
    }
    (void)decoder_spec(config, std::max(model.vocab_size, 1), concat(name, ": the model"));
}

void check_batch(const Config& config, const std::string& name) {
    const int length = config.sequence_length();
    if (length > config.model.n_ctx)
        throw Error(name, ": batch.sequence_length = ", length,
                    " is more than model.n_ctx = ", config.model.n_ctx,
                    "; shorten the sequence or raise n_ctx");
    const int64_t given = config.batch.micro_batch, B = std::max<int64_t>(given, 1);
    const int64_t micro = B * length;
    if (micro > std::numeric_limits<int>::max())
        throw Error(name, ": batch.micro_batch · sequence length = ", B, " · ", length, " = ",
                    micro, " tokens are too many for one micro-batch; 2147483647 is the most");
    const int64_t widest = std::max<int64_t>(4LL * config.model.n_embd, config.model.vocab_size);
    if (saturating_product(micro, widest, 8) == std::numeric_limits<int64_t>::max())
        throw Error(
            name, ": a micro-batch of ", micro, " tokens times ", widest,
            " (the larger of 4 · n_embd and vocab_size) overflows; lower batch.micro_batch");
    const int64_t tokens = config.batch.tokens_per_step;
    if (tokens % micro != 0) {
        const int64_t below = tokens / micro * micro;
        throw Error(name, ": batch.tokens_per_step = ", tokens, " is not a whole number of ",
                    given > 0
                        ? concat("micro-batches of batch.micro_batch · sequence length = ", given,
                                 " · ", length, " = ", micro, " tokens; ")
                        : concat("sequences of ", length, " tokens; "),
                    below > 0 ? concat("the nearest that are: ", below, " and ", below + micro)
                              : concat("the least is ", micro));
    }
    if (tokens / length > std::numeric_limits<int>::max())
        throw Error(name, ": batch.tokens_per_step = ", tokens, " has ", tokens / length,
                    " sequences of ", length,
                    " tokens, and 2147483647 are the most; lower it or lengthen the sequences");
}

void check_pipeline(const Config& config, const std::string& name) {
    const auto& p = config.parallel;
    const int layers = config.model.n_layer, v = p.stages_per_rank;
    const char* schedule = name_of(p.schedule);
    const bool interleaved = p.schedule == PipelineKind::interleaved;
    if (p.pipeline == 1) {
        if (v > 1)
            throw Error(name, ": parallel.stages_per_rank = ", v,
                        " needs a pipeline; set parallel.pipeline to 2 or more, or "
                        "parallel.stages_per_rank to 1");
        if (!p.layers_per_stage.empty() && p.layers_per_stage != std::vector<int>{layers})
            throw Error(name,
                        ": parallel.layers_per_stage needs a pipeline; set parallel.pipeline to 2 "
                        "or more, or parallel.layers_per_stage to []");
        return;
    }
    if (interleaved ? v < 2 : v > 1)
        throw Error(name, ": parallel.stages_per_rank = ", v,
                    " does not fit parallel.schedule = \"", schedule,
                    "\"; the nearest value that does is ", interleaved ? 2 : 1,
                    interleaved ? "" : ", and \"interleaved\" has several stages per rank");
    if (v > 1 && p.pipeline <= layers && layers < p.pipeline * v)
        throw Error(
            name, ": parallel.stages_per_rank = ", v, " makes ", p.pipeline * v,
            " stages of parallel.pipeline = ", p.pipeline, " ranks, but model.n_layer = ", layers,
            ", and each stage needs a layer; the nearest value that fits is ", layers / p.pipeline);
    if (layers < p.pipeline)
        throw Error(
            name, ": parallel.pipeline = ", p.pipeline, " is more than model.n_layer = ", layers,
            ", and each pipeline rank needs a layer; the nearest value that fits is ", layers);
    if (p.layers_per_stage.empty()) return;
    try {
        check_layers_per_stage(p.layers_per_stage, layers, p.pipeline * v);
    } catch (const Error& error) {
        throw Error(name, ": ", error.what());
    }
}

void check_parallel(const Config& config, const std::string& name) {
    check_pipeline(config, name);
    const int tensor = config.parallel.tensor;
    const DecoderSpec spec =
        decoder_spec(config, std::max(config.model.vocab_size, 1), concat(name, ": the model"));
    const auto fits = [&](int t) {
        return spec.n_head % t == 0 && spec.n_kv_head % t == 0 && spec.n_ff % t == 0;
    };
    if (fits(tensor)) return;
    const auto [key, value] = spec.n_head % tensor != 0 ? std::pair{"n_head", spec.n_head}
                              : spec.n_kv_head % tensor != 0
                                  ? std::pair{"n_kv_head", spec.n_kv_head}
                                  : std::pair{"n_ff", spec.n_ff};
    int below = tensor, above = tensor;
    while (!fits(below)) --below;
    while (above < 2 * tensor - below && !fits(above)) ++above;
    throw Error(name, ": parallel.tensor = ", tensor, " ranks cannot share model.", key, " = ",
                value, " evenly; the nearest value that divides model.n_head = ", spec.n_head,
                ", model.n_kv_head = ", spec.n_kv_head, " and model.n_ff = ", spec.n_ff, " is ",
                above < 2 * tensor - below ? above : below);
}

/// Context-parallel ranks have two chunks of each sequence.
void check_context(const Config& config, const std::string& name) {
    const int ranks = config.parallel.context, length = config.sequence_length(),
              chunks = 2 * ranks;
    if (ranks == 1 || length % chunks == 0) return;
    const int below = length / chunks * chunks, above = below + chunks;
    const bool is_below =
        below > 0 && (length - below <= above - length || above > config.model.n_ctx);
    throw Error(name, ": ", config.batch.sequence_length ? "batch.sequence_length" : "model.n_ctx",
                " = ", length, " cannot be cut into 2 · parallel.context = ", chunks,
                " equal chunks; the nearest value that can is ", is_below ? below : above);
}

void check_schedule(const Config& config, const std::string& name) {
    const auto& schedule = config.schedule;
    const int given = (schedule.steps > 0) + (schedule.tokens > 0) + (schedule.epochs > 0);
    if (given != 1)
        throw Error(name,
                    ": exactly one of schedule.steps, schedule.tokens and schedule.epochs must say "
                    "how long the run is, "
                    "but ",
                    given == 0   ? "none does"
                    : given == 2 ? "two do"
                                 : "all three do",
                    given == 0 ? "; set one of them" : "; set the others to 0");
    // Else the number of steps depends on the data, and on the batches that a resumed run had before.
    if (schedule.steps == 0) return;
    const int64_t per_step = config.batch.tokens_per_step, steps = schedule.steps;
    if (saturating_product(steps, per_step) == std::numeric_limits<int64_t>::max())
        throw Error(name, ": schedule.steps = ", steps, " of batch.tokens_per_step = ", per_step,
                    " tokens are more tokens than can be counted; lower one of them");
    if (schedule.warmup_steps > steps)
        throw Error(name, ": schedule.warmup_steps = ", schedule.warmup_steps,
                    " is more than the run's ", steps,
                    " steps; shorten the warm-up or lengthen the run");
}

}  // namespace

DecoderSpec spec_of(const Config& config, int64_t vocab_size) {
    return decoder_spec(config, vocab_size, "the model");
}

Config parse_config(const std::string& text, const std::string& name,
                    const std::vector<std::string>& overrides) {
    Config config;
    read_config(config, text, name);
    for (const std::string& override_text : overrides) apply_override(config, override_text);
    check_model(config, name);
    check_batch(config, name);
    check_parallel(config, name);
    check_context(config, name);
    check_schedule(config, name);
    return config;
}

Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
    const MappedFile mapped(file);
    return parse_config(std::string(mapped.text()), file.string(), overrides);
}

std::string to_json(const Config& config) {
    Json root;
    for (const ConfigKey& key : config_keys()) {
        const std::string section(section_of_key(key.path));
        Json& parent = section.empty() ? root : root[section];
        parent[std::string(name_of_key(key.path))] = value_of(config, key);
    }
    return to_text(root, 4) + "\n";
}

std::vector<std::string> config_differences(const Config& from, const Config& to) {
    std::vector<std::string> differences;
    for (const ConfigKey& key : config_keys()) {
        const Json before = value_of(from, key), after = value_of(to, key);
        if (before != after)
            differences.push_back(
                concat(key.path, " changed from ", to_text(before), " to ", to_text(after)));
    }
    return differences;
}

std::map<std::string, std::string> config_values(const Config& config) {
    std::map<std::string, std::string> values;
    for (const ConfigKey& key : config_keys())
        values[std::string(key.path)] = to_text(value_of(config, key));
    return values;
}

}  // namespace train_gpt
