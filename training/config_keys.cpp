#include "training/config_keys.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <type_traits>

#include "base/error.h"

namespace train_gpt {

namespace {

constexpr KeyRule between(double low, double high) { return {.low = low, .high = high}; }
constexpr KeyRule at_least(double low) { return {.low = low}; }
constexpr KeyRule greater_than(double low) { return {.low = low, .above_low = true}; }
constexpr KeyRule above_up_to(double low, double high) {
    return {.low = low, .high = high, .above_low = true};
}
constexpr KeyRule one_of(std::initializer_list<std::string_view> words) {
    KeyRule rule;
    for (const std::string_view word : words) rule.word_list[rule.word_count++] = word;
    return rule;
}
/// The words that a OneOf accepts.
template <class Value>
constexpr KeyRule one_of() {
    KeyRule rule;
    for (const Word<Value>& known : WordsOf<Value>::list)
        rule.word_list[rule.word_count++] = known.word;
    return rule;
}
constexpr KeyRule any_text() { return {}; }

constexpr double max_steps = 1099511627776.0;  // 2^40
constexpr double max_tokens = max_exact_integer;

// A key's path in the JSON file is its path in the struct.
#define KEY(member) #member, [](Config & config) -> KeyField { return &config.member; }

constexpr ConfigKey table[] = {
    {KEY(description), any_text(), "A note for people; the program does not read it."},
    {KEY(run_dir), any_text(),
     "The run's folder: checkpoints, metrics, resolved configuration and manifest. The same "
     "command line continues "
     "the run that it finds there."},
    {KEY(seed), at_least(0),
     "Initial weights, order of the samples and every other random number are functions of the "
     "seed and the step."},
    {KEY(device), one_of({"auto", "cpu", "cuda"}),
     "Where the run computes; `auto` takes a GPU when the build and the machine have one."},

    {KEY(model.n_layer), between(1, 4096), "Transformer blocks."},
    {KEY(model.n_head), between(1, 65536),
     "Attention heads of a block; must divide `model.n_embd`."},
    {KEY(model.n_embd), between(1, 262144), "Width of the residual stream (channels)."},
    {KEY(model.n_ctx), between(1, 16777216),
     "Learned positions: the longest sequence the model can read."},
    {KEY(model.vocab_size), between(0, 16777216), "Number of tokens; 0: the tokenizer's."},
    {KEY(model.init_from), any_text(),
     "A checkpoint whose weights start this run, with a fresh optimizer; empty: random "
     "weights."},

    {KEY(tokenizer.path), any_text(),
     "The tokenizer: a folder or a file such as `tokenizer.json`."},

    {KEY(data.train), any_text(),
     "Token shards to train on, as a glob such as `data/quickstart/train_*.bin`; `synthetic`: "
     "random tokens, for benchmarks without data. Or a list of up to 64 sources "
     "`{\"glob\": …, \"weight\": 1, \"name\": \"web\"}`: samples are drawn from each in "
     "the share of its weight, each of a source's once before one comes again, and "
     "`metrics.jsonl` has each one's loss and tokens."},
    {KEY(data.val), any_text(),
     "Token shards to evaluate on, as a glob; `synthetic` as above; empty: no validation."},
    {KEY(data.document_mask), any_text(),
     "A token sees its own document only, whose positions begin at 0; needs a tokenizer with "
     "an end-of-text token, which separates documents. (FLOPs are counted as without "
     "it.)"},

    {KEY(batch.tokens_per_step), between(1, 4294967296.0),
     "Tokens that one optimizer step sees over all ranks; a whole number of micro-batches. "
     "Gradient accumulation "
     "follows from it."},
    {KEY(batch.micro_batch), between(0, 1048576),
     "Sequences that are computed at once on one device; 0: as many as are fast, fit into "
     "memory and feed all ranks, chosen when the run starts and kept."},
    {KEY(batch.sequence_length), between(0, 16777216),
     "Tokens of a sequence, at most `model.n_ctx`; 0: `model.n_ctx`."},

    // AdamW computes in fp32, where these must not become 0, 1 or infinite.
    {KEY(optimizer.learning_rate), above_up_to(0, 1e37), "AdamW's peak learning rate."},
    {KEY(optimizer.weight_decay), between(0, 1e6),
     "Decoupled weight decay, applied to matrices only."},
    {KEY(optimizer.beta1), between(0, 0.9999999), "Decay of the gradient's running mean."},
    {KEY(optimizer.beta2), between(0, 0.9999999), "Decay of the squared gradient's running mean."},
    {KEY(optimizer.epsilon), between(1e-37, 1e6), "Added to the denominator of AdamW's update."},
    {KEY(optimizer.grad_clip), at_least(0),
     "The gradient's global norm is scaled down to this; 0: no clipping."},

    {KEY(schedule.steps), between(0, max_steps),
     "Optimizer steps of the run. Exactly one of `steps`, `tokens` and `epochs` is not 0."},
    {KEY(schedule.tokens), between(0, max_tokens),
     "Length of the run in tokens, rounded up to whole steps."},
    {KEY(schedule.epochs), between(0, 1000000),
     "Length of the run in passes over the training data, rounded up to whole steps."},
    {KEY(schedule.max_minutes), at_least(0),
     "After this wall-clock time the run saves a checkpoint and ends, its schedule unchanged; 0: "
     "no limit."},
    {KEY(schedule.warmup_steps), between(0, max_steps),
     "Steps over which the learning rate rises linearly to its peak."},
    {KEY(schedule.decay), one_of<Decay>(),
     "How the learning rate falls after the warm-up; `wsd` (warm-up, stable, decay): constant, "
     "then linear over "
     "the last `decay_fraction` of the steps."},
    {KEY(schedule.decay_fraction), above_up_to(0, 1),
     "`wsd` only: the share of all steps that the decay takes."},
    {KEY(schedule.final_fraction), between(0, 1),
     "The last step's learning rate as a fraction of `optimizer.learning_rate` (not with "
     "`constant`)."},

    {KEY(precision.dtype), one_of<std::optional<DType>>(),
     "Type of parameters and activations; masters, moments and gradients are fp32 always. "
     "`auto`: bf16 where the "
     "device multiplies it natively."},
    {KEY(precision.recompute), one_of<std::optional<Recompute>>(),
     "What the backward pass computes again instead of keeping: nothing, the cheap "
     "element-wise results, or whole "
     "blocks. Saves memory, costs time. `auto`: the least with which the run fits."},
    {KEY(precision.tf32), one_of<bool>(),
     "On a GPU, with `precision.dtype` fp32: matrix products on tensor cores, their operands "
     "rounded to TF32's 10 bits of "
     "mantissa. Several times faster, for comparisons less exact."},

    {KEY(checkpoint.every), between(0, max_steps),
     "Steps between checkpoints; 0: only at the end."},
    {KEY(checkpoint.keep), between(0, 1000000), "How many of the newest checkpoints stay; 0: all."},

    {KEY(evaluation.every), between(0, max_steps),
     "Steps between evaluations; 0: only at the end."},
    {KEY(evaluation.max_tokens), between(0, max_tokens),
     "Tokens of the validation split that an evaluation reads; 0: all of it."},
    {KEY(evaluation.hellaswag), any_text(),
     "HellaSwag's published JSONL file, to report accuracy with each evaluation; empty: not "
     "evaluated."},

    {KEY(sampling.every), between(0, max_steps), "Steps between samples; 0: none during training."},
    {KEY(sampling.prompt), any_text(),
     "The text that a sample continues; empty: the start of a document."},
    {KEY(sampling.max_tokens), between(1, 16777216), "Tokens of a sample."},
    {KEY(sampling.temperature), between(0, 1000),
     "Logits are divided by this before the softmax; 0: always the likeliest token."},
    {KEY(sampling.top_k), between(0, 16777216),
     "Draw from the k likeliest tokens only; 0: from all."},
    {KEY(sampling.top_p), above_up_to(0, 1),
     "Draw from the smallest set of tokens whose probabilities add up to this."},
    {KEY(sampling.seed), at_least(0), "Seed of the samples' random numbers."},
    {KEY(sampling.samples), between(0, 1000),
     "Samples printed at the end of a run; 0 prints none."},

    {KEY(log.every), between(1, max_steps),
     "Steps between lines of the log and of `metrics.jsonl`."},
    {KEY(log.progress), one_of<ProgressStyle>(),
     "`line`: one progress line that is rewritten; `lines`: a line a step; `auto`: the first "
     "on a terminal, the "
     "second elsewhere."},

    {KEY(kernels.gemm), one_of<KernelSettings::Gemm>(),
     "Matrix products on the CPU: oneDNN (where the build found it), the project's own kernel, "
     "or the first that "
     "is there."},
    {KEY(kernels.attention), one_of<KernelSettings::Attention>(),
     "Attention on GPUs: the project's own kernels; cuDNN, where it is found and can compute "
     "it (bf16, without a mask "
     "of documents), for whose backward pass up to 2 GiB of scratch memory are planned; or the "
     "faster of the two, as "
     "timed at the start of the run."},
    {KEY(kernels.autotune), one_of<bool>(),
     "On a GPU: time the algorithms that cuBLASLt offers for each shape, and where "
     "`kernels.attention` is `auto` both "
     "attentions, before the first step and keep the fastest; or take cuBLASLt's first and our "
     "own attention. A resumed run "
     "uses what it chose before."},

    {KEY(parallel.zero), between(0, 2),
     "What data parallelism splits over ranks (ZeRO's stages): 0: nothing; 1: optimizer state; "
     "2: gradient sums as well, "
     "which are then reduced in every micro-batch."},
    {KEY(parallel.bucket_mb), above_up_to(0, 1048576),
     "Gradients are reduced in buckets of whole blocks, at least so many MiB of fp32 each."},
    {KEY(parallel.reduce_dtype), one_of<DType>(),
     "What gradients are sent as between ranks; `bf16` halves the traffic and rounds them."},
    {KEY(parallel.timeout_seconds), greater_than(0),
     "A rank that does nothing for so long is taken for hung, and the job ends."},
};

#undef KEY

std::string number_text(double value) {
    char text[32];
    const bool is_exact_integer =
        std::abs(value) <= max_exact_integer && value == std::floor(value);
    std::snprintf(text, sizeof text, is_exact_integer ? "%.0f" : "%.15g", value);
    return text;
}

/// `one of "auto", "cpu" or "cuda"`.
std::string words_text(std::span<const std::string_view> words) {
    std::string text = "one of";
    for (size_t i = 0; i < words.size(); ++i)
        text += concat(i == 0 ? " \"" : i + 1 == words.size() ? " or \"" : ", \"", words[i], "\"");
    return text;
}

/// A single source as its glob, several as a list.
Json to_value(const TrainSources& sources) {
    if (sources.empty()) return "";
    if (sources.size() == 1 && sources[0].name == sources[0].glob) return sources[0].glob;
    Json list = Json::array();
    for (const auto& source : sources)
        list.push_back({{"glob", source.glob}, {"weight", source.weight}, {"name", source.name}});
    return list;
}

}  // namespace

bool is_text(const KeyField& field) {
    return std::visit(
        [](auto* value) {
            using Value = std::remove_pointer_t<decltype(value)>;
            return std::is_same_v<Value, std::string> || is_one_of<Value>;
        },
        field);
}
bool is_switch(const KeyField& field) { return std::holds_alternative<bool*>(field); }
bool is_sources(const KeyField& field) { return std::holds_alternative<TrainSources*>(field); }
bool is_real(const KeyField& field) { return std::holds_alternative<double*>(field); }

std::span<const ConfigKey> config_keys() { return table; }

const ConfigKey* find_config_key(std::string_view path) {
    for (const ConfigKey& key : table)
        if (key.path == path) return &key;
    return nullptr;
}

std::string_view section_of_key(std::string_view path) {
    const size_t dot = path.find('.');
    return dot == std::string_view::npos ? "" : path.substr(0, dot);
}

std::string_view name_of_key(std::string_view path) { return path.substr(path.rfind('.') + 1); }

std::vector<std::string_view> config_sections() {
    std::vector<std::string_view> names;
    for (const ConfigKey& key : table) {
        const std::string_view section = section_of_key(key.path);
        if (!section.empty() && (names.empty() || names.back() != section))
            names.push_back(section);
    }
    return names;
}

bool is_config_section(std::string_view name) {
    const std::vector<std::string_view> names = config_sections();
    return std::find(names.begin(), names.end(), name) != names.end();
}

std::string_view first_key_of(std::string_view section) {
    return std::find_if(std::begin(table), std::end(table),
                        [&](const ConfigKey& key) { return section_of_key(key.path) == section; })
        ->path;
}

Json value_of(Config config, const ConfigKey& key) {
    return std::visit(
        [](auto* value) {
            using Value = std::remove_pointer_t<decltype(value)>;
            if constexpr (std::is_same_v<Value, TrainSources>)
                return to_value(*value);
            else if constexpr (is_one_of<Value>)
                return Json(value->word());
            else
                return Json(*value);
        },
        key.field(config));
}

std::string rule_text(const ConfigKey& key) {
    const KeyRule& rule = key.rule;
    Config defaults;
    const KeyField field = key.field(defaults);
    if (rule.word_count > 0) return words_text(rule.words());
    if (is_text(field)) return "a text";
    if (is_switch(field)) return "true or false";
    if (is_sources(field)) return concat("a text, or a list of sources ", source_shape);
    std::string text = is_real(field) ? "a number" : "a whole number";
    const bool has_high = rule.high < infinity;
    if (!rule.above_low && has_high)
        return text + " from " + number_text(rule.low) + " to " + number_text(rule.high);
    text += (rule.above_low ? " greater than " : " of at least ") + number_text(rule.low);
    if (has_high) text += " and at most " + number_text(rule.high);
    return text;
}

}  // namespace train_gpt
