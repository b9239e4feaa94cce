// Implements a part of config_keys.h: the rows of the section `model`.
#include "training/config/key_rules.h"

#define KEY TRAIN_GPT_KEY

namespace train_gpt {

namespace {

constexpr ConfigKey table[] = {
    {KEY(model.family),
     one_of({"gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe",
             "olmoe", "gpt_oss"}),
     "The family of models, which sets the defaults of the keys below that are 0 or `auto`, and "
     "whose "
     "files checkpoints are. A combination that no family has is kept in files that only this "
     "program reads."},
    {KEY(model.n_layer), between(1, 4096), "Transformer blocks."},
    {KEY(model.n_head), between(1, 65536),
     "Attention heads per block; must divide `model.n_embd` unless `model.head_size` is set."},
    {KEY(model.n_embd), between(1, 262144), "Width of the residual stream (channels)."},
    {KEY(model.n_ctx), between(1, 16777216), "Context length: the number of positions."},
    {KEY(model.vocab_size), between(0, 16777216), "Vocabulary size; 0: the tokenizer's."},
    {KEY(model.n_kv_head), between(0, 65536),
     "Heads of keys and values, each for the same number of query heads; 0: `model.n_head`."},
    {KEY(model.head_size), between(0, 256),
     "Width of a head; 0: `model.n_embd` / `model.n_head`, or 128 with `qwen3`."},
    {KEY(model.n_ff), between(0, 4194304),
     "Width of the MLP's hidden layer; 0: 4 · `model.n_embd` with `gpt2`, else 8/3 · "
     "`model.n_embd`, rounded up to a multiple of 256."},
    {KEY(model.norm), one_of<std::optional<Norm>>(), "LayerNorm (`gpt2`) or RMSNorm (the others)."},
    {KEY(model.norm_epsilon), between(0, 1),
     "Added to the variance in norms; 0: the family's, 1e-5 or for Qwen 1e-6."},
    {KEY(model.mlp), one_of<std::optional<Mlp>>(),
     "The MLP: `gelu` (tanh approximation; `gpt2`), `swiglu` (the others), or `relu2`: max(x, 0)² "
     "without a gate."},
    {KEY(model.bias), one_of<std::optional<Biases>>(),
     "Biases: in no layer (`llama`, `qwen3`, `mistral`), of queries, keys and values (`qwen2`), or "
     "in "
     "all linear layers and LayerNorms (`gpt2`)."},
    {KEY(model.qk_norm), one_of<std::optional<QkNormKind>>(),
     "RMSNorm of queries and keys before they are rotated: of each `head` (`qwen3`, `qwen3_moe`; "
     "true means this), or of the whole `width` of all heads (`olmoe`)."},
    {KEY(model.tied_head), one_of<std::optional<bool>>(),
     "Whether the output head is the token embedding (`gpt2`)."},
    {KEY(model.attention_softcap), between(0, 1e3),
     "Soft-cap of attention's scores: s counts as c · tanh(s / c). 0: none. Gemma 2: 50. On GPUs "
     "our own kernels compute such attention, not cuDNN."},
    {KEY(model.head_softcap), between(0, 1e3),
     "Soft-cap of the logits: z counts as c · tanh(z / c). 0: none. Gemma 2: 30, nanochat: 15."},
    {KEY(model.window), between(0, 16777216),
     "Sliding window: a token attends to itself and the `model.window` − 1 tokens before it, in "
     "the "
     "layers that `model.window_pattern` calls short. 0: none; `auto`: the family's (`gpt_oss`: "
     "128)."},
    {KEY(model.window_pattern), any_text(),
     "Which layers have the window: letters S (short: with it) and L (long: without), repeated "
     "over "
     "the layers. Empty: the family's, S or for `gpt_oss` SL."},
    {KEY(model.sinks), one_of<std::optional<bool>>(),
     "A learned logit of each head in attention's softmax, which takes weight and gives nothing "
     "(`gpt_oss`)."},
    {KEY(model.clamped_swiglu), one_of<std::optional<bool>>(),
     "SwiGLU's form in `gpt_oss`: (up + 1) · gate · σ(1.702 · gate) with gate at most 7 and up "
     "between −7 and 7."},
    {KEY(model.n_expert), between(0, most_experts),
     "Experts of a layer, in place of its MLP; 0: the family's, which is none for families of "
     "dense "
     "models."},
    {KEY(model.n_expert_per_token), between(0, most_experts_per_token),
     "Experts that each token goes to; 0: the family's."},
    {KEY(model.n_ff_expert), between(0, 4194304),
     "Width of an expert's hidden layer; 0: `model.n_ff`."},
    {KEY(model.n_ff_shared), between(0, 4194304),
     "Width of the hidden layer of a shared expert, which all tokens pass besides; 0: none; "
     "`auto`: the family's (`qwen2_moe`: `model.n_ff`)."},
    {KEY(model.shared_gate), one_of<std::optional<bool>>(),
     "Whether the shared expert's output is multiplied by σ(w·x) (`qwen2_moe`)."},
    {KEY(model.router), one_of<std::optional<RouterScore>>(),
     "A router's scores, from which experts' weights follow: `softmax` over all experts (the "
     "families'), or `sigmoid` of each logit."},
    {KEY(model.router_normalise), one_of<std::optional<bool>>(),
     "Whether a token's weights are divided by their sum (`mixtral`, `qwen3_moe`, `gpt_oss`)."},
    {KEY(model.router_scale), between(0, 1000), "Factor of the experts' weights; 0: 1."},
    {KEY(model.router_bias), one_of<std::optional<bool>>(),
     "Whether the router's logits have biases (`gpt_oss`)."},
    {KEY(model.expert_bias), one_of<std::optional<bool>>(),
     "Whether the experts' linear layers have biases (`gpt_oss`)."},
    {KEY(model.expert_capacity), between(0, 512),
     "In training an expert takes at most this · tokens · `model.n_expert_per_token` / "
     "`model.n_expert` tokens of a sequence, rounded up: the first ones. What exceeds it is "
     "dropped. 0: no limit."},
    {KEY(model.dense_layers), between(0, 4095),
     "Layers, counted from 0, that have an MLP of `model.n_ff` instead of experts: a list, or a "
     "number: the first so many."},
    {KEY(model.experts_every), between(1, 4096),
     "Experts are in every so many layers, of which the last in each group has them."},
    {KEY(model.positions), one_of<std::optional<Positions>>(),
     "`learned` vectors (`gpt2`), or `rope`: queries and keys are rotated (the others)."},
    {KEY(model.init_std), between(0, 1),
     "Standard deviation of the initial weights; 0: the family's, 0.02. Learned positions get half "
     "of it."},
    {KEY(model.init_residual_scaling), one_of<bool>(),
     "Whether the two projections into the residual stream get 1/√(2 · `model.n_layer`) of "
     "`model.init_std`, as in OpenAI's GPT-2, and in Megatron-LM for all models. If `off`, they "
     "get all of it, as in transformers for Llama, Qwen and Mistral."},
    {KEY(model.init_zero_projections), one_of<bool>(),
     "Whether the two projections into the residual stream are 0 at first, so that every block "
     "begins as the identity (as in nanochat). `model.init_residual_scaling` then says nothing."},
    {KEY(model.rope_theta), at_least(0),
     "Base of the rotation's frequencies; 0: the family's, 10000 or for Qwen 1000000. Llama 3: "
     "500000."},
    {KEY(model.rope_scaling), one_of<RopeScaling>(),
     "How the rotation's frequencies are lowered for longer contexts: all of them by a factor "
     "(`linear`), as for Llama 3.1 (`llama3`), or as for gpt-oss (`yarn`: [Peng et al. "
     "2023](https://arxiv.org/abs/2309.00071))."},
    {KEY(model.rope_factor), at_least(1), "The factor of `model.rope_scaling`."},
    {KEY(model.rope_low_freq_factor), greater_than(0),
     "`llama3`: wavelengths above `model.rope_original_n_ctx` / this are lengthened by the "
     "factor."},
    {KEY(model.rope_high_freq_factor), greater_than(0),
     "`llama3`: wavelengths below `model.rope_original_n_ctx` / this stay as they are."},
    {KEY(model.rope_original_n_ctx), between(1, 16777216),
     "`llama3` and `yarn`: the context length that the factor stretches."},
    {KEY(model.rope_beta_fast), greater_than(0),
     "`yarn`: frequencies that turn at least so many times in `model.rope_original_n_ctx` stay as "
     "they are."},
    {KEY(model.rope_beta_slow), greater_than(0),
     "`yarn`: frequencies that turn at most so many times are lowered by the factor."},
    {KEY(model.rope_truncate), any_text(),
     "`yarn`: the bounds between these are rounded outwards to whole frequencies (not in "
     "`gpt_oss`)."},
    {KEY(model.rope_attention_factor), at_least(0),
     "`yarn`: factor of cosines and sines; 0: 0.1 · ln(`model.rope_factor`) + 1."},
    {KEY(model.init_from), any_path(),
     "A checkpoint from whose weights the run starts, with a new optimizer state; empty: random "
     "weights."},
};

}  // namespace

std::span<const ConfigKey> model_keys() { return table; }

}  // namespace train_gpt
