// The parameters of a decoder, and which of them is what.
#pragma once
#include <array>
#include <vector>

#include "model/spec.h"
#include "parallel/state/parameter.h"

namespace train_gpt {

/// Indices of a block's parameters in the registry; −1: the block has no such parameter. In a
/// mixture, `up` [E·2F, C] and `down` [E·C, F] hold the weights of all experts, one expert after
/// the other, in a unit of their own.
struct BlockParameters {
    int norm1_w = -1, norm1_b = -1, qkv_w = -1, qkv_b = -1, out_w = -1, out_b = -1;
    int q_norm_w = -1, k_norm_w = -1;  // [D], or the width of q and of k
    int sinks = -1;                    // [H]
    int norm2_w = -1, norm2_b = -1, up_w = -1, up_b = -1, down_w = -1, down_b = -1;
    int router_w = -1, router_b = -1, selection_bias = -1;         // [E, C], [E], [E]
    int shared_up_w = -1, shared_down_w = -1, shared_gate_w = -1;  // [2F, C], [C, F], [1, C]
};
/// Every member of BlockParameters.
inline constexpr std::array block_parameters = {
    &BlockParameters::norm1_w,      &BlockParameters::norm1_b,
    &BlockParameters::qkv_w,        &BlockParameters::qkv_b,
    &BlockParameters::out_w,        &BlockParameters::out_b,
    &BlockParameters::q_norm_w,     &BlockParameters::k_norm_w,
    &BlockParameters::sinks,        &BlockParameters::norm2_w,
    &BlockParameters::norm2_b,      &BlockParameters::up_w,
    &BlockParameters::up_b,         &BlockParameters::down_w,
    &BlockParameters::down_b,       &BlockParameters::router_w,
    &BlockParameters::router_b,     &BlockParameters::selection_bias,
    &BlockParameters::shared_up_w,  &BlockParameters::shared_down_w,
    &BlockParameters::shared_gate_w};
static_assert(sizeof(BlockParameters) == block_parameters.size() * sizeof(int),
              "block_parameters lists every member");

/// The parameters of consecutive layers from first_layer on. At the ends of the model also the
/// embedding, the final norm and the head. Units are numbered in the order of the forward pass: the
/// embedding, if the model begins here; each block, then its experts; the final norm, if the model
/// ends here, with the head, unless this registry's embedding is the head.
struct Registry {
    std::vector<Parameter> parameters;
    int first_layer = 0;
    std::vector<BlockParameters> blocks;
    int tokens = -1, positions = -1;           // [V, C], [n_ctx, C]
    int final_norm_w = -1, final_norm_b = -1;  // [C]
    int head = -1;  // [V, C]; `tokens` where the head is tied and both are here

    bool begins_model() const { return tokens >= 0; }
    bool ends_model() const { return head >= 0 && final_norm_w >= 0; }
    int unit_of(int parameter) const { return parameters[static_cast<size_t>(parameter)].unit; }
    int unit_of_block(int i) const { return unit_of(blocks[static_cast<size_t>(i)].norm1_w); }
    /// The unit of a block's experts; of a block without experts unit_of_block().
    int unit_of_experts(int i) const { return unit_of(blocks[static_cast<size_t>(i)].down_w); }
    int first_unit() const { return begins_model() ? unit_of(tokens) : unit_of_block(0); }
    int last_unit() const { return unit_of(ends_model() ? final_norm_w : blocks.back().down_w); }
    int64_t numel() const;  // logical
};

/// What a family calls the tensors of a mixture, after the block's prefix.
struct ExpertNames {
    const char* router = "mlp.gate";
    const char* router_in_memory = nullptr;  // transformers 5's name, if it is another one
    const char* selection_bias = "mlp.gate.e_score_correction_bias";
    /// Followed by an expert's number, a dot and a part.
    const char* expert = "mlp.experts.";
    const char *gate = "gate_proj", *up = "up_proj", *down = "down_proj";
    /// Followed by gate_up_proj or down_proj: a layer's experts in one tensor. Files may hold
    /// [E, 2F, C] and [E, C, F], as transformers 5 does in memory, instead of a tensor for each
    /// expert. If `only_stacked`, they hold [E, C, 2F] with gate and up in turns, and [E, F, C];
    /// with names of biases that end in _bias.
    const char* stacked = "mlp.experts.";
    bool only_stacked = false;
    const char* shared = "mlp.shared_expert.";
    const char* shared_gate = "mlp.shared_expert_gate";
};

/// What a family calls its tensors, and its initial values. Names of a block's tensors follow
/// `block` and the layer.
struct RegistryNames {
    const char *tokens, *positions, *final_norm, *head;
    const char* block;  // followed by the layer and a dot
    const char *norm1, *qkv;
    std::array<const char*, 3> qkv_parts = {};  // q, k and v, if files hold them apart
    const char *q_norm = nullptr, *k_norm = nullptr;
    const char *out, *norm2, *up;
    std::array<const char*, 2> gate_up_parts = {};  // of SwiGLU, which files hold apart
    const char* down;
    const char* sinks = "self_attn.sinks";
    ExpertNames experts = {};
    bool transposed = false;    // files hold linear weights as [in, out]
    float positions_scale = 1;  // standard deviation of learned positions beside other weights'
};

/// The registry of a whole model. Names end in ".weight" and ".bias". Initial values: norms 1,
/// biases 0, weights normal(0, init_std). The weights of the two projections into the residual
/// stream are scaled by 1/√(2·n_layer) where the spec says so.
Registry decoder_registry(const DecoderSpec& spec, const RegistryNames& names);

/// The registry of a tensor-parallel rank: the parameters of `whole`, cut to the rank's parts.
/// Throws Error where a parameter cannot be split.
Registry registry_held_by(Registry whole, const TensorRank& rank);

/// What a pipeline rank holds: the parameters of all its stages, in one store, with their units one
/// after the other; and of each stage a registry, which knows all parameters and names its own.
struct RankRegistry {
    std::vector<Parameter> parameters;
    std::vector<Registry> stages;
};

/// Pipeline rank `rank` holds stages rank, rank + ranks, …, cut to this tensor rank's part.
/// layers_of_stages: the number of layers of each stage of the model. Throws Error where a
/// parameter cannot be split.
RankRegistry registry_of_rank(const Registry& whole, const std::vector<int>& layers_of_stages,
                              int rank, int ranks, const TensorRank& tensor);

/// Gives each stage a sweep of its own (Parameter::sweep). halves_apart: the head gets another one,
/// since its gradients come with the gradients of inputs, and the gradients of the blocks' weights
/// come later.
void number_sweeps(RankRegistry& registry, bool halves_apart);

/// The part of a whole model's registry with the layers [first, last). A stage that holds a tied
/// head but not the embedding has a parameter of its own for it (Parameter::tied_to).
Registry stage_of(const Registry& whole, int first, int last);

}  // namespace train_gpt
