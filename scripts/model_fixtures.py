#!/usr/bin/env python3
"""Makes the fixture that the model's tests compare with: a tiny GPT-2 computed by PyTorch in
float64.

    scripts/model_fixtures.py [OUT]          default: test/fixtures/gpt2-tiny

Needs only PyTorch (1.13, as packaged by Debian, or newer). Writes to OUT:

config.json           of a Hugging Face GPT-2
model.safetensors     its weights, F32, each exactly representable in bfloat16, so that fp32 and
                      bf16 runs start with equal weights. Names and layouts are Hugging Face's
                      (c_attn, c_proj and c_fc are [in, out]).
expected.safetensors  what float64 computes from them:
    tokens, targets [B, T]      one batch, T < n_ctx; some targets are -1 (ignored), a different
                                number in each row
    logits [B, T, V]
    token_losses [B, T]         0 where ignored
    loss                        mean over the targets that are not ignored
    gradient.NAME               of that loss, for each tensor of the model
    steps.tokens, steps.targets [N, B, T]       a batch for each of N AdamW steps
    steps.losses [N], steps.norms [N]           before each step; the norm of the gradient before
                                                clipping
    final.NAME                                  the weights after the N steps. Do not compare the
                                                key third of c_attn.bias: softmax makes its gradient
                                                zero, and AdamW then amplifies rounding errors.
  AdamW's numbers are in the file's metadata: learning_rate, beta1, beta2, epsilon, weight_decay (on
  tensors of two dimensions), grad_clip (gradient times min(1, grad_clip / norm)).
  Also the error of PyTorch's bfloat16 against float64, to compare ours with. KIND is "pure"
  (weights and activations bfloat16, with fp32 master weights in AdamW) or "autocast"
  (torch.autocast over fp32 weights):
    KIND.error.NAME [2]         for logits, token_losses, gradient.*: largest absolute difference,
                                and the Euclidean norm of the difference relative to that of the
                                float64 tensor
    KIND.error.loss [2]         root mean square over many random batches, absolute and relative: a
                                single scalar's error may be small by chance
    KIND.steps.losses [N]
"""
import json
import math
import os
import struct
import sys

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import torch
import torch.nn.functional as F

N_LAYER, N_HEAD, N_EMBD, N_CTX, VOCAB = 2, 4, 32, 24, 131
B, T, STEPS, LOSS_BATCHES = 3, 17, 10, 64
ADAMW = dict(learning_rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1,
             grad_clip=1.0)
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32"}


def write_safetensors(path, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = dict(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape),
                            data_offsets=[offset, offset + size])
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().numpy().tobytes())


def random_weights(generator):
    """Spread more widely than GPT-2's initialisation, so that no part of the model is close to
    linear or constant."""
    def normal(*shape, mean=0.0, std=0.15):
        values = mean + std * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(torch.bfloat16).to(torch.float64)

    def linear(name, fan_in, fan_out):
        weights[name + ".weight"] = normal(fan_in, fan_out, std=1.0 / math.sqrt(fan_in))
        weights[name + ".bias"] = normal(fan_out)

    def norm(name):
        weights[name + ".weight"] = normal(N_EMBD, mean=1.0)
        weights[name + ".bias"] = normal(N_EMBD)

    weights = {"wte.weight": normal(VOCAB, N_EMBD, std=0.3), "wpe.weight": normal(N_CTX, N_EMBD)}
    for layer in range(N_LAYER):
        h = f"h.{layer}."
        norm(h + "ln_1")
        linear(h + "attn.c_attn", N_EMBD, 3 * N_EMBD)
        linear(h + "attn.c_proj", N_EMBD, N_EMBD)
        norm(h + "ln_2")
        linear(h + "mlp.c_fc", N_EMBD, 4 * N_EMBD)
        linear(h + "mlp.c_proj", 4 * N_EMBD, N_EMBD)
    norm("ln_f")
    return weights


def attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def logits_of(w, tokens):
    """GPT-2: Radford et al. 2019, as Hugging Face's GPT2LMHeadModel computes it without dropout."""
    def norm(x, name):
        return F.layer_norm(x, (N_EMBD,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def linear(x, name):
        return F.linear(x, w[name + ".weight"].t(), w[name + ".bias"])

    batch, length = tokens.shape
    x = F.embedding(tokens, w["wte.weight"]) + w["wpe.weight"][:length]
    for layer in range(N_LAYER):
        h = f"h.{layer}."
        qkv = linear(norm(x, h + "ln_1"), h + "attn.c_attn")
        q, k, v = (part.view(batch, length, N_HEAD, -1).transpose(1, 2)
                   for part in qkv.split(N_EMBD, dim=-1))
        y = attention(q, k, v).transpose(1, 2).reshape(batch, length, N_EMBD)
        x = x + linear(y, h + "attn.c_proj")
        y = F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh")
        x = x + linear(y, h + "mlp.c_proj")
    return F.linear(norm(x, "ln_f"), w["wte.weight"])


def evaluate(weights, tokens, targets, kind):
    """Logits, loss per token, mean loss and all gradients, as "float64", "pure" or "autocast"
    computes them."""
    dtype = {"float64": torch.float64, "pure": torch.bfloat16, "autocast": torch.float32}[kind]
    w = {name: value.to(dtype).requires_grad_() for name, value in weights.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        logits = logits_of(w, tokens)
    wide = logits if kind == "float64" else logits.float()
    losses = F.cross_entropy(wide.reshape(-1, VOCAB), targets.reshape(-1), ignore_index=-1,
                             reduction="none")
    loss = losses.sum() / (targets >= 0).sum()
    gradients = torch.autograd.grad(loss, list(w.values()))
    return (logits.detach().double(), losses.detach().double().view_as(targets), loss.item(),
            {name: g.double() for name, g in zip(w, gradients)})


def train(weights, batches, kind):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with masters in float64, or in float32 for the
    bf16 kinds."""
    master = {name: value.to(torch.float64 if kind == "float64" else torch.float32)
              for name, value in weights.items()}
    m = {name: torch.zeros_like(value) for name, value in master.items()}
    v = {name: torch.zeros_like(value) for name, value in master.items()}
    beta1, beta2 = ADAMW["beta1"], ADAMW["beta2"]
    losses, norms = [], []
    for t, (tokens, targets) in enumerate(batches, 1):
        _, _, loss, gradients = evaluate(master, tokens, targets, kind)
        norm = math.sqrt(sum((g * g).sum().item() for g in gradients.values()))
        losses.append(loss)
        norms.append(norm)
        for name, g in gradients.items():
            g = g.to(master[name].dtype) * min(1.0, ADAMW["grad_clip"] / norm)
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            step = (m[name] / (1 - beta1 ** t)) / (
                (v[name] / (1 - beta2 ** t)).sqrt() + ADAMW["epsilon"])
            decay = ADAMW["weight_decay"] if g.dim() >= 2 else 0.0
            master[name] = master[name] - ADAMW["learning_rate"] * (step + decay * master[name])
    return losses, norms, master


def main():
    out = (sys.argv[1] if len(sys.argv) > 1
           else os.path.join(os.path.dirname(__file__), "../test/fixtures/gpt2-tiny"))
    os.makedirs(out, exist_ok=True)
    generator = torch.Generator().manual_seed(20)
    weights = random_weights(generator)

    def batch():
        # Each token depends on the previous one, with noise, so that there is something to learn.
        tokens = torch.randint(0, VOCAB, (B, T + 1), generator=generator)
        for t in range(T):
            follows = torch.rand(B, generator=generator) < 0.7
            tokens[:, t + 1] = torch.where(follows, (tokens[:, t] * 2 + 1) % VOCAB,
                                           tokens[:, t + 1])
        targets = tokens[:, 1:].clone()
        for row in range(B):
            targets[row, torch.randperm(T, generator=generator)[:2 * row + 1]] = -1
        return tokens[:, :-1].contiguous(), targets

    tokens, targets = batch()
    batches = [batch() for _ in range(STEPS)]
    logits, token_losses, loss, gradients = evaluate(weights, tokens, targets, "float64")
    losses, norms, final = train(weights, batches, "float64")
    reference = {"logits": logits, "token_losses": token_losses,
                 **{"gradient." + name: g for name, g in gradients.items()}}
    tensors = {"tokens": tokens.int(), "targets": targets.int(),
               **{name: value.float() for name, value in reference.items()},
               "loss": torch.tensor(loss, dtype=torch.float64),
               "steps.tokens": torch.stack([x for x, _ in batches]).int(),
               "steps.targets": torch.stack([y for _, y in batches]).int(),
               "steps.losses": torch.tensor(losses, dtype=torch.float64),
               "steps.norms": torch.tensor(norms, dtype=torch.float64),
               **{"final." + name: value.float() for name, value in final.items()}}

    loss_batches = [batch() for _ in range(LOSS_BATCHES)]
    exact = [evaluate(weights, x, y, "float64")[2] for x, y in loss_batches]
    for kind in ("pure", "autocast"):
        logits, token_losses, _, gradients = evaluate(weights, tokens, targets, kind)
        low = {"logits": logits, "token_losses": token_losses,
               **{"gradient." + name: g for name, g in gradients.items()}}
        for name, value in low.items():
            difference = value - reference[name]
            tensors[f"{kind}.error.{name}"] = torch.tensor(
                [difference.abs().max(), difference.norm() / reference[name].norm()],
                dtype=torch.float32)
        differences = [evaluate(weights, x, y, kind)[2] - e
                       for (x, y), e in zip(loss_batches, exact)]
        rms = math.sqrt(sum(d * d for d in differences) / LOSS_BATCHES)
        tensors[f"{kind}.error.loss"] = torch.tensor([rms, rms * LOSS_BATCHES / sum(exact)],
                                                     dtype=torch.float32)
        tensors[f"{kind}.steps.losses"] = torch.tensor(train(weights, batches, kind)[0],
                                                       dtype=torch.float64)

    write_safetensors(os.path.join(out, "model.safetensors"),
                      {name: value.float() for name, value in weights.items()}, {"format": "pt"})
    write_safetensors(os.path.join(out, "expected.safetensors"), tensors,
                      {"made_by": "scripts/model_fixtures.py, PyTorch " + torch.__version__,
                       **{key: repr(value) for key, value in ADAMW.items()}})
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_layer=N_LAYER,
                       n_head=N_HEAD, n_embd=N_EMBD, n_ctx=N_CTX, n_positions=N_CTX,
                       vocab_size=VOCAB, activation_function="gelu_new", layer_norm_epsilon=1e-5,
                       tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, embd_pdrop=0.0,
                       attn_pdrop=0.0, resid_pdrop=0.0, torch_dtype="float32"), file, indent=2)
        file.write("\n")

    print(f"{out}: loss {loss:.6f}, norms {norms[0]:.3f} … {norms[-1]:.3f}, steps",
          " ".join(f"{x:.4f}" for x in losses))
    for kind in ("pure", "autocast"):
        print(
            f"{kind}: relative error of logits {tensors[kind + '.error.logits'][1]:.2e}, gradients",
            *(f"{tensors[f'{kind}.error.gradient.' + name][1]:.1e}" for name in weights),
            f", loss {tensors[kind + '.error.loss'][0]:.1e}, step losses differ by at most",
            f"{(tensors[kind + '.steps.losses'] - tensors['steps.losses']).abs().max():.1e}")


if __name__ == "__main__":
    main()
