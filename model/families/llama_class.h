// What the families that follow Llama have in common: RMSNorm, SwiGLU, rotary positions, heads that
// share keys and values, and the names of tensors and of keys in config.json.
#pragma once
#include "model/families/expert_config.h"
#include "model/families/family.h"
#include "model/families/window_config.h"

namespace train_gpt {

/// A key of config.json that says whether a model has biases.
struct BiasKey {
    const char* key = nullptr;  // null: the family has no such key
    Biases if_true = Biases::attention;
    bool fallback = false;  // what files without the key mean
};

/// What files mean that leave these out.
struct FileDefaults {
    double rope_theta = 10000, norm_epsilon = 1e-6;
    int head_size = 0;  // 0: n_embd / n_head
};

/// Where such a family differs from the others.
struct LlamaClass {
    const char *model_type, *title, *architecture;  // the class in transformers
    double norm_epsilon = 1e-5, rope_theta = 10000;
    Biases biases = Biases::none;  // if nothing else is said
    BiasKey bias_key = {};
    QkNormKind qk_norm = QkNormKind::off;
    int head_size = 0;                   // 0: n_embd / n_head
    bool n_head_divides_n_embd = false;  // transformers refuses other widths, whatever head_dim is
    bool heads_fill_n_embd = false;      // n_head · head_size is n_embd
    FileDefaults file = {};
    WindowKeys windows = {};
    /// Experts that its models have if nothing else is said; none: they have MLPs.
    ExpertSpec experts = {};
    ExpertKeys expert_keys = {};
    ExpertNames expert_names = {};
    bool sinks = false, clamped = false;  // attention with sinks, and SwiGLU that is clamped
    int window = 0;                       // of every other layer, if nothing else is said
    bool yarn = false;                    // rotation where config.json says nothing of it
    /// `constants`: entries that config.json gets for all models of the family. `only`: further
    /// such entries, of which files with other values are refused, since the same weights then
    /// compute something else. Both are JSON objects.
    const char *constants = "{}", *only = "{}";
};

Family llama_class(const LlamaClass& of);

/// The names of tensors.
Registry llama_class_registry(const DecoderSpec& spec, const ExpertNames& experts = {});
/// Frequencies, which older versions of transformers saved.
bool is_llama_class_buffer(const std::string& name);

}  // namespace train_gpt
