#include "model/families/family.h"

#include <algorithm>

#include "base/error.h"
#include "base/printable.h"
#include "model/families/gpt2.h"
#include "model/families/gpt_oss.h"
#include "model/families/llama.h"
#include "model/families/mistral.h"
#include "model/families/mixtral.h"
#include "model/families/olmoe.h"
#include "model/families/other.h"
#include "model/families/qwen2.h"
#include "model/families/qwen2_moe.h"
#include "model/families/qwen3.h"
#include "model/families/qwen3_moe.h"

namespace train_gpt {

namespace {

const Family* const families[] = {&gpt2,      &llama,     &qwen2, &qwen3,   &mistral, &mixtral,
                                  &qwen2_moe, &qwen3_moe, &olmoe, &gpt_oss, &other};

}  // namespace

const Family& family_of(const std::string& model_type, const std::string& where) {
    std::string known;
    for (const Family* family : families) {
        if (family->model_type == model_type) return *family;
        if (family != &other)
            known += concat(known.empty() ? "" : ", ", "\"", family->model_type, "\"");
    }
    throw Error(where, " has model_type = ", quoted(model_type), "; only ", known,
                " are supported");
}

std::string with_article(const Family& family) {
    if (&family == &other) return "a model";
    const bool has_vowel = std::string_view("AEIOU").find(*family.title) != std::string_view::npos;
    return concat(has_vowel ? "an " : "a ", family.title);
}

Registry registry_of(const DecoderSpec& spec) { return spec.family->registry(spec); }

const Family& family_for(const DecoderSpec& spec) {
    if (spec.family->holds(spec)) return *spec.family;
    for (const Family* family : families)
        if (family->holds(spec)) return *family;
    return other;
}

std::string beyond_transformers(const DecoderSpec& spec) {
    if (spec.family != &other) return "";
    std::string list;
    const auto add = [&](const auto&... said) {
        list += concat(list.empty() ? "" : ", ", said...);
    };
    const auto has_class = [](const DecoderSpec& wanted) {
        return std::ranges::any_of(families, [&](const Family* family) {
            return family != &other && family->holds(wanted);
        });
    };
    // What no class has
    DecoderSpec rest = spec;
    if (spec.attention_softcap != 0) add("attention_softcap = ", spec.attention_softcap);
    if (spec.head_softcap != 0) add("head_softcap = ", spec.head_softcap);
    rest.attention_softcap = rest.head_softcap = 0;
    ExpertSpec& e = rest.experts;
    if (e.selection_bias) add("selection biases (router.balance = bias)");
    if (e.rule.score == RouterScore::sigmoid) add("router = sigmoid");
    if (e.rule.scale != 1) add("router_scale = ", e.rule.scale);
    e.selection_bias = false, e.rule = {.normalise = e.rule.normalise};
    if (has_class(rest)) return list;

    // What no class has in this combination
    const auto is_it = [&](const auto& change, const auto&... said) {
        DecoderSpec without = rest;
        change(without);
        if (without == rest || !has_class(without)) return false;
        add(said...);
        return true;
    };
    using S = DecoderSpec;
    if (is_it([](S& s) { s.mlp = Mlp::swiglu; },
              "mlp = ", spec.mlp == Mlp::relu2 ? "relu2" : "gelu", " outside of GPT-2") ||
        is_it([](S& s) { s.window = 0; }, "window = ", spec.window, " in these layers") ||
        is_it([](S& s) { s.sinks = false; }, "sinks outside of gpt-oss") ||
        is_it([](S& s) { s.clamped.reset(); }, "clamped_swiglu outside of gpt-oss") ||
        is_it([](S& s) { s.dense_layers.clear(), s.experts_every = 1; },
              "dense layers in such a mixture") ||
        is_it([](S& s) { s.experts.n_ff_shared = 0, s.experts.shared_gate = false; },
              "such a shared expert") ||
        is_it([](S& s) { s.experts = {}, s.dense_layers.clear(), s.experts_every = 1; },
              "such a mixture of experts") ||
        is_it([](S& s) { s.qk_norm = QkNormKind::off; }, "such a qk_norm") ||
        is_it([](S& s) { s.n_embd = s.n_head * s.head_size; }, "n_embd = ", spec.n_embd,
              " beside heads of ", spec.n_head, " · ", spec.head_size, " in such a model"))
        return list;
    add("this combination of norm, norm_epsilon, mlp, bias, qk_norm, tied_head, positions, n_head, "
        "n_kv_head, head_size, n_ff, window, sinks and experts");
    return list;
}

}  // namespace train_gpt
