#include "model/registry.h"

#include <cassert>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"

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
        w.adds_over_tensor = true;
        const int weight = add(std::move(w));
        const bool has_bias = spec_.norm == Norm::layer && spec_.biases == Biases::all;
        return {weight, has_bias ? bias({.name = name, .out = spec_.n_embd}, true) : -1};
    }

    int head_norm(const std::string& name, int64_t head_size) {
        Parameter w;
        w.name = name + ".weight", w.shape = {head_size}, w.init_mean = 1;
        w.adds_over_tensor = true;
        return add(std::move(w));
    }

    /// A linear layer, whose rows files may hold as several tensors, with these names.
    /// Column-parallel layers are split in sections of their outputs, row-parallel ones along their
    /// inputs.
    struct Linear {
        std::string name;
        int64_t out = 0, in = 0;
        std::optional<TensorSplit> split = {};
        int64_t head_rows = 0;  // of each attention head among the outputs
        float init_std = 0;
        std::vector<std::string> parts = {};  // of the sections
    };

    /// The weight [out, in] and the bias, if there is one. bias_adds: a row-parallel layer's bias
    /// has its gradient with the norm after it, of a rank's rows; else it is a product's, of all
    /// rows.
    std::pair<int, int> linear(const Linear& layer, bool has_bias, bool bias_adds = false) {
        Parameter w;
        w.name = layer.name + ".weight", w.shape = {layer.out, layer.in}, w.decay = true;
        w.update = Update::matrix, w.head_rows = layer.head_rows;
        w.split = layer.split, w.init_std = layer.init_std;
        w.stored = stored(layer, ".weight", names_.transposed);
        const int weight = add(std::move(w));
        return {weight, has_bias ? bias(layer, bias_adds) : -1};
    }

    /// A table [V, C], padded.
    Parameter vocabulary(const std::string& name) const {
        Parameter p;
        p.name = name + ".weight", p.shape = {spec_.vocab_size, spec_.n_embd};
        p.padded = {spec_.padded_vocab(), spec_.n_embd};
        p.decay = true, p.split = TensorSplit{0, {spec_.vocab_size}, vocab_multiple};
        p.is_vocabulary = true;
        p.init_std = init_std();
        return p;
    }

    BlockParameters block(int layer) {
        const std::string prefix = concat(names_.block, layer, ".");
        const LayerSpec of = spec_.layer(layer);
        const int64_t C = of.n_embd, width = of.attention_width(), F = of.n_ff,
                      keys = of.kv_width();
        const float residual_std =
            spec_.init_zero_projections ? 0.0f
            : spec_.init_residual_scaling
                ? init_std() / std::sqrt(2.0f * static_cast<float>(spec_.n_layer))
                : init_std();
        BlockParameters p;
        const bool all_biases = spec_.biases == Biases::all;
        const auto parts = [&](const auto& names) {
            std::vector<std::string> all;
            for (const char* name : names)
                if (name) all.push_back(prefix + name);
            return all;
        };
        std::tie(p.norm1_w, p.norm1_b) = norm(prefix + names_.norm1);
        std::tie(p.qkv_w, p.qkv_b) = linear({.name = prefix + names_.qkv,
                                             .out = width + 2 * keys,
                                             .in = C,
                                             .split = TensorSplit{0, {width, keys, keys}},
                                             .head_rows = of.head_size,
                                             .init_std = init_std(),
                                             .parts = parts(names_.qkv_parts)},
                                            spec_.biases != Biases::none);
        if (of.qk_norm) {
            p.q_norm_w = head_norm(prefix + names_.q_norm, of.head_size);
            p.k_norm_w = head_norm(prefix + names_.k_norm, of.head_size);
        }
        std::tie(p.out_w, p.out_b) = linear({.name = prefix + names_.out,
                                             .out = C,
                                             .in = width,
                                             .split = TensorSplit{1, {width}},
                                             .init_std = residual_std},
                                            all_biases, true);
        std::tie(p.norm2_w, p.norm2_b) = norm(prefix + names_.norm2);
        Linear up{.name = prefix + names_.up,
                  .out = of.up_width(),
                  .in = C,
                  .split = TensorSplit{0, {F}},
                  .init_std = init_std()};
        if (of.is_gated()) up.split->sections = {F, F}, up.parts = parts(names_.gate_up_parts);
        std::tie(p.up_w, p.up_b) = linear(up, all_biases);
        std::tie(p.down_w, p.down_b) = linear({.name = prefix + names_.down,
                                               .out = C,
                                               .in = F,
                                               .split = TensorSplit{1, {F}},
                                               .init_std = residual_std},
                                              all_biases);
        return p;
    }

    Registry registry;
    int unit = 0;

  private:
    float init_std() const { return static_cast<float>(spec_.init_std); }

    /// adds_over_tensor: see Parameter.
    int bias(const Linear& layer, bool adds_over_tensor) {
        Parameter b;
        b.name = layer.name + ".bias", b.shape = {layer.out};
        b.adds_over_tensor = adds_over_tensor;
        if (layer.split && layer.split->axis == 0) b.split = layer.split;
        b.stored = stored(layer, ".bias", false);
        return add(std::move(b));
    }

    static std::vector<StoredTensor> stored(const Linear& layer, const char* suffix,
                                            bool transposed) {
        if (layer.parts.empty())
            return {{.name = layer.name + suffix, .rows = layer.out, .transposed = transposed}};
        std::vector<StoredTensor> parts;
        for (size_t i = 0; i < layer.parts.size(); ++i)
            parts.push_back({.name = layer.parts[i] + suffix,
                             .rows = layer.split->sections[i],
                             .transposed = transposed});
        return parts;
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
    if (spec.positions == Positions::learned) {
        Parameter p;
        p.name = concat(names.positions, ".weight"), p.shape = {spec.n_ctx, spec.n_embd};
        p.decay = true, p.init_std = names.positions_scale * static_cast<float>(spec.init_std);
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

Registry registry_held_by(Registry whole, const TensorRank& rank) {
    for (Parameter& p : whole.parameters) p = parameter_held_by(std::move(p), rank);
    return whole;
}

RankRegistry rank_registry(const Registry& whole, const std::vector<int>& layers_of_stages,
                           int rank, int ranks, const TensorRank& tensor) {
    RankRegistry all;
    int first = 0;
    for (int s = 0; s < static_cast<int>(layers_of_stages.size()); ++s) {
        const int last = first + layers_of_stages[static_cast<size_t>(s)];
        if (s % ranks == rank) {
            Registry stage = registry_held_by(stage_of(whole, first, last), tensor);
            const int before = static_cast<int>(all.parameters.size()),
                      units = before > 0 ? all.parameters.back().unit + 1 : 0;
            const auto move = [&](int& index) {
                if (index >= 0) index += before;
            };
            for (Parameter& p : stage.parameters) {
                p.unit += units;
                all.parameters.push_back(std::move(p));
            }
            for (BlockParameters& block : stage.blocks)
                for (const auto member : block_parameters) move(block.*member);
            for (int* index : {&stage.tokens, &stage.positions, &stage.final_norm_w,
                               &stage.final_norm_b, &stage.head})
                move(*index);
            all.stages.push_back(std::move(stage));
        }
        first = last;
    }
    for (Registry& stage : all.stages) stage.parameters = all.parameters;
    return all;
}

void number_sweeps(RankRegistry& registry, bool halves_apart) {
    int sweep = 0;
    for (const Registry& stage : registry.stages) {
        const int head = halves_apart && stage.ends_model() ? stage.last_unit() : -1;
        for (Parameter& p : registry.parameters)
            if (stage.first_unit() <= p.unit && p.unit <= stage.last_unit())
                p.sweep = sweep + (p.unit == head);
        sweep += 2;
    }
    for (Registry& stage : registry.stages) stage.parameters = registry.parameters;
}

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
        for (const auto member : block_parameters) block.*member = placed(block.*member);
        stage.blocks.push_back(block);
    }
    stage.tokens = placed(whole.tokens), stage.positions = placed(whole.positions);
    stage.final_norm_w = placed(whole.final_norm_w),
    stage.final_norm_b = placed(whole.final_norm_b);
    if (begins && !ends && whole.head == whole.tokens)
        stage.parameters[static_cast<size_t>(stage.tokens)].has_copy = true;
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
