#!/usr/bin/env python3
"""Makes the fixtures of Llama-class models that the model's tests compare with: tiny models of
transformers' own classes, computed in float64. needs: torch, transformers

    scripts/family_fixtures.py [OUT [FAMILY…]]         default: test/fixtures, all families

Writes OUT/FAMILY-tiny for each family: config.json and model.safetensors as transformers writes
them (F32, each weight exactly representable in bfloat16, so that fp32 and bf16 runs start with
equal weights), and expected.safetensors as scripts/model_fixtures.py does, but for the steps of
AdamW: tokens, targets, logits, token_losses, loss, gradient.NAME, and the errors of transformers'
model in bfloat16, pure.error.NAME [2]: the largest absolute difference and the norm of the
difference relative to that of the float64 tensor, the greatest of 16 batches each: in one batch the
error of a bias may be small by chance.

The shapes are odd on purpose: heads that are not n_embd / n_head wide, widths that no tile divides,
one to three query heads for each key/value head, sequences longer than a tile of attention.
"""
import math
import os
import sys

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import torch
import torch.nn.functional as F
import transformers

from model_fixtures import write_safetensors

LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    # Three query heads a key/value head, 12 wide though 42 / 6 is 7; a head of its own; T beyond
    # attention's tiles
    "llama": (transformers.LlamaForCausalLM, dict(
        vocab_size=67, hidden_size=42, intermediate_size=72, num_attention_heads=6,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=200, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=LLAMA3), 2, 150),
    # Biases of q, k and v; one key/value head
    "qwen2": (transformers.Qwen2ForCausalLM, dict(
        vocab_size=131, hidden_size=32, intermediate_size=40, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=24, rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e6)), 3, 17),
    # Norms of heads, which are wider together than n_embd; heads and T that make whole tiles of
    # attention on GPUs, too
    "qwen3": (transformers.Qwen3ForCausalLM, dict(
        vocab_size=131, hidden_size=36, intermediate_size=56, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=200, rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4)), 1, 150),
    "mistral": (transformers.MistralForCausalLM, dict(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=24, rms_norm_eps=1e-5,
        tie_word_embeddings=False, sliding_window=None,
        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), 3, 17),
    # Mixtures. A window in all layers
    "mixtral": (transformers.MixtralForCausalLM, dict(
        vocab_size=53, hidden_size=28, intermediate_size=18, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=24, sliding_window=5,
        num_local_experts=5, num_experts_per_tok=2, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4)), 3, 17),
    # Experts in one of three layers, beside a shared one; weights as they are; a window in one
    # layer
    "qwen2_moe": (transformers.Qwen2MoeForCausalLM, dict(
        vocab_size=53, hidden_size=28, intermediate_size=26, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=3, max_position_embeddings=24, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=14, norm_topk_prob=False,
        shared_expert_intermediate_size=22, decoder_sparse_step=2, mlp_only_layers=[],
        tie_word_embeddings=False, use_sliding_window=True, sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=1e6)), 3, 17),
    # An MLP in the first of three layers; normalised weights; heads that are wider together than
    # n_embd
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, dict(
        vocab_size=53, hidden_size=26, intermediate_size=38, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=24, num_hidden_layers=3,
        num_experts=7, num_experts_per_tok=3, moe_intermediate_size=10, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[0], tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4)), 3, 17),
    # Norms of the whole width of queries and keys; one expert a token
    "olmoe": (transformers.OlmoeForCausalLM, dict(
        vocab_size=53, hidden_size=32, intermediate_size=9, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, num_experts=9, num_experts_per_tok=1,
        norm_topk_prob=False, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4)), 3, 17),
    # Sinks, biases everywhere, windows in layers 0 and 2; activations that reach the clamps; T
    # beyond attention's tiles
    "gpt_oss": (transformers.GptOssForCausalLM, dict(
        vocab_size=53, hidden_size=22, intermediate_size=14, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=200, num_hidden_layers=3,
        sliding_window=7, num_local_experts=5, num_experts_per_tok=3, swiglu_limit=1.5,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=500.0, factor=8.0, beta_fast=8.0,
                             beta_slow=1.0, truncate=False,
                             original_max_position_embeddings=32)), 2, 150),
}


def randomize(model, generator):
    """Spread more widely than an initialisation, so that no part of the model is close to linear or
    constant."""
    for name, p in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        fan_in = (p.shape[1 if p.dim() == 2 or "gpt_oss" in type(model).__module__ else 2]
                  if p.dim() > 1 else 0)
        is_weight = p.dim() > 1 and not name.endswith("_bias")
        std = (0.3 if "embed" in name else 1 / math.sqrt(fan_in) if is_weight
               else 1 if "sinks" in name else 0.15)
        values = mean + std * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data = values.to(torch.bfloat16).float()


def evaluate(model, tokens, targets, dtype):
    """Logits, loss per token, mean loss and all gradients of a copy of the model in this dtype."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    copy = copy.to(dtype)
    if dtype == torch.float64:  # the frequencies too; models keep them in fp32
        rotary = copy.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.double()
    logits = copy(tokens).logits
    wide = logits if dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.reshape(-1, wide.shape[-1]), targets.reshape(-1), ignore_index=-1,
                             reduction="none")
    loss = losses.sum() / (targets >= 0).sum()
    names, weights = zip(*copy.named_parameters())
    gradients = torch.autograd.grad(loss, weights)
    return ({"logits": logits.detach().double(),
             "token_losses": losses.detach().double().view_as(targets),
             **{"gradient." + name: g.double() for name, g in zip(names, gradients)}}, loss.item())


def make(out, family, seed):
    kind, options, B, T = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    config = kind.config_class(
        **{"num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0, **options},
        attn_implementation="eager", experts_implementation="eager")
    model = kind(config).eval()
    randomize(model, generator)

    def batch():
        tokens = torch.randint(0, config.vocab_size, (B, T), generator=generator)
        targets = torch.randint(0, config.vocab_size, (B, T), generator=generator)
        for row in range(B):
            targets[row, torch.randperm(T, generator=generator)[:2 * row + 1]] = -1
        return tokens, targets

    tokens, targets = batch()
    reference, loss = evaluate(model, tokens, targets, torch.float64)
    tensors = {"tokens": tokens.int(), "targets": targets.int(),
               "loss": torch.tensor(loss, dtype=torch.float64),
               **{name: value.float() for name, value in reference.items()}}
    differences = []
    for i in range(16):
        x, y = (tokens, targets) if i == 0 else batch()
        (exact, exact_loss), (low, low_loss) = (evaluate(model, x, y, dtype)
                                                for dtype in (torch.float64, torch.bfloat16))
        differences.append(low_loss - exact_loss)
        for name, value in low.items():
            difference = value - exact[name]
            error = torch.tensor([difference.abs().max(), difference.norm() / exact[name].norm()],
                                 dtype=torch.float32)
            name = "pure.error." + name
            tensors[name] = torch.maximum(tensors[name], error) if name in tensors else error
    rms = math.sqrt(sum(d * d for d in differences) / len(differences))
    tensors["pure.error.loss"] = torch.tensor([rms, rms / loss], dtype=torch.float32)

    folder = os.path.join(out, family + "-tiny")
    os.makedirs(folder, exist_ok=True)
    model.save_pretrained(folder)  # an expert's matrices under names of their own, but gpt-oss's
    generation = os.path.join(folder, "generation_config.json")
    if os.path.exists(generation):
        os.remove(generation)
    write_safetensors(os.path.join(folder, "expected.safetensors"), tensors, {
        "made_by": f"scripts/family_fixtures.py, seed {seed}, PyTorch {torch.__version__}, "
                   f"transformers {transformers.__version__}"})
    worst = max(tensors[name][1].item() for name in tensors
                if name.startswith("pure.error.gradient."))
    print(f"{folder}: loss {loss:.6f}; in bfloat16 {rms:.1e} off, gradients at most {worst:.1e}")


def main():
    transformers.logging.set_verbosity_error()
    out = (sys.argv[1] if len(sys.argv) > 1
           else os.path.join(os.path.dirname(__file__), "../test/fixtures"))
    for i, family in enumerate(FAMILIES):
        if family in (sys.argv[2:] or FAMILIES):
            make(out, family, 30 + i)


if __name__ == "__main__":
    main()
