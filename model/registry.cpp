#include "model/registry.h"

#include <cassert>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"
#include "parallel/pipeline/pipeline_schedule.h"

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

    /// A norm of q or k: of each head, or of a width that tensor-parallel ranks split.
    int qk_norm(const std::string& name, const LayerSpec& of, int64_t width) {
        const bool by_head = of.qk_norm == QkNormKind::head;
        Parameter w;
        w.name = name + ".weight", w.shape = {by_head ? of.head_size : width}, w.init_mean = 1;
        if (by_head)
            w.adds_over_tensor = true;
        else
            w.split = TensorSplit{0, {width}};
        return add(std::move(w));
    }

    /// A vector that begins at 0.
    int vector(const std::string& name, int64_t size) {
        Parameter p;
        p.name = name, p.shape = {size};
        return add(std::move(p));
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
        int64_t experts = 1;                  // so many layers, one after the other
        bool is_matrix = true;                // for optimizers that update matrices
    };

    /// The weight [out, in] and the bias, if there is one. bias_adds: a row-parallel layer's bias
    /// has its gradient with the norm after it, of a rank's rows; else it is a product's, of all
    /// rows.
    std::pair<int, int> linear(const Linear& layer, bool has_bias, bool bias_adds = false) {
        Parameter w;
        w.name = layer.name + ".weight", w.shape = {layer.out, layer.in}, w.decay = true;
        w.update = layer.is_matrix ? Update::matrix : Update::elements;
        w.head_rows = layer.head_rows;
        if (layer.experts > 1) w.matrix_rows = layer.out / layer.experts;
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
        const float residual_std =
            spec_.init_zero_projections ? 0.0f
            : spec_.init_residual_scaling
                ? init_std() / std::sqrt(2.0f * static_cast<float>(spec_.n_layer))
                : init_std();
        BlockParameters p;
        std::tie(p.norm1_w, p.norm1_b) = norm(prefix + names_.norm1);
        attention(p, of, prefix, residual_std);
        std::tie(p.norm2_w, p.norm2_b) = norm(prefix + names_.norm2);
        if (of.experts)
            experts(p, of.experts, prefix, residual_std);
        else
            mlp(p, of, prefix, residual_std);
        return p;
    }

    Registry registry;
    int unit = 0;

  private:
    float init_std() const { return static_cast<float>(spec_.init_std); }

    /// The tensors with these names behind a prefix, without the absent ones.
    template <class Names>
    static std::vector<std::string> parts(const std::string& prefix, const Names& names) {
        std::vector<std::string> all;
        for (const char* name : names)
            if (name) all.push_back(prefix + name);
        return all;
    }

    void attention(BlockParameters& p, const LayerSpec& of, const std::string& prefix,
                   float residual_std) {
        const int64_t C = of.n_embd, width = of.attention_width(), keys = of.kv_width();
        const bool out_bias = spec_.biases == Biases::attention || spec_.biases == Biases::all;
        std::tie(p.qkv_w, p.qkv_b) = linear({.name = prefix + names_.qkv,
                                             .out = width + 2 * keys,
                                             .in = C,
                                             .split = TensorSplit{0, {width, keys, keys}},
                                             .head_rows = of.head_size,
                                             .init_std = init_std(),
                                             .parts = parts(prefix, names_.qkv_parts)},
                                            spec_.biases != Biases::none);
        if (of.qk_norm != QkNormKind::off) {
            p.q_norm_w = qk_norm(prefix + names_.q_norm, of, width);
            p.k_norm_w = qk_norm(prefix + names_.k_norm, of, keys);
        }
        if (of.sinks) {
            p.sinks = vector(prefix + names_.sinks, of.n_head);
            registry.parameters.back().split = TensorSplit{0, {of.n_head}};
        }
        std::tie(p.out_w, p.out_b) = linear({.name = prefix + names_.out,
                                             .out = C,
                                             .in = width,
                                             .split = TensorSplit{1, {width}},
                                             .init_std = residual_std},
                                            out_bias, true);
    }

    void mlp(BlockParameters& p, const LayerSpec& of, const std::string& prefix,
             float residual_std) {
        const int64_t C = of.n_embd, F = of.n_ff;
        const bool all_biases = spec_.biases == Biases::all;
        Linear up{.name = prefix + names_.up,
                  .out = of.up_width(),
                  .in = C,
                  .split = TensorSplit{0, {F}},
                  .init_std = init_std()};
        if (of.is_gated())
            up.split->sections = {F, F}, up.parts = parts(prefix, names_.gate_up_parts);
        std::tie(p.up_w, p.up_b) = linear(up, all_biases);
        std::tie(p.down_w, p.down_b) = linear({.name = prefix + names_.down,
                                               .out = C,
                                               .in = F,
                                               .split = TensorSplit{1, {F}},
                                               .init_std = residual_std},
                                              all_biases);
    }

    /// A mixture: the router and the shared expert, and the experts in a unit of their own.
    void experts(BlockParameters& p, const ExpertSpec& of, const std::string& prefix,
                 float residual_std) {
        const ExpertNames& names = names_.experts;
        const int64_t C = spec_.n_embd, E = of.n_expert;
        std::tie(p.router_w, p.router_b) = linear({.name = prefix + names.router,
                                                   .out = E,
                                                   .in = C,
                                                   .init_std = init_std(),
                                                   .is_matrix = false},
                                                  of.router_bias);
        if (names.router_in_memory)
            parameter(p.router_w).or_stored = {
                {.name = concat(prefix, names.router_in_memory, ".weight"), .rows = E}};
        // Each tensor-parallel rank has a part of what experts give (expert_layer.cpp).
        for (const int i : {p.router_w, p.router_b})
            if (i >= 0) parameter(i).adds_over_tensor = true;
        if (of.selection_bias) {
            p.selection_bias = vector(prefix + names.selection_bias, E);
            parameter(p.selection_bias).update = Update::balance;
            parameter(p.selection_bias).router = routers_++;
        }
        if (of.n_ff_shared > 0) shared_expert(p, of, prefix, residual_std);
        ++unit;
        // The names by which optimizer files know them
        const std::string stacked = prefix + names.stacked, known = prefix + names.expert;
        Linear up{
            .name = known + "gate_up_proj",
            .out = E * 2 * of.n_ff,
            .in = C,
            .split = TensorSplit{0, std::vector<int64_t>(static_cast<size_t>(2 * E), of.n_ff)},
            .init_std = init_std(),
            .experts = E};
        Linear down{.name = known + "down_proj",
                    .out = E * C,
                    .in = of.n_ff,
                    .split = TensorSplit{1, {of.n_ff}},
                    .init_std = residual_std,
                    .experts = E};
        for (int64_t e = 0; e < E; ++e) {
            const std::string expert = concat(prefix, names.expert, e, ".");
            for (const char* part : {names.gate, names.up}) up.parts.push_back(expert + part);
            down.parts.push_back(expert + names.down);
        }
        std::tie(p.up_w, p.up_b) = linear(up, of.biases);
        std::tie(p.down_w, p.down_b) = linear(down, of.biases);
        const bool only = names.only_stacked;
        for (const auto& [weight, bias, name, halves] :
             {std::tuple(p.up_w, p.up_b, stacked + "gate_up_proj", true),
              {p.down_w, p.down_b, stacked + "down_proj", false}}) {
            const int64_t rows = parameter(weight).rows();
            StoredTensor all{.name = name, .rows = rows, .transposed = only, .stacked = E};
            all.interleaved = only && halves;
            (only ? parameter(weight).stored : parameter(weight).or_stored) = {all};
            if (bias < 0) continue;
            all.name += "_bias", all.transposed = false;
            (only ? parameter(bias).stored : parameter(bias).or_stored) = {all};
        }
    }

    void shared_expert(BlockParameters& p, const ExpertSpec& of, const std::string& prefix,
                       float residual_std) {
        const ExpertNames& names = names_.experts;
        const std::string expert = prefix + names.shared;
        const int64_t C = spec_.n_embd, F = of.n_ff_shared;
        p.shared_up_w = linear({.name = expert + "gate_up_proj",
                                .out = 2 * F,
                                .in = C,
                                .split = TensorSplit{0, {F, F}},
                                .init_std = init_std(),
                                .parts = {expert + names.gate, expert + names.up}},
                               false)
                            .first;
        p.shared_down_w = linear({.name = expert + names.down,
                                  .out = C,
                                  .in = F,
                                  .split = TensorSplit{1, {F}},
                                  .init_std = residual_std},
                                 false)
                              .first;
        if (!of.shared_gate) return;
        p.shared_gate_w = linear({.name = prefix + names.shared_gate,
                                  .out = 1,
                                  .in = C,
                                  .init_std = init_std(),
                                  .is_matrix = false},
                                 false)
                              .first;
        parameter(p.shared_gate_w).adds_over_tensor = true;
    }

    Parameter& parameter(int i) { return registry.parameters[static_cast<size_t>(i)]; }

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
        // The outputs are sections, or experts that are alike.
        const bool by_section = layer.split->axis == 0;
        const int64_t alike = layer.out / static_cast<int64_t>(layer.parts.size());
        std::vector<StoredTensor> parts;
        for (size_t i = 0; i < layer.parts.size(); ++i)
            parts.push_back({.name = layer.parts[i] + suffix,
                             .rows = by_section ? layer.split->sections[i] : alike,
                             .transposed = transposed});
        return parts;
    }

    const DecoderSpec& spec_;
    const RegistryNames& names_;
    int routers_ = 0;
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

RankRegistry registry_of_rank(const Registry& whole, const std::vector<int>& layers_of_stages,
                              int rank, int ranks, const TensorRank& tensor) {
    RankRegistry all;
    int first = 0;
    for (int s = 0; s < static_cast<int>(layers_of_stages.size()); ++s) {
        const int last = first + layers_of_stages[static_cast<size_t>(s)];
        if (rank_of_stage(s, ranks) == rank) {
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
    const int first_unit = begins ? 0 : whole.unit_of_block(first),
              last_unit = ends ? whole.last_unit() : whole.unit_of_experts(last - 1);
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
