#!/usr/bin/env python3
"""The PyTorch side of `make bench`: the same training step, as fast as PyTorch alone can run it.

    scripts/bench_pytorch.py --n-layer 6 --n-embd 384 --n-head 6 --vocab 4096 --batch 8 \\
        --sequence 256 --dtype fp32|autocast|masters [--compile] --threads 2 [--steps 10 | --server]
        [--device cuda [--sdpa auto|flash|cudnn]]
        [--family llama --n-kv-head 2 --n-ff 1024 [--tied]]
        [--family olmoe|qwen3_moe --n-kv-head 2 --n-ff 288 --n-expert 8
            --n-expert-per-token 2 --experts eager|grouped_mm]

GPT-2, or transformers' LlamaForCausalLM, OlmoeForCausalLM or Qwen3MoeForCausalLM (--n-ff: of an
expert), with scaled_dot_product_attention, cross-entropy, gradient clipping at 1.0, fused AdamW (if
this version of PyTorch has it), synthetic data. The optimizer's weights are fp32 with every dtype:
    fp32       everything in fp32
    autocast   torch.autocast to bfloat16 over fp32 weights
    masters    weights, activations and gradients bfloat16; AdamW on fp32 copies of the weights

Prints one JSON line when it is ready, then one for --steps, or in --server mode one for each line
"go N" on stdin:
    {"ms": [of each of N steps], "loss": of the last step, "peak_rss": bytes, during the steps only}
On a GPU, "peak_rss" is the most memory that PyTorch had allocated there, --vocab is padded to a
multiple of 128 as fast programs do, and steps follow each other without waiting for the host.
"""
import argparse
import json
import math
import os
import sys
import time

parser = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
for option in ("--n-layer", "--n-embd", "--n-head", "--vocab", "--batch", "--sequence",
               "--threads"):
    parser.add_argument(option, type=int, required=True)
parser.add_argument("--dtype", choices=("fp32", "autocast", "masters"), required=True)
parser.add_argument("--family", choices=("gpt2", "llama", "olmoe", "qwen3_moe"), default="gpt2")
parser.add_argument("--n-kv-head", type=int)
parser.add_argument("--n-ff", type=int)
parser.add_argument("--tied", action="store_true")
parser.add_argument("--n-expert", type=int)
parser.add_argument("--n-expert-per-token", type=int)
parser.add_argument("--experts", choices=("eager", "grouped_mm"), default="grouped_mm")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--sdpa", choices=("auto", "flash", "cudnn"), default="auto")
parser.add_argument("--warmup", type=int, default=2)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--server", action="store_true")
args = parser.parse_args()
if args.device == "cuda":
    args.vocab = (args.vocab + 127) // 128 * 128
os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before OpenMP starts

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(args.vocab, args.n_embd)
        self.wpe = nn.Embedding(args.sequence, args.n_embd)
        self.blocks = nn.ModuleList(Block(args.n_embd, args.n_head) for _ in range(args.n_layer))
        self.ln_f = nn.LayerNorm(args.n_embd)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Transformers(nn.Module):
    def __init__(self):
        super().__init__()
        import transformers  # GPT-2 above does without it
        name = {"llama": "Llama", "olmoe": "Olmoe", "qwen3_moe": "Qwen3Moe"}[args.family]
        shape = dict(vocab_size=args.vocab, hidden_size=args.n_embd, intermediate_size=args.n_ff,
                     num_hidden_layers=args.n_layer, num_attention_heads=args.n_head,
                     num_key_value_heads=args.n_kv_head, max_position_embeddings=args.sequence,
                     tie_word_embeddings=args.tied, use_cache=False)
        if args.n_expert:
            shape.update(num_experts=args.n_expert, num_experts_per_tok=args.n_expert_per_token,
                         experts_implementation=args.experts)
        if args.family == "qwen3_moe":
            shape.update(moe_intermediate_size=args.n_ff, head_dim=args.n_embd // args.n_head,
                         norm_topk_prob=True)
        config = getattr(transformers, name + "Config")(attn_implementation="sdpa", **shape)
        self.model = getattr(transformers, name + "ForCausalLM")(config)

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trainer:
    def __init__(self):
        torch.set_num_threads(args.threads)
        torch.manual_seed(1)
        if args.device == "cuda" and args.sdpa != "auto":
            backends = {"flash": torch.backends.cuda.enable_flash_sdp,
                        "cudnn": torch.backends.cuda.enable_cudnn_sdp}
            for name, enable in backends.items():
                enable(name == args.sdpa)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
        model = (GPT() if args.family == "gpt2" else Transformers()).to(args.device)
        if args.dtype == "masters":
            model = model.bfloat16()
        self.weights = list(model.parameters())
        self.masters = ([w.detach().float() for w in self.weights] if args.dtype == "masters"
                        else self.weights)
        matrices = [w for w in self.masters if w.dim() >= 2]
        vectors = [w for w in self.masters if w.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1},
                  {"params": vectors, "weight_decay": 0.0}]
        settings = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8)
        try:
            self.optimizer = torch.optim.AdamW(groups, fused=True, **settings)
        except (RuntimeError, TypeError):  # before PyTorch 2.4 there was no fused AdamW on the CPU
            self.optimizer = torch.optim.AdamW(groups, foreach=False, **settings)
        self.model = torch.compile(model) if args.compile else model
        self.generator = torch.Generator().manual_seed(2)

    def step(self):
        data = torch.randint(0, args.vocab, (args.batch, args.sequence + 1),
                             generator=self.generator)
        if args.device == "cuda":
            data = data.pin_memory().to("cuda", non_blocking=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.dtype == "autocast"):
            loss = self.model(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        loss.backward()
        if args.dtype == "masters":
            for master, weight in zip(self.masters, self.weights):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if args.dtype == "masters":
            with torch.no_grad():
                if hasattr(torch, "_foreach_copy_"):
                    torch._foreach_copy_(self.weights, self.masters)
                else:
                    for weight, master in zip(self.weights, self.masters):
                        weight.copy_(master)
        return loss.detach()

    def run(self, steps):
        times, loss = [], math.nan
        if args.device == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            events[0].record()
            for event in events[1:]:
                loss = self.step()
                event.record()
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
            loss = loss.item()
        else:
            for _ in range(steps):
                start = time.perf_counter()
                loss = self.step().item()
                times.append((time.perf_counter() - start) * 1e3)
        print(json.dumps({"ms": [round(t, 2) for t in times], "loss": round(loss, 6),
                          "peak_rss": peak_rss()}), flush=True)


def reset_peak_rss():
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # the peak then includes start-up and compilation


def peak_rss():
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main():
    start = time.perf_counter()
    trainer = Trainer()
    for _ in range(args.warmup):
        trainer.step()
    reset_peak_rss()
    print(json.dumps({"ready": True, "torch": torch.__version__, "threads": torch.get_num_threads(),
                      "start_s": round(time.perf_counter() - start, 1)}), flush=True)
    if not args.server:
        trainer.run(args.steps)
        return
    for line in sys.stdin:
        command, count = line.split()
        if command == "go":
            trainer.run(int(count))


if __name__ == "__main__":
    main()
