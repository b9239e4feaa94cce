#include "model/registry.h"

#include <cassert>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"
#include "model/families/family.h"

namespace train_gpt {

namespace {

class Builder {
  public:
    Builder(const DecoderSpec& spec, const RegistryNames& names) : spec_(spec), names_(names) {}

    int add(Parameter p) {
        if (p.padded.empty()) p.padded = p.shape;
        p.id = static_cast<uint32_t>(registry.parameters.size());
        p.unit = unit;
        if (p.stored.empty()) p.stored = {{.name = p.name, .rows = p.rows()}};
        registry.parameters.push_back(std::move(p));
        return static_cast<int>(registry.parameters.size()) - 1;
    }

    std::pair<int, int> norm(const std::string& name) {
        Parameter w;
        w.name = name + ".weight", w.shape = {spec_.n_embd}, w.init_mean = 1;
        const int weight = add(std::move(w));
        return {weight, spec_.biases ? bias(name, spec_.n_embd, {}) : -1};
    }

    /// A weight [out, in]. Column-parallel layers are split in sections of their outputs,
    /// row-parallel ones along their inputs.
    std::pair<int, int> linear(const std::string& name, int64_t out, int64_t in,
                               const TensorSplit& split, float std_dev) {
        Parameter w;
        w.name = name + ".weight", w.shape = {out, in}, w.decay = true, w.split = split;
        w.stored = {{.name = w.name, .rows = out, .transposed = names_.transposed}};
        w.init_std = std_dev;
        const int weight = add(std::move(w));
        if (!spec_.biases) return {weight, -1};
        return {
            weight,
            bias(name, out, split.axis == 0 ? std::optional(split) : std::optional<TensorSplit>{})};
    }

    /// A table [V, C], padded.
    Parameter vocabulary(const std::string& name) const {
        Parameter p;
        p.name = name + ".weight", p.shape = {spec_.vocab_size, spec_.n_embd};
        p.padded = {spec_.padded_vocab(), spec_.n_embd};
        p.decay = true, p.split = TensorSplit{0, {spec_.padded_vocab()}};
        p.init_std = names_.init_std;
        return p;
    }

    BlockParameters block(int layer) {
        const std::string prefix = concat(names_.block, layer, ".");
        const int64_t C = spec_.n_embd, width = spec_.attention_width(), F = spec_.n_ff;
        const int64_t keys = int64_t{spec_.n_kv_head} * spec_.head_size;
        const float residual_std =
            names_.init_std / std::sqrt(2.0f * static_cast<float>(spec_.n_layer));
        BlockParameters p;
        std::tie(p.norm1_w, p.norm1_b) = norm(prefix + names_.norm1);
        std::tie(p.qkv_w, p.qkv_b) = linear(prefix + names_.qkv, width + 2 * keys, C,
                                            {0, {width, keys, keys}}, names_.init_std);
        std::tie(p.out_w, p.out_b) =
            linear(prefix + names_.out, C, width, {1, {width}}, residual_std);
        std::tie(p.norm2_w, p.norm2_b) = norm(prefix + names_.norm2);
        std::tie(p.up_w, p.up_b) = linear(prefix + names_.up, F, C, {0, {F}}, names_.init_std);
        std::tie(p.down_w, p.down_b) = linear(prefix + names_.down, C, F, {1, {F}}, residual_std);
        return p;
    }

    Registry registry;
    int unit = 0;

  private:
    int bias(const std::string& name, int64_t n, std::optional<TensorSplit> split) {
        Parameter b;
        b.name = name + ".bias", b.shape = {n}, b.split = std::move(split);
        return add(std::move(b));
    }

    const DecoderSpec& spec_;
    const RegistryNames& names_;
};

}  // namespace

int64_t Registry::numel() const {
    int64_t n = 0;
    for (const Parameter& p : parameters) n += p.numel();
    return n;
}

Registry decoder_registry(const DecoderSpec& spec, const RegistryNames& names) {
    Builder builder(spec, names);
    Registry& r = builder.registry;
    Parameter tokens = builder.vocabulary(names.tokens);
    if (spec.tied_head) tokens.aliases = {concat(names.head, ".weight")};
    r.tokens = builder.add(std::move(tokens));
    if (spec.learned_positions) {
        Parameter p;
        p.name = concat(names.positions, ".weight"), p.shape = {spec.n_ctx, spec.n_embd};
        p.decay = true, p.init_std = names.positions_std;
        r.positions = builder.add(std::move(p));
    }
    for (int layer = 0; layer < spec.n_layer; ++layer) {
        ++builder.unit;
        r.blocks.push_back(builder.block(layer));
    }
    ++builder.unit;
    std::tie(r.final_norm_w, r.final_norm_b) = builder.norm(names.final_norm);
    r.head = spec.tied_head ? r.tokens : builder.add(builder.vocabulary(names.head));
    return std::move(builder.registry);
}

Registry registry_of(const DecoderSpec& spec) { return spec.family->registry(spec); }

Registry stage_of(const Registry& whole, int first, int last) {
    assert(whole.first_layer == 0 && 0 <= first && first < last &&
           last <= static_cast<int>(whole.blocks.size()));
    const bool begins = first == 0, ends = last == static_cast<int>(whole.blocks.size());
    const int first_unit = begins ? 0 : 1 + first, last_unit = ends ? 1 + last : last;
    Registry stage;
    stage.first_layer = first;
    std::vector<int> place(whole.parameters.size(), -1);
    for (size_t i = 0; i < whole.parameters.size(); ++i) {
        Parameter p = whole.parameters[i];
        if (p.unit < first_unit || p.unit > last_unit) continue;
        p.unit -= first_unit;
        place[i] = static_cast<int>(stage.parameters.size());
        stage.parameters.push_back(std::move(p));
    }
    const auto placed = [&](int i) { return i < 0 ? -1 : place[static_cast<size_t>(i)]; };
    for (int layer = first; layer < last; ++layer) {
        BlockParameters block = whole.blocks[static_cast<size_t>(layer)];
        for (int* i : {&block.norm1_w, &block.norm1_b, &block.qkv_w, &block.qkv_b, &block.out_w,
                       &block.out_b, &block.norm2_w, &block.norm2_b, &block.up_w, &block.up_b,
                       &block.down_w, &block.down_b})
            *i = placed(*i);
        stage.blocks.push_back(block);
    }
    stage.tokens = placed(whole.tokens), stage.positions = placed(whole.positions);
    stage.final_norm_w = placed(whole.final_norm_w),
    stage.final_norm_b = placed(whole.final_norm_b);
    if (!ends) return stage;
    stage.head = placed(whole.head);
    if (stage.head < 0) {
        Parameter head = whole.parameters[static_cast<size_t>(whole.head)];
        head.tied_to = head.name;
        head.unit = last_unit - first_unit;
        stage.head = static_cast<int>(stage.parameters.size());
        stage.parameters.push_back(std::move(head));
    }
    return stage;
}

}  // namespace train_gpt
