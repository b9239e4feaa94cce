#include "model/families/decoder_settings.h"

#include <algorithm>

#include "base/error.h"
#include "base/printable.h"
#include "model/families/family.h"

namespace train_gpt {

namespace {

constexpr int max_head_size = 256;

/// Checks extents and combinations; errors begin with `where`.
class Checks {
  public:
    explicit Checks(const std::string& where) : where_(where) {}

    void extents(const DecoderSettings& s) const {
        between("n_layer", s.n_layer, 1, 10000);
        between("n_head", s.n_head, 1, 10000);
        between("n_embd", s.n_embd, 1, 1 << 20);
        between("n_ctx", s.n_ctx, 1, 1 << 24);
        between("vocab_size", s.vocab_size, 1, 1 << 24);
        between("n_kv_head", s.n_kv_head, 0, s.n_head);
        between("head_size", s.head_size, 0, max_head_size);
        between("n_ff", s.n_ff, 0, 1 << 22);
        if (s.head_size == 0 && s.n_embd % s.n_head != 0)
            refuse("n_embd = ", s.n_embd, " and n_head = ", s.n_head,
                   ", which does not divide it; change one of them or set head_size");
        if (s.head_size == 0 && s.n_embd / s.n_head > max_head_size)
            refuse("n_embd = ", s.n_embd, " and n_head = ", s.n_head, ", so heads of ",
                   s.n_embd / s.n_head, "; a head may have ", max_head_size, " at most");
    }

    void combination(const DecoderSpec& s) const {
        if (s.n_head % s.n_kv_head != 0)
            refuse("n_head = ", s.n_head, " and n_kv_head = ", s.n_kv_head,
                   "; each key/value head serves the same number of query heads, so it must divide "
                   "n_head");
        if (!(s.norm_epsilon > 0 && s.norm_epsilon < 1))
            refuse("norm_epsilon = ", s.norm_epsilon, "; it must be above 0 and below 1");
        for (const auto& [key, cap] : {std::pair("attention_softcap", s.attention_softcap),
                                       std::pair("head_softcap", s.head_softcap)})
            if (!(cap == 0 || (cap >= 1e-3 && cap <= 1e3)))
                refuse(key, " = ", cap, "; it must be 0 (no cap) or between 0.001 and 1000");
        if (s.window > 0 && (s.window_pattern.empty() ||
                             s.window_pattern.find_first_not_of("SL") != std::string::npos))
            refuse("window_pattern = ", quoted(s.window_pattern),
                   "; it must be letters S (layers with the window) and L (without)");
        if (s.clamped && s.mlp != Mlp::swiglu)
            refuse("clamped_swiglu, but another MLP; set mlp to swiglu");
        if (s.clamped && !(s.clamped->alpha > 0 && s.clamped->limit > 0))
            refuse("a clamped SwiGLU with alpha = ", s.clamped->alpha,
                   " and limit = ", s.clamped->limit, "; both must be above 0");
        if (s.experts) experts(s);
        if (!(s.init_std > 0 && s.init_std <= 1))
            refuse("init_std = ", s.init_std, "; it must be above 0 and at most 1");
        if (s.is_rotary())
            rotary(s);
        else if (s.rope.scaling != RopeScaling::none)
            refuse("rope_scaling, but learned positions; set positions to rope");
        else if (s.qk_norm != QkNormKind::off)
            refuse(
                "qk_norm, but learned positions; heads are normalised where they are rotated, so "
                "set positions to rope");
    }

  private:
    void experts(const DecoderSpec& s) const {
        const ExpertSpec& e = s.experts;
        between("n_expert", e.n_expert, 1, most_experts);
        between("n_expert_per_token", e.n_expert_per_token, 1, most_experts_per_token);
        if (e.n_expert_per_token > e.n_expert)
            refuse("n_expert_per_token = ", e.n_expert_per_token, ", but n_expert = ", e.n_expert,
                   "; a token cannot go to more experts than there are");
        between("n_ff_expert", e.n_ff, 1, 1 << 22);
        between("n_ff_shared", e.n_ff_shared, 0, 1 << 22);
        if (e.shared_gate && e.n_ff_shared == 0)
            refuse("shared_gate, but no shared expert; set n_ff_shared");
        if (s.mlp != Mlp::swiglu) refuse("experts of another kind than SwiGLU; set mlp to swiglu");
        if (e.biases && s.biases == Biases::all)
            refuse("LayerNorms with biases beside experts with biases; set bias to attention");
        bool any = false;
        for (int i = 0; i < s.n_layer; ++i) any |= s.has_experts(i);
        if (!any)
            refuse("n_expert = ", e.n_expert,
                   ", but experts_every and dense_layers leave no layer for experts");
        for (const int layer : s.dense_layers)
            if (layer < 0 || layer >= s.n_layer)
                refuse("layer ", layer, " among dense_layers, but n_layer = ", s.n_layer,
                       "; layers are counted from 0");
    }

    void rotary(const DecoderSpec& s) const {
        if (s.head_size % 2 != 0)
            refuse("heads of ", s.head_size,
                   ", which cannot be rotated in pairs; head_size must be "
                   "even");
        const RopeFrequencies& r = s.rope;
        if (!(r.theta > 0)) refuse("rope_theta = ", r.theta, "; it must be above 0");
        if (r.scaling == RopeScaling::none) return;
        if (!(r.factor >= 1))
            refuse("rope_scaling with a factor of ", r.factor, "; it must be at least 1");
        if (r.scaling == RopeScaling::linear) return;
        if (r.scaling == RopeScaling::yarn)
            yarn(r);
        else if (!(r.low_frequency_factor > 0 && r.low_frequency_factor < r.high_frequency_factor))
            refuse("rope_scaling with a low_freq_factor of ", r.low_frequency_factor,
                   " and a high_freq_factor of ", r.high_frequency_factor,
                   "; the first must be above 0 and below the second");
        // Llama 3.1 itself goes twice as far as its factor of 8 stretches the original context.
        const double reach = 2 * r.factor * static_cast<double>(r.original_context);
        if (r.original_context < 1 || s.n_ctx > reach)
            refuse("n_ctx = ", s.n_ctx, ", but rope_scaling by ", r.factor,
                   " from an original context of ", r.original_context, " reaches to ", reach,
                   " at most; lower n_ctx or raise the factor");
    }

    void yarn(const RopeFrequencies& r) const {
        if (!(r.theta > 1)) refuse("rope_theta = ", r.theta, "; with yarn it must be above 1");
        if (!(r.yarn.beta_slow > 0 && r.yarn.beta_slow < r.yarn.beta_fast))
            refuse("rope_scaling with a beta_fast of ", r.yarn.beta_fast, " and a beta_slow of ",
                   r.yarn.beta_slow, "; the second must be above 0 and below the first");
        for (const auto& [key, value] : {std::pair("attention_factor", r.yarn.attention_factor),
                                         {"mscale", r.yarn.mscale},
                                         {"mscale_all_dim", r.yarn.mscale_all_dim}})
            if (!(value >= 0 && value <= 1e3))
                refuse("rope_scaling with ", key, " = ", value,
                       "; it must be above 0 and at most 1000, or absent");
    }

    void between(const char* key, int64_t value, int64_t least, int64_t most) const {
        if (value < least || value > most)
            refuse(key, " = ", value, "; it must lie between ", least, " and ", most);
    }

    template <class... What>
    [[noreturn]] void refuse(const What&... what) const {
        throw Error(where_, " has ", what...);
    }

    const std::string& where_;
};

/// What the settings say of experts; 0: as the family's.
void set_experts(DecoderSpec& spec, const DecoderSettings& s) {
    ExpertSpec& e = spec.experts;
    const auto set = [](int& member, int64_t given) {
        if (given > 0) member = static_cast<int>(given);
    };
    set(e.n_expert, s.n_expert);
    if (e.n_expert == 0) {
        e = {};
        return;
    }
    set(e.n_expert_per_token, s.n_expert_per_token);
    set(e.n_ff, s.n_ff_expert);
    if (e.n_ff == 0) e.n_ff = spec.n_ff;
    if (s.n_ff_shared) e.n_ff_shared = *s.n_ff_shared;
    if (s.shared_gate) e.shared_gate = *s.shared_gate;
    if (s.router) e.rule.score = *s.router;
    if (s.router_normalise) e.rule.normalise = *s.router_normalise;
    if (s.router_scale > 0) e.rule.scale = static_cast<float>(s.router_scale);
    if (s.router_bias) e.router_bias = *s.router_bias;
    if (s.expert_bias) e.biases = *s.expert_bias;
    e.selection_bias = s.selection_bias;
    e.capacity = s.expert_capacity;
    spec.dense_layers = s.dense_layers;
    spec.experts_every = s.experts_every;
    bool is_dense = false;  // some layer
    for (int i = 0; i < spec.n_layer; ++i) is_dense = is_dense || !spec.has_experts(i);
    if (!is_dense) spec.n_ff = e.n_ff;
}

/// Says the same of layers in one way: specs are equal if their layers are.
void normalize_layers(DecoderSpec& spec) {
    std::string pattern;
    for (int i = 0; i < spec.n_layer; ++i) pattern += spec.has_window(i) ? 'S' : 'L';
    if (pattern.find('S') == pattern.npos) spec.window = 0;
    if (spec.window == 0) pattern = "S";
    size_t period = 1;
    while (!std::equal(pattern.begin() + static_cast<std::ptrdiff_t>(period), pattern.end(),
                       pattern.begin()))
        ++period;
    spec.window_pattern = pattern.substr(0, period);

    std::vector<int>& dense = spec.dense_layers;
    std::ranges::sort(dense);
    dense.erase(std::unique(dense.begin(), dense.end()), dense.end());
    std::erase_if(dense, [&](int layer) { return (layer + 1) % spec.experts_every != 0; });
}

}  // namespace

DecoderSpec Family::spec(const DecoderSettings& s, const std::string& where) const {
    const Checks checks(where);
    checks.extents(s);
    DecoderSpec spec{.family = this,
                     .n_layer = static_cast<int>(s.n_layer),
                     .n_head = static_cast<int>(s.n_head),
                     .n_kv_head = static_cast<int>(s.n_kv_head ? s.n_kv_head : s.n_head),
                     .head_size = static_cast<int>(s.head_size),
                     .n_embd = static_cast<int>(s.n_embd),
                     .n_ff = static_cast<int>(s.n_ff),
                     .n_ctx = static_cast<int>(s.n_ctx),
                     .vocab_size = s.vocab_size};
    defaults(spec);
    if (spec.head_size == 0) spec.head_size = spec.n_embd / spec.n_head;
    if (s.norm) spec.norm = *s.norm;
    if (s.norm_epsilon != 0) spec.norm_epsilon = s.norm_epsilon;
    if (s.mlp) spec.mlp = *s.mlp;
    if (s.biases) spec.biases = *s.biases;
    if (s.qk_norm) spec.qk_norm = *s.qk_norm;
    if (s.tied_head) spec.tied_head = *s.tied_head;
    if (s.positions) spec.positions = *s.positions;
    if (s.window) spec.window = *s.window;
    if (!s.window_pattern.empty()) spec.window_pattern = s.window_pattern;
    if (s.sinks) spec.sinks = *s.sinks;
    if (s.clamped_swiglu.value_or(spec.clamped.has_value()))
        spec.clamped = s.clamped;
    else
        spec.clamped.reset();
    set_experts(spec, s);
    spec.attention_softcap = s.attention_softcap;
    spec.head_softcap = s.head_softcap;
    if (s.init_std != 0) spec.init_std = s.init_std;
    spec.init_residual_scaling = s.init_residual_scaling;
    spec.init_zero_projections = s.init_zero_projections;
    const double theta = s.rope_theta != 0 ? s.rope_theta : spec.rope.theta;
    spec.rope = s.rope_scaling;
    spec.rope.theta = theta;
    spec.rope.D = spec.head_size;
    checks.combination(spec);
    if (!spec.is_rotary()) spec.rope = {};
    normalize_layers(spec);
    spec.family = &family_for(spec);
    return spec;
}

}  // namespace train_gpt
