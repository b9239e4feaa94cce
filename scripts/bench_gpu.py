#!/usr/bin/env python3
"""The GPU part of `make bench`: compares whole training steps with PyTorch in its fastest settings, one after the other in one run.

    scripts/bench_gpu.py --program build/train_gpt --folder build/bench-runs [--python PYTHON] [--steps 50]

GPT-2 124M with 64 sequences of 1024 tokens, and 1558M with the largest micro-batch that fits, bf16, no accumulation,
synthetic data, medians over the steps after 20 warm-up steps. PyTorch: torch.compile, fused AdamW; the fastest of
autocast and bf16 weights with fp32 masters, and of the flash and cuDNN backends of scaled_dot_product_attention. Prints Markdown.
"""
import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--program", required=True)
parser.add_argument("--folder", type=pathlib.Path, required=True)
parser.add_argument("--python")
parser.add_argument("--steps", type=int, default=50)
args = parser.parse_args()

WARM_UP = 20
T = 1024
VOCABULARY = 50257
MODELS = [  # name, layers, heads, width, micro-batches to try, the largest first
    ("124M", 12, 12, 768, [64]),
    ("1558M", 48, 25, 1600, [48, 40, 32, 24, 16, 12, 8, 4, 2, 1]),
]


def flops_per_token(layers, width):
    """6·N + 6·L·C·T, N the parameters in matrix products, causal attention counted half."""
    return 6 * (12 * layers * width * width + VOCABULARY * width) + 6 * layers * width * T


def ours(name, batch):
    """Median ms of a step and its memory, or None if the micro-batch does not fit."""
    folder = args.folder / f"gpu-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    settings = {"device": "cuda", "run_dir": folder, "data.train": "synthetic", "data.val": "", "tokenizer.path": "",
                "model.vocab_size": VOCABULARY, "batch.micro_batch": batch, "batch.sequence_length": T,
                "batch.tokens_per_step": batch * T, "schedule.steps": 100000, "schedule.tokens": 0, "precision.dtype": "bf16",
                "sampling.every": 0, "checkpoint.every": 0, "evaluation.every": 0}
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    config = f"configs/gpt2-{name.lower()}.json"
    plan = subprocess.run([args.program, "plan", config, *overrides], capture_output=True, text=True)
    if plan.returncode != 0:
        sys.exit(f"error: {plan.stderr.strip()}")
    if "DOES NOT FIT" in plan.stdout:
        return None
    run = subprocess.run([args.program, "train", config, *overrides, "--stop-at", str(WARM_UP + args.steps)],
                         capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"error: {run.stderr.strip()}")
    (args.folder / f"gpu-{name}.log").write_text(run.stdout)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    recompute = next(line for line in plan.stdout.splitlines() if line.startswith("precision.recompute")).split()[2].rstrip(":")
    times = [step["ms"] for step in steps if "ms" in step][WARM_UP:]
    shutil.rmtree(folder)
    return {"ms": statistics.median(times), "batch": batch, "settings": f"recompute {recompute}"}


def pytorch(layers, heads, width, batch):
    """The same for PyTorch's fastest settings."""
    best = None
    for dtype in ("autocast", "masters"):
        for sdpa in ("flash", "cudnn"):
            command = [args.python, "scripts/bench_pytorch.py", "--n-layer", layers, "--n-embd", width, "--n-head", heads,
                       "--vocab", VOCABULARY, "--batch", batch, "--sequence", T, "--dtype", dtype, "--compile", "--device", "cuda",
                       "--sdpa", sdpa, "--threads", 4, "--warmup", WARM_UP, "--steps", args.steps]
            run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
            if run.returncode != 0:
                reason = (run.stderr.strip() or "no message").splitlines()[-1]
                print(f"  PyTorch {dtype}, {sdpa}, batch {batch}: {reason}", file=sys.stderr)
                continue
            result = json.loads(run.stdout.splitlines()[-1])
            ms = statistics.median(result["ms"])
            print(f"  PyTorch {dtype}, {sdpa}, batch {batch}: {ms:.1f} ms", file=sys.stderr)
            if best is None or ms < best["ms"]:
                best = {"ms": ms, "batch": batch, "settings": f"{dtype}, {sdpa}"}
    return best


def first_that_fits(measure, batches):
    return next((result for result in map(measure, batches) if result), None)


print("\n# Speed of a training step on the GPU\n")
gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"],
                     capture_output=True, text=True).stdout.strip()
print(f"{gpu}; bf16, T = {T}, no accumulation, median of {args.steps} steps\n")
print("| model | train_gpt batch | ms | tokens/s | model TFLOP/s | PyTorch batch | ms | tokens/s | train_gpt / PyTorch |")
print("|---|---|---|---|---|---|---|---|---|")
for name, layers, heads, width, batches in MODELS:
    mine = first_that_fits(lambda batch: ours(name, batch), batches)
    if mine is None:
        print(f"| {name} | does not fit | | | | | | | |")
        continue
    peer = first_that_fits(lambda batch: pytorch(layers, heads, width, batch), batches) if args.python else None
    rate = 1e3 * mine["batch"] * T / mine["ms"]
    row = f"| {name} | {mine['batch']} ({mine['settings']}) | {mine['ms']:.1f} | {rate:,.0f} " \
          f"| {1e-12 * rate * flops_per_token(layers, width):.0f} |"
    if peer:
        peer_rate = 1e3 * peer["batch"] * T / peer["ms"]
        row += f" {peer['batch']} ({peer['settings']}) | {peer['ms']:.1f} | {peer_rate:,.0f} | {rate / peer_rate:.2f} × |"
    else:
        row += " – | – | – | – |"
    print(row, flush=True)
