#include "training/files/upcycle.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "model/families/family.h"

namespace train_gpt {

namespace {

using Read = decltype(StoredModel::read);

constexpr uint64_t router_seed = 1;  // a model is always upcycled to the same bits

/// How the parameters of a model are read, by their names.
using Readers = std::map<std::string, Read>;

/// The parameters that two models have both, by their places: they may have other names.
Readers shared_readers(const Registry& from, const Registry& to, const Read& read) {
    Readers readers;
    const auto add = [&](int source, int target) {
        if (source < 0 || target < 0) return;
        const Parameter p = from.parameters[static_cast<size_t>(source)];
        const Parameter& wanted = to.parameters[static_cast<size_t>(target)];
        if (p.shape != wanted.shape) return;
        readers[wanted.name] = [read, p](const Parameter&, int64_t first, std::span<float> values) {
            read(p, first, values);
        };
    };
    for (const auto member : {&Registry::tokens, &Registry::positions, &Registry::final_norm_w,
                              &Registry::final_norm_b, &Registry::head})
        add(from.*member, to.*member);
    for (size_t i = 0; i < to.blocks.size(); ++i)
        for (const auto member : block_parameters)
            add(from.blocks[i].*member, to.blocks[i].*member);
    return readers;
}

StoredModel with_readers(StoredModel model, const DecoderSpec& spec, Readers readers) {
    model.spec = spec;
    model.read = [all = std::make_shared<const Readers>(std::move(readers))](
                     const Parameter& p, int64_t first, std::span<float> values) {
        all->at(p.name)(p, first, values);
    };
    return model;
}

/// Repeats the elements of a dense parameter.
Read repeated(const Read& read, const Parameter& dense) {
    return [read, dense](const Parameter&, int64_t first, std::span<float> values) {
        const int64_t n = dense.numel();
        for (int64_t done = 0; done < std::ssize(values);) {
            const int64_t at = (first + done) % n,
                          piece = std::min(n - at, std::ssize(values) - done);
            read(dense, at, values.subspan(static_cast<size_t>(done), static_cast<size_t>(piece)));
            done += piece;
        }
    };
}

Read random_or_zero(float std) {
    return [std](const Parameter& p, int64_t first, std::span<float> values) {
        std::ranges::fill(values, 0.0f);
        if (std == 0) return;
        RandomStream(router_seed, RandomPurpose::init, p.id, 0)
            .fill_normal(values.data(), std::ssize(values), std, 0, static_cast<uint64_t>(first));
    };
}

}  // namespace

StoredModel upcycled(StoredModel dense, const Upcycling& how, const std::string& where) {
    if (how.n_expert == 0) return dense;
    DecoderSpec spec = dense.spec;
    if (spec.experts)
        throw Error(where, " has experts already (n_expert = ", spec.experts.n_expert,
                    "); --upcycle takes a model with an MLP in each layer");
    if (spec.mlp != Mlp::swiglu)
        throw Error(where, " has an MLP of another kind than SwiGLU (it is ",
                    with_article(*spec.family),
                    "), which cannot be an expert; --upcycle takes models such as Llama, Qwen2, "
                    "Qwen3 and Mistral");
    if (spec.biases == Biases::all)
        throw Error(where,
                    " has an MLP with biases, which cannot be an expert here; --upcycle takes "
                    "models without them");
    if (how.n_expert_per_token > how.n_expert)
        throw UsageError("--experts-per-token ", how.n_expert_per_token, ", but --upcycle ",
                         how.n_expert, "; a token cannot go to more experts than there are");
    spec.experts = {.n_expert = how.n_expert,
                    .n_expert_per_token = how.n_expert_per_token,
                    .n_ff = spec.n_ff,
                    .rule = {.normalise = true}};
    spec.family = &family_for(spec);

    const Registry from = registry_of(dense.spec), to = registry_of(spec);
    Readers readers = shared_readers(from, to, dense.read);
    const auto dense_parameter = [&](int i) { return from.parameters[static_cast<size_t>(i)]; };
    const auto name = [&](int i) { return to.parameters[static_cast<size_t>(i)].name; };
    for (size_t i = 0; i < to.blocks.size(); ++i) {
        const BlockParameters &old = from.blocks[i], &block = to.blocks[i];
        readers[name(block.up_w)] = repeated(dense.read, dense_parameter(old.up_w));
        readers[name(block.down_w)] = repeated(dense.read, dense_parameter(old.down_w));
        readers[name(block.router_w)] =
            random_or_zero(how.zero_router ? 0 : static_cast<float>(spec.init_std));
    }
    return with_readers(std::move(dense), spec, std::move(readers));
}

StoredModel with_selection_biases(StoredModel mixture) {
    DecoderSpec spec = mixture.spec;
    spec.experts.selection_bias = true;
    spec.family = &family_for(spec);
    const Registry from = registry_of(mixture.spec), to = registry_of(spec);
    Readers readers = shared_readers(from, to, mixture.read);
    for (const BlockParameters& block : to.blocks)
        if (block.selection_bias >= 0)
            readers[to.parameters[static_cast<size_t>(block.selection_bias)].name] =
                random_or_zero(0);
    return with_readers(std::move(mixture), spec, std::move(readers));
}

}  // namespace train_gpt
