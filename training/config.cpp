#include "training/config.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "dataloader/mixture.h"

namespace train_gpt {

namespace {

using json = nlohmann::ordered_json;  // keeps the keys' order

/// Where a key's value lives in a Config; the pointer's type is the key's type.
using Sources = std::vector<Config::Data::Source>;
using Field = std::variant<int*, int64_t*, uint64_t*, double*, bool*, std::string*, Sources*>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMaxExactInteger =
    9007199254740992.0;  // 2^53: up to here a double holds every integer

/// Which values of a key are valid: numbers between two bounds, or one of a few words; any text
/// otherwise.
struct Rule {
    double low = -kInfinity, high = kInfinity;
    bool above_low = false;  // low itself is not valid
    std::vector<std::string> words;
};

Rule between(double low, double high) { return {low, high, false, {}}; }
Rule at_least(double low) { return {low, kInfinity, false, {}}; }
Rule greater_than(double low) { return {low, kInfinity, true, {}}; }
Rule above_up_to(double low, double high) { return {low, high, true, {}}; }
Rule one_of(std::vector<std::string> words) {
    return {-kInfinity, kInfinity, false, std::move(words)};
}
Rule any_text() { return {}; }

struct Key {
    std::string path;
    Field (*field)(Config&);
    Rule rule;
    std::string doc;
};

// A key's path in the JSON file is its path in the struct.
#define KEY(member) #member, [](Config & config) -> Field { return &config.member; }

constexpr double kMaxSteps = 1099511627776.0;  // 2^40
constexpr double kMaxTokens = kMaxExactInteger;
constexpr const char* kSourceShape = R"({"glob": text, "weight": number above 0, "name": text})";

/// Every key of the configuration, in the order in which it is printed. Parser, checks, output,
/// reference table and schema are all made from this one table.
const std::vector<Key>& keys() {
    static const std::vector<Key> table = {
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
         "an end-of-text token, which is what tells documents apart. (FLOPs are counted as without "
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
        {KEY(optimizer.beta2), between(0, 0.9999999),
         "Decay of the squared gradient's running mean."},
        {KEY(optimizer.epsilon), between(1e-37, 1e6),
         "Added to the denominator of AdamW's update."},
        {KEY(optimizer.grad_clip), at_least(0),
         "The gradient's global norm is scaled down to this; 0: no clipping."},

        {KEY(schedule.steps), between(0, kMaxSteps),
         "Optimizer steps of the run. Exactly one of `steps`, `tokens` and `epochs` is not 0."},
        {KEY(schedule.tokens), between(0, kMaxTokens),
         "Length of the run in tokens, rounded up to whole steps."},
        {KEY(schedule.epochs), between(0, 1000000),
         "Length of the run in passes over the training data, rounded up to whole steps."},
        {KEY(schedule.max_minutes), at_least(0),
         "After this wall-clock time the run ends behind a checkpoint, its schedule unchanged; 0: "
         "no limit."},
        {KEY(schedule.warmup_steps), between(0, kMaxSteps),
         "Steps over which the learning rate rises linearly to its peak."},
        {KEY(schedule.decay), one_of({"cosine", "linear", "constant", "wsd"}),
         "How the learning rate falls after the warm-up; `wsd` (warm-up, stable, decay): constant, "
         "then linear over "
         "the last `decay_fraction` of the steps."},
        {KEY(schedule.decay_fraction), above_up_to(0, 1),
         "`wsd` only: the share of all steps that the decay takes."},
        {KEY(schedule.final_fraction), between(0, 1),
         "The last step's learning rate as a fraction of `optimizer.learning_rate` (not with "
         "`constant`)."},

        {KEY(precision.dtype), one_of({"auto", "bf16", "fp32"}),
         "Type of parameters and activations; masters, moments and gradients are fp32 always. "
         "`auto`: bf16 where the "
         "device multiplies it natively."},
        {KEY(precision.recompute), one_of({"auto", "none", "elementwise", "block"}),
         "What the backward pass computes again instead of keeping: nothing, the cheap "
         "element-wise results, or whole "
         "blocks. Saves memory, costs time. `auto`: the least with which the run fits."},
        {KEY(precision.tf32), one_of({"on", "off"}),
         "On a GPU, with `precision.dtype` fp32: matrix products on tensor cores, their operands "
         "rounded to TF32's 10 bits of "
         "mantissa. Several times faster, for comparisons less exact."},

        {KEY(checkpoint.every), between(0, kMaxSteps),
         "Steps between checkpoints; 0: only at the end."},
        {KEY(checkpoint.keep), between(0, 1000000),
         "How many of the newest checkpoints stay; 0: all."},

        {KEY(evaluation.every), between(0, kMaxSteps),
         "Steps between evaluations; 0: only at the end."},
        {KEY(evaluation.max_tokens), between(0, kMaxTokens),
         "Tokens of the validation split that an evaluation reads; 0: all of it."},
        {KEY(evaluation.hellaswag), any_text(),
         "HellaSwag's published JSONL file, to report accuracy with each evaluation; empty: not "
         "evaluated."},

        {KEY(sampling.every), between(0, kMaxSteps),
         "Steps between samples; 0: none during training."},
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

        {KEY(log.every), between(1, kMaxSteps),
         "Steps between lines of the log and of `metrics.jsonl`."},
        {KEY(log.progress), one_of({"auto", "line", "lines"}),
         "`line`: one progress line that is rewritten; `lines`: a line a step; `auto`: the first "
         "on a terminal, the "
         "second elsewhere."},

        {KEY(kernels.gemm), one_of({"auto", "onednn", "own"}),
         "Matrix products on the CPU: oneDNN (where the build found it), the project's own kernel, "
         "or the first that "
         "is there."},
        {KEY(kernels.attention), one_of({"auto", "own", "cudnn"}),
         "Attention on GPUs: the project's own kernels; cuDNN, where it is found and can compute "
         "it (bf16, without a mask "
         "of documents), for whose backward pass up to 2 GiB of scratch memory are planned; or the "
         "faster of the two, as "
         "timed at the start of the run."},
        {KEY(kernels.autotune), one_of({"on", "off"}),
         "On a GPU: time the algorithms that cuBLASLt offers for each shape, and where "
         "`kernels.attention` is `auto` both "
         "attentions, before the first step and keep the fastest; or take cuBLASLt's first and our "
         "own attention. A run that goes "
         "on uses what it chose before."},

        {KEY(parallel.zero), between(0, 2),
         "What data parallelism splits over ranks (ZeRO's stages): 0: nothing; 1: optimizer state; "
         "2: gradient sums as well, "
         "which are then reduced in every micro-batch."},
        {KEY(parallel.bucket_mb), above_up_to(0, 1048576),
         "Gradients are reduced in buckets of whole blocks, at least so many MiB of fp32 each."},
        {KEY(parallel.reduce_dtype), one_of({"fp32", "bf16"}),
         "What gradients are sent as between ranks; `bf16` halves the traffic and rounds them."},
        {KEY(parallel.timeout_seconds), greater_than(0),
         "A rank that does nothing for so long is taken for hung, and the job ends."},
    };
    return table;
}

#undef KEY

const Key* find_key(const std::string& path) {
    for (const Key& key : keys())
        if (key.path == path) return &key;
    return nullptr;
}

std::string section_of(const std::string& path) {
    const size_t dot = path.find('.');
    return dot == std::string::npos ? "" : path.substr(0, dot);
}

std::string name_of(const std::string& path) { return path.substr(path.rfind('.') + 1); }

std::vector<std::string> sections() {
    std::vector<std::string> names;
    for (const Key& key : keys()) {
        const std::string section = section_of(key.path);
        if (!section.empty() && (names.empty() || names.back() != section))
            names.push_back(section);
    }
    return names;
}

/// Insertions, deletions, substitutions and swaps of neighbours that turn a into b (optimal string
/// alignment).
size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        before = std::exchange(above, row);
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            row[j] =
                std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], before[j - 2] + 1);
        }
    }
    return row[b.size()];
}

/// 0 for equal words, 1 for words that share nothing.
double unlikeness(std::string_view a, std::string_view b) {
    const size_t longer = std::max(a.size(), b.size());
    return longer == 0 ? 0 : static_cast<double>(edit_distance(a, b)) / static_cast<double>(longer);
}

/// Whether one word can be a slip of the pen for the other.
constexpr double most_unlike = 0.4;

/// What other programs call some keys, by the name alone.
const std::map<std::string, std::string>& other_names() {
    static const std::map<std::string, std::string> names = {
        {"lr", "optimizer.learning_rate"},
        {"max_lr", "optimizer.learning_rate"},
        {"min_lr", "schedule.final_fraction"},
        {"eps", "optimizer.epsilon"},
        {"max_grad_norm", "optimizer.grad_clip"},
        {"clip_grad", "optimizer.grad_clip"},
        {"batch_size", "batch.tokens_per_step"},
        {"total_batch_size", "batch.tokens_per_step"},
        {"global_batch_size", "batch.tokens_per_step"},
        {"gradient_accumulation_steps", "batch.tokens_per_step"},
        {"device_batch_size", "batch.micro_batch"},
        {"micro_batch_size", "batch.micro_batch"},
        {"block_size", "batch.sequence_length"},
        {"seq_len", "batch.sequence_length"},
        {"seq_length", "batch.sequence_length"},
        {"max_iters", "schedule.steps"},
        {"max_steps", "schedule.steps"},
        {"train_iters", "schedule.steps"},
        {"num_iterations", "schedule.steps"},
        {"warmup_iters", "schedule.warmup_steps"},
        {"eval_interval", "evaluation.every"},
        {"save_interval", "checkpoint.every"},
        {"hidden_size", "model.n_embd"},
        {"d_model", "model.n_embd"},
        {"num_layers", "model.n_layer"},
        {"depth", "model.n_layer"},
        {"num_heads", "model.n_head"},
        {"out_dir", "run_dir"},
        {"output_dir", "run_dir"}};
    return names;
}

/// A key of a section, as an example.
std::string first_key(const std::string& section) {
    return std::find_if(keys().begin(), keys().end(),
                        [&](const Key& key) { return section_of(key.path) == section; })
        ->path;
}

/// Empty where none is alike.
std::string nearest_section(const std::string& name) {
    const std::vector<std::string> names = sections();
    const auto nearest = std::min_element(
        names.begin(), names.end(),
        [&](const auto& a, const auto& b) { return unlikeness(name, a) < unlikeness(name, b); });
    return unlikeness(name, *nearest) <= most_unlike ? *nearest : "";
}

/// The end of a sentence about an unknown name.
std::string suggestion(const std::string& what, const std::string& nearest) {
    return nearest.empty() ? concat("`train_gpt config` lists all keys")
                           : concat("the nearest valid ", what, " is \"", nearest, "\"");
}

std::string shorten(const std::string& text) {
    constexpr size_t kLongest = 80;
    if (text.size() <= kLongest) return text;
    size_t end = kLongest;  // not inside a UTF-8 character
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    return text.substr(0, end) + "…";
}

std::string number_text(double value) {
    char text[32];
    const bool is_exact_integer = std::abs(value) <= kMaxExactInteger && value == std::floor(value);
    std::snprintf(text, sizeof text, is_exact_integer ? "%.0f" : "%.15g", value);
    return text;
}

bool is_text(const Field& field) { return std::holds_alternative<std::string*>(field); }
bool is_switch(const Field& field) { return std::holds_alternative<bool*>(field); }
bool is_sources(const Field& field) { return std::holds_alternative<Sources*>(field); }
bool is_real(const Field& field) { return std::holds_alternative<double*>(field); }

/// "a whole number from 1 to 4096".
std::string rule_text(const Key& key, const Field& field) {
    const Rule& rule = key.rule;
    if (!rule.words.empty()) {
        std::string text = "one of";
        for (size_t i = 0; i < rule.words.size(); ++i)
            text += (i == 0                       ? " \""
                     : i + 1 == rule.words.size() ? " or \""
                                                  : ", \"") +
                    rule.words[i] + "\"";
        return text;
    }
    if (is_text(field)) return "a text";
    if (is_switch(field)) return "true or false";
    if (is_sources(field)) return concat("a text, or a list of sources ", kSourceShape);
    std::string text = is_real(field) ? "a number" : "a whole number";
    const bool has_high = rule.high < kInfinity;
    if (!rule.above_low && has_high)
        return text + " from " + number_text(rule.low) + " to " + number_text(rule.high);
    text += (rule.above_low ? " greater than " : " of at least ") + number_text(rule.low);
    if (has_high) text += " and at most " + number_text(rule.high);
    return text;
}

[[noreturn]] void refuse(const std::string& origin, const Key& key, const Field& field,
                         const std::string& value) {
    throw Error(origin, ": ", key.path, " = ", shorten(value), " is not valid: it must be ",
                rule_text(key, field));
}

bool within(const Rule& rule, double value) {
    return (rule.above_low ? value > rule.low : value >= rule.low) && value <= rule.high;
}

/// An integer from JSON, where 5e5 and 500000.0 are integers too; false when it is none or does not
/// fit.
template <class Integer>
bool read_integer(const json& value, Integer& out) {
    using Limits = std::numeric_limits<Integer>;
    if (value.is_number_unsigned()) {
        const auto number = value.get<uint64_t>();
        if (number > static_cast<uint64_t>(Limits::max())) return false;
        out = static_cast<Integer>(number);
    } else if (value.is_number_integer()) {
        const auto number = value.get<int64_t>();
        if (std::is_unsigned_v<Integer> || number < static_cast<int64_t>(Limits::min()))
            return false;
        out = static_cast<Integer>(number);
    } else if (value.is_number_float()) {
        const double number = value.get<double>();
        if (std::trunc(number) != number || std::abs(number) > kMaxExactInteger) return false;
        if (number < static_cast<double>(Limits::min()) ||
            number > static_cast<double>(Limits::max()))
            return false;
        out = static_cast<Integer>(number);
    } else {
        return false;
    }
    return true;
}

/// A text of JSON that can name a file; nothing where it is none.
std::optional<std::string> read_text(const json& value) {
    if (!value.is_string()) return {};
    auto text = value.get<std::string>();
    if (text.find('\0') != std::string::npos) return {};  // no path and no prompt has one
    return text;
}

/// Sources of training data: a glob, or a list of objects; nothing where it is neither. Throws Error for what is wrong
/// in a list `where`.
std::optional<Sources> read_sources(const json& value, const std::string& where) {
    if (const auto glob = read_text(value)) {
        if (glob->empty()) return Sources{};
        return Sources{{.glob = *glob, .name = *glob}};
    }
    if (!value.is_array()) return {};
    if (value.empty() || value.size() > Mixture::max_sources)
        throw Error(where, " lists ", value.size(), " sources; it may be 1 to ",
                    Mixture::max_sources);
    Sources sources;
    std::set<std::string> names;
    for (const json& entry : value) {
        const auto refuse = [&](const auto&... what) {
            throw Error(where, ": source ", sources.size() + 1, " of the list ", what...,
                        "; a source is ", kSourceShape);
        };
        if (!entry.is_object()) refuse("is ", shorten(entry.dump()));
        Config::Data::Source source;
        for (const auto& [name, item] : entry.items()) {
            const auto text = read_text(item);
            if (name == "glob" && text)
                source.glob = *text;
            else if (name == "name" && text)
                source.name = *text;
            else if (name == "weight" && item.is_number())
                source.weight = item.get<double>();
            else
                refuse("has \"", shorten(name), "\": ", shorten(item.dump()));
        }
        if (source.name.empty()) source.name = source.glob;
        if (source.glob.empty()) refuse("has no glob");
        if (!(source.weight > 0)) refuse("has the weight ", source.weight);
        if (!names.insert(source.name).second)
            refuse("has the name of one before it, \"", shorten(source.name), "\"");
        sources.push_back(std::move(source));
    }
    return sources;
}

/// Stores a JSON value in a key's field, or throws with the key's rule.
void assign(Config& config, const Key& key, const json& value, const std::string& origin) {
    const Field field = key.field(config);
    const bool valid = std::visit(
        [&](auto* target) {
            using Value = std::remove_pointer_t<decltype(target)>;
            if constexpr (std::is_same_v<Value, std::string>) {
                const auto text = read_text(value);
                if (!text) return false;
                const auto& words = key.rule.words;
                if (!words.empty() && std::find(words.begin(), words.end(), *text) == words.end())
                    return false;
                *target = *text;
                return true;
            } else if constexpr (std::is_same_v<Value, Sources>) {
                const auto sources = read_sources(value, concat(origin, ": ", key.path));
                if (sources) *target = *sources;
                return sources.has_value();
            } else if constexpr (std::is_same_v<Value, bool>) {
                if (value.is_boolean()) *target = value.get<bool>();
                return value.is_boolean();
            } else if constexpr (std::is_same_v<Value, double>) {
                if (!value.is_number() || !within(key.rule, value.get<double>())) return false;
                *target = value.get<double>();
                return true;
            } else {
                Value number{};
                if (!read_integer(value, number) || !within(key.rule, static_cast<double>(number)))
                    return false;
                *target = number;
                return true;
            }
        },
        field);
    if (!valid)
        refuse(origin, key, field, value.dump(-1, ' ', false, json::error_handler_t::replace));
}

[[noreturn]] void unknown_key(const std::string& origin, const std::string& path) {
    throw Error(origin, ": unknown key \"", shorten(path), "\"; ",
                suggestion("key", nearest_key(path)));
}

bool is_section(const std::string& name) {
    const std::vector<std::string> names = sections();
    return std::find(names.begin(), names.end(), name) != names.end();
}

/// Parses JSON with comments. Errors carry line and column; a key that stands twice in one object
/// is refused, since one of its values would be lost without a word.
json parse_json(const std::string& text, const std::string& name) {
    struct Object {
        std::set<std::string> keys;
        std::string key;  // the one being parsed
    };
    std::vector<Object> open;
    std::set<std::string> paths;  // "model.n_layer" may also stand as {"model": {"n_layer": …}}
    int arrays = 0;
    const auto path = [&] {
        std::string joined;
        for (const Object& object : open) joined += (joined.empty() ? "" : ".") + object.key;
        return joined;
    };
    const auto watch = [&](int, json::parse_event_t event, json& parsed) {
        if (event == json::parse_event_t::object_start) open.emplace_back();
        if (event == json::parse_event_t::object_end) open.pop_back();
        if (event == json::parse_event_t::array_start) ++arrays;
        if (event == json::parse_event_t::array_end) --arrays;
        if (event == json::parse_event_t::key) {
            open.back().key = parsed.get<std::string>();
            if (!open.back().keys.insert(open.back().key).second ||
                (arrays == 0 && !paths.insert(path()).second))
                throw Error(name, ": the key \"", shorten(path()),
                            "\" stands there twice; remove one of them");
        }
        return true;
    };
    if (text.find_first_not_of(" \t\r\n") == std::string::npos)
        throw Error(
            name,
            " is empty, but a configuration in JSON belongs here; start from one in configs/");
    try {
        return json::parse(text, watch, true, true);
    } catch (const json::parse_error& error) {
        // nlohmann's text: "[json.exception…] parse error at line 1, column 2: <what is wrong>".
        std::string what = error.what();
        const size_t at = what.find("column ");
        const size_t colon = at == std::string::npos ? at : what.find(": ", at);
        if (colon != std::string::npos) what.erase(0, colon + 2);
        throw Error(name, ", ", place_of(error, text), ": not valid JSON: ", what);
    } catch (const json::out_of_range&) {
        const std::string key = path();
        throw Error(name, ": ", key.empty() ? "a value" : key,
                    " is a number too large to represent");
    }
}

void read_section(Config& config, const std::string& prefix, const json& object,
                  const std::string& origin) {
    for (const auto& item : object.items()) {
        const std::string path = prefix + item.key();
        if (path == "$schema") continue;  // editors put it there
        if (const Key* key = find_key(path)) {
            assign(config, *key, item.value(), origin);
        } else if (prefix.empty() && is_section(path)) {
            if (!item.value().is_object())
                throw Error(origin, ": ", path, " = ", shorten(item.value().dump()),
                            " is not valid: it must be a section, an object such as { \"",
                            name_of(first_key(path)), "\": … }");
            read_section(config, path + ".", item.value(), origin);
        } else if (prefix.empty() && item.value().is_object()) {
            throw Error(origin, ": unknown section \"", shorten(path), "\"; ",
                        suggestion("section", nearest_section(path)));
        } else {
            unknown_key(origin, path);
        }
    }
}

/// Applies "section.key=value". The value is JSON; for a text it may stand without quotes.
void apply_override(Config& config, const std::string& text) {
    const std::string origin = "--set " + shorten(text);
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
        throw UsageError(origin, " is not an override; write --set section.key=value");
    const std::string path = text.substr(0, equals), raw = text.substr(equals + 1);
    const Key* key = find_key(path);
    if (!key) {
        if (is_section(path))
            throw Error(origin, ": ", path, " is a section; name one of its keys, such as ",
                        first_key(path));
        unknown_key(origin, path);
    }
    const Field field = key->field(config);
    json value = json::parse(raw, nullptr, false);
    // A list of sources that is no JSON is not a glob; "[ab]*.bin" is one.
    const size_t second = raw.find_first_not_of(" \t\n", 1);
    const bool is_list =
        value.is_array() || (raw.starts_with('[') && second != raw.npos && raw[second] == '{');
    const bool is_bare = is_text(field) || (is_sources(field) && !is_list);
    if (is_bare && !value.is_string()) value = raw;
    if (value.is_discarded()) refuse(origin, *key, field, raw);  // 1e400 ends here too
    if (is_bare) {
        try {
            (void)value.dump();
        } catch (const json::exception&) {
            throw Error(origin, ": the value is not valid UTF-8");
        }
    }
    assign(config, *key, value, origin);
}

/// a · b · c, or 2^63 - 1 when that is larger.
int64_t saturating_product(int64_t a, int64_t b, int64_t c = 1) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product))
        return std::numeric_limits<int64_t>::max();
    return product;
}

void check_model(const Config& config, const std::string& name) {
    const auto& model = config.model;
    if (model.n_embd % model.n_head != 0) {
        const int64_t size = std::max<int64_t>(1, (model.n_embd + model.n_head / 2) / model.n_head);
        throw Error(name, ": model.n_embd = ", model.n_embd,
                    " does not divide into model.n_head = ", model.n_head,
                    " heads of equal size; the nearest n_embd that does is ", size * model.n_head);
    }
    constexpr int kMaxHeadSize = 256;
    if (model.n_embd / model.n_head > kMaxHeadSize) {
        int heads = (model.n_embd + kMaxHeadSize - 1) / kMaxHeadSize;
        while (model.n_embd % heads != 0) ++heads;
        throw Error(name, ": model.n_embd / model.n_head = ", model.n_embd / model.n_head,
                    " is the size of a head, which may be ", kMaxHeadSize,
                    " at most; use n_head = ", heads, " or more");
    }
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
    if (schedule.epochs > 0) return;  // its number of steps depends on the data
    const int64_t per_step = config.batch.tokens_per_step;
    const int64_t steps =
        schedule.steps > 0 ? schedule.steps : (schedule.tokens + per_step - 1) / per_step;
    if (saturating_product(steps, per_step) == std::numeric_limits<int64_t>::max())
        throw Error(name, ": schedule.steps = ", steps, " of batch.tokens_per_step = ", per_step,
                    " tokens are more tokens than can be counted; lower one of them");
    if (schedule.warmup_steps > steps)
        throw Error(name, ": schedule.warmup_steps = ", schedule.warmup_steps,
                    " is more than the run's ", steps,
                    " steps; shorten the warm-up or lengthen the run");
}

/// As read_sources() reads it: one source alone as its glob.
json to_value(const Sources& sources) {
    if (sources.empty()) return "";
    if (sources.size() == 1 && sources[0].name == sources[0].glob) return sources[0].glob;
    json list = json::array();
    for (const auto& source : sources)
        list.push_back({{"glob", source.glob}, {"weight", source.weight}, {"name", source.name}});
    return list;
}

/// A key's value as JSON; with a const Config through a copy, since the table hands out pointers to
/// write to.
json value_of(Config config, const Key& key) {
    return std::visit(
        [](auto* value) {
            if constexpr (std::is_same_v<decltype(value), Sources*>)
                return to_value(*value);
            else
                return json(*value);
        },
        key.field(config));
}

/// The object in which a key stands: its section, or the root.
json& parent_of(const Key& key, json& root) {
    const std::string section = section_of(key.path);
    return section.empty() ? root : root[section];
}

/// The JSON Schema of a source in a list of sources.
json source_schema() {
    return {{"type", "object"},
            {"additionalProperties", false},
            {"required", {"glob"}},
            {"properties",
             {{"glob", {{"type", "string"}}},
              {"weight", {{"type", "number"}, {"exclusiveMinimum", 0}}},
              {"name", {{"type", "string"}}}}}};
}

}  // namespace

Config parse_config(const std::string& text, const std::string& name,
                    const std::vector<std::string>& overrides) {
    Config config;
    const json root = parse_json(text, name);
    if (!root.is_object()) throw Error(name, ": a configuration must be one JSON object { … }");
    read_section(config, "", root, name);
    for (const std::string& override_text : overrides) apply_override(config, override_text);
    check_model(config, name);
    check_batch(config, name);
    check_schedule(config, name);
    return config;
}

Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
    const MappedFile mapped(file);
    return parse_config(std::string(mapped.text()), file.string(), overrides);
}

std::string to_json(const Config& config) {
    json root;
    for (const Key& key : keys()) parent_of(key, root)[name_of(key.path)] = value_of(config, key);
    return root.dump(4) + "\n";
}

std::vector<std::string> config_differences(const Config& from, const Config& to) {
    std::vector<std::string> differences;
    for (const Key& key : keys()) {
        const json before = value_of(from, key), after = value_of(to, key);
        if (before != after)
            differences.push_back(
                concat(key.path, " changed from ", before.dump(), " to ", after.dump()));
    }
    return differences;
}

std::map<std::string, std::string> config_values(const Config& config) {
    std::map<std::string, std::string> values;
    for (const Key& key : keys()) values[key.path] = value_of(config, key).dump();
    return values;
}

std::vector<KeyDescription> describe_keys() {
    std::vector<KeyDescription> descriptions;
    Config defaults;
    for (const Key& key : keys()) {
        const Field field = key.field(defaults);
        const char* type = is_text(field)      ? "text"
                           : is_switch(field)  ? "switch"
                           : is_sources(field) ? "text or list"
                           : is_real(field)    ? "number"
                                               : "integer";
        descriptions.push_back(
            {key.path, type, value_of(defaults, key).dump(), rule_text(key, field), key.doc});
    }
    return descriptions;
}

std::string nearest_key(const std::string& path) {
    if (const auto known = other_names().find(name_of(path)); known != other_names().end())
        return known->second;
    // The name says more than the section: a right name under a wrong section, or under none, is
    // near.
    std::string nearest;
    double least = kInfinity;
    for (const Key& key : keys()) {
        const double name = unlikeness(name_of(path), name_of(key.path));
        const double section = path.find('.') == std::string::npos
                                   ? 0
                                   : unlikeness(section_of(path), section_of(key.path));
        if (name > most_unlike || name + 0.5 * section >= least) continue;
        least = name + 0.5 * section;
        nearest = key.path;
    }
    return nearest;
}

std::string config_schema() {
    json root = {
        {"$schema", "https://json-schema.org/draft/2020-12/schema"},
        {"title", "train_gpt configuration"},
        {"type", "object"},
        {"additionalProperties", false},
        {"properties", {{"$schema", {{"type", "string"}}}}},
    };
    Config defaults;
    const auto number = [](double value) {
        const bool whole = std::trunc(value) == value && std::abs(value) <= kMaxExactInteger;
        return whole ? json(static_cast<int64_t>(value)) : json(value);
    };
    for (const Key& key : keys()) {
        const Field field = key.field(defaults);
        const Rule& rule = key.rule;
        json property;
        property["description"] = key.doc;
        property["type"] = is_text(field)      ? json("string")
                           : is_switch(field)  ? json("boolean")
                           : is_sources(field) ? json({"string", "array"})
                           : is_real(field)    ? json("number")
                                               : json("integer");
        if (is_sources(field)) property["items"] = source_schema();
        if (!rule.words.empty()) property["enum"] = rule.words;
        if (rule.low > -kInfinity)
            property[rule.above_low ? "exclusiveMinimum" : "minimum"] = number(rule.low);
        if (rule.high < kInfinity) property["maximum"] = number(rule.high);
        property["default"] = value_of(defaults, key);
        json* properties = &root["properties"];
        const std::string section = section_of(key.path);
        if (!section.empty()) {
            json& object = (*properties)[section];
            if (object.is_null())
                object = {{"type", "object"},
                          {"additionalProperties", false},
                          {"properties", json::object()}};
            properties = &object["properties"];
        }
        (*properties)[name_of(key.path)] = std::move(property);
    }
    return root.dump(2) + "\n";
}

}  // namespace train_gpt
