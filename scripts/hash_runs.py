#!/usr/bin/env python3
"""Hashes the losses, gradient norms and saved tensors of short trainings, to show that a change
keeps the bits.

    scripts/hash_runs.py [--program build/train_gpt] [--device cpu] [--only TEXT]
        [--keep FOLDER | --resume FOLDER]

Run it before and after the change, and compare what it prints. It trains GPT-2 and Llama-like
models and mixtures of four layers on one rank, on meshes over each axis and with each of ZeRO's
stages; runs of many ranks need mpirun. --keep leaves the run folders of step 2 in FOLDER. --resume
continues these with another program; its hashes must be the same as the first one's. With
LD_LIBRARY_PATH set to a simulated GPU, --device cuda hashes runs on that GPU.
"""
import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

GPT2 = {"family": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 64, "n_ctx": 64, "vocab_size": 300}
LLAMA = {"family": "llama", "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_ff": 96,
         "n_ctx": 64, "vocab_size": 300}
QWEN3 = dict(LLAMA, family="qwen3", head_size=16, tied_head=True)
MIXTURE = {key: value for key, value in LLAMA.items() if key != "n_ff"} | {
    "family": "qwen2_moe", "n_expert": 6, "n_expert_per_token": 2, "n_ff_expert": 48,
    "n_ff_shared": 32, "expert_capacity": 1.5, "window": 24, "window_pattern": "SL"}

# Name, ranks, model, and keys beside those of config() below.
RUNS = [
    (f"{name}-{dtype}-{recompute}", 1, model,
     {"precision.dtype": dtype, "precision.recompute": recompute})
    for name, model in (("gpt2", GPT2), ("llama", LLAMA), ("qwen3", QWEN3))
    for dtype in ("fp32", "bf16") for recompute in ("none", "elementwise", "block")
]
MESHES = [
    ("zero-0", 2, {"zero": 0}),
    ("zero-1", 2, {"zero": 1}),
    ("zero-2", 2, {"zero": 2}),
    ("zero-3", 2, {"zero": 3}),
    ("zero-1-uneven", 3, {"zero": 1}),
    ("zero-3-small-buckets", 3, {"zero": 3, "bucket_mb": 0.05}),
    ("reduce-bf16", 2, {"zero": 1, "sums": "bf16", "bucket_mb": 0.05}),
    ("replicas", 4, {"zero": 2, "shard_ranks": 2}),
    ("replicas-bf16", 4, {"zero": 1, "shard_ranks": 2, "sums": "bf16"}),
    ("tensor", 2, {"tensor": 2}),
    ("tensor-chunks", 2, {"tensor": 2, "tensor_chunks": 2, "tensor_keep_gathered": True}),
    ("tensor-zero-3", 4, {"tensor": 2, "zero": 3}),
    ("context", 2, {"context": 2}),
    ("context-zero-3", 4, {"context": 2, "zero": 3}),
    ("pipeline", 2, {"pipeline": 2}),
    ("pipeline-gpipe", 2, {"pipeline": 2, "schedule": "gpipe"}),
    ("pipeline-interleaved", 2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}),
    ("pipeline-zero-bubble", 2, {"pipeline": 2, "schedule": "zero_bubble"}),
    ("pipeline-zero-bubble-2", 4, {"pipeline": 2, "schedule": "zero_bubble", "zero": 2}),
    ("pipeline-tensor", 4, {"pipeline": 2, "tensor": 2}),
    ("pipeline-interleaved-zero-3", 4,
     {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2, "zero": 3}),
    ("tensor-context-pipeline", 8, {"tensor": 2, "context": 2, "pipeline": 2}),
    ("exact", 2, {"sums": "exact"}),
    ("exact-zero-3-uneven", 3, {"zero": 3, "sums": "exact", "bucket_mb": 0.05}),
]
RUNS += [
    (f"{name}-{mesh}", ranks, model,
     {"precision.dtype": "bf16" if index % 2 else "fp32",
      "precision.recompute": ("none", "elementwise", "block")[index % 3],
      **{f"parallel.{key}": value for key, value in keys.items()}})
    for index, (mesh, ranks, keys) in enumerate(MESHES)
    for name, model in (("gpt2", GPT2), ("llama", LLAMA))
]
ROUTERS = ({"router.balance": "loss", "router.level": "sequence", "router.z_loss": 1e-3},
           {"router.balance": "loss", "router.level": "step"}, {"router.balance": "bias"})
RUNS += [(f"mixture-{dtype}-{recompute}", 1, MIXTURE,
          {"precision.dtype": dtype, "precision.recompute": recompute, **router})
         for dtype in ("fp32", "bf16")
         for recompute, router in zip(("none", "elementwise", "block"), ROUTERS)]
RUNS += [
    (f"mixture-{mesh}", ranks, MIXTURE | ({"expert_capacity": 0} if "context" in keys else {}),
     {"precision.dtype": "fp32" if index % 2 else "bf16", **ROUTERS[index % 3],
      **{f"parallel.{key}": value for key, value in keys.items()}})
    for index, (mesh, ranks, keys) in enumerate(MESHES)
    if mesh in ("zero-1-uneven", "zero-3", "tensor-zero-3", "context-zero-3",
                "pipeline-zero-bubble-2", "exact-zero-3-uneven")]
GPU_RUNS = [run for run in RUNS if run[1] == 1]


def config(folder, model, keys, device):
    """A configuration of four steps of eight micro-batches, with documents in every second
    model."""
    result = {
        "run_dir": str(folder), "device": device, "model": model,
        "data": {"train": "synthetic", "val": "synthetic"},
        "batch": {"tokens_per_step": 512, "micro_batch": 1, "sequence_length": 64},
        "optimizer": {"learning_rate": 0.002, "z_loss": 1e-4},
        "schedule": {"steps": 4, "warmup_steps": 1}, "evaluation": {"every": 2, "max_tokens": 512},
        "checkpoint": {"every": 2, "keep": 0},
    }
    for key, value in ({"parallel.sums": "fp32"} | keys).items():
        section, name = key.split(".")
        result.setdefault(section, {})[name] = value
    return result


def tensors_of(file):
    """The names, descriptions and bytes of a safetensors file, without its metadata."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    for name in sorted(header):
        first, last = header[name]["data_offsets"]
        yield f"{name} {header[name]['dtype']} {header[name]['shape']}".encode()
        yield data[8 + length + first:8 + length + last]


def hash_of(folder):
    """Hashes of a finished run: of its losses and norms, and of the tensors of its last
    checkpoint."""
    numbers, tensors = hashlib.sha256(), hashlib.sha256()
    lines = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {key: record[key] for key in ("loss", "grad_norm", "val_loss") if key in record}
        lines[(record["step"], "val_loss" in kept)] = kept
    for key in sorted(lines):
        numbers.update(json.dumps([key, lines[key]], sort_keys=True).encode())
    for file in sorted((folder / "step-00000004").glob("*.safetensors")):
        tensors.update(file.name.encode())
        for part in tensors_of(file):
            tensors.update(part)
    return f"{numbers.hexdigest()[:16]} {tensors.hexdigest()[:16]}"


def train(program, ranks, file, extra, threads):
    """Trains with a configuration; the run's output is shown if it fails."""
    command = [program, "train", str(file), "--quiet", *extra]
    if ranks > 1:
        command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMPI_ALLOW_RUN_AS_ROOT="1",
                       OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1")
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode not in (0, 75):
        sys.exit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}")


def main():
    """Trains what the options name, and prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/train_gpt")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=pathlib.Path, help="leave run folders of step 2 here")
    parser.add_argument("--resume", type=pathlib.Path,
                        help="continue the run folders that --keep left here")
    options = parser.parse_args()
    program = str(pathlib.Path(options.program).resolve())
    with tempfile.TemporaryDirectory() as work:
        for name, ranks, model, keys in RUNS if options.device == "cpu" else GPU_RUNS:
            if options.only not in name:
                continue
            folder = pathlib.Path(work) / name
            file = pathlib.Path(work) / f"{name}.json"
            file.write_text(json.dumps(config(folder, model, keys, options.device)))
            threads = 2 if ranks == 1 else 1
            if options.resume:
                shutil.copytree(options.resume / name, folder)
            elif options.keep:
                train(program, ranks, file, ["--stop-at", "2"], threads)
                shutil.copytree(folder, options.keep / name)
            train(program, ranks, file, [], threads)
            print(name, hash_of(folder), flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
