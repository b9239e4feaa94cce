#!/usr/bin/env python3
"""Reports what can be known of the CUDA kernels without a GPU, as Markdown: registers, spills and shared memory from ptxas; and
from a training step on a simulated GPU the bytes that each kernel moved and the least that it must move, sectors per request
and the ideal number, and the degree of bank conflicts. Where nvdisasm is installed, also the instructions of the head's softmax.

    scripts/kernel_report.py --simulator LIBRARIES [--program build/train_gpt] [--nvcc nvcc] > docs/kernels.md

The steps: one layer of GPT-2 124M (C = 768, 12 heads of 64, vocabulary 50257), and one of a Qwen3 of that width with 4 key/value
heads and a hidden layer of 2048, for the kernels that GPT-2 lacks; for those of mixtures one with 32 experts of 512, 4 for a token, a shared expert,
a balancing loss and biases; B = 2, T = 512, bf16.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import tempfile

os.environ.setdefault("GPUSIM_MEM", "8G")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--simulator", required=True)
parser.add_argument("--program", default="build/train_gpt")
parser.add_argument("--nvcc", default="nvcc")
args = parser.parse_args()

B, T, C, H, V = 2, 512, 768, 12, 50257
M, VP = B * T, (V + 127) // 128 * 128
PARAMETERS = VP * C + T * C + 12 * C * C + 13 * C + 2 * C
U = 2 * M * C  # bytes of B·T·C elements in bf16
H_KV, F = 4, 2048  # of the Qwen3
NORM = (2 * U + 2 * U + 4 * U) / 3  # on average: the second norm of the layer adds what the attention gave to the residual stream
HEADS = 2 * M * (H + H_KV) * C // H  # bytes of its queries and keys
E, K, F_E = 32, 4, 512  # of the mixture
R = M * K

# The least that a launch must read and write, in bytes; None: it depends on the data or is a small second pass.
LEAST = [
    (r"norm: forward_(warps|rows)", NORM), (r"norm_backward: backward_rows", 4 * U), (r"tile_forward: forward", 4 * U),
    (r"tile_backward: backward_keys", 6 * U), (r"tile_backward: backward_queries", 6 * U),
    (r"loss_in_shared_memory", 2 * 2 * M * V), (r"add_embeddings", 2 * U), (r"update_parameters", 30 * PARAMETERS),
    (r"sum_squares", 4 * PARAMETERS),
    (r"rope: turn_heads", 2 * HEADS), (r"rope: backward_heads", 3 * HEADS), (r"swiglu: forward_kernel", 3 * 2 * M * F),
    (r"swiglu: backward_kernel", 5 * 2 * M * F), (r"residual: add_rows", 3 * 2 * M * C),
]
# With one expert's weights in every product, and every row's input read once.
GROUPED = [
    (r"combine: forward_kernel", 2 * R * C + 2 * U), (r"combine: backward_kernel", U + 2 * 2 * R * C),
    (r"route: forward", 4 * M * E + 8 * R), (r"route: backward", 2 * 4 * M * E + 8 * R),
]


def demangled(name):
    """A kernel's name with the types that it is instantiated for."""
    text = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    source = re.search(r"_(\d+)_(\w+?)_cu_[0-9a-f]+", name)
    text = re.sub(r"\(anonymous namespace\)::|train_gpt::cuda::|_GLOBAL__N__\w+::", "", text)
    text = text.replace("__nv_bfloat16", "bf16").removeprefix("void ")
    depth, end = 0, len(text)
    for i, letter in enumerate(text):  # up to the argument list
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and i > 0 and not text[i:].startswith("(bool)") and not text[i:].startswith("(int)"):
            end = i
            break
    return (source.group(2) + ": " if source else "") + re.sub(r"\((bool|int)\)", "", text[:end])


ARCHITECTURES = ["90", "100", "120"]


def compile_to(cubin, source, architecture):
    """Compiles a file; returns what ptxas says."""
    return subprocess.run([args.nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-I.", "-DTRAIN_GPT_CUDA", "-gencode",
                           f"arch=compute_{architecture},code=sm_{architecture}", "-Xptxas", "-v", "-cubin", "-o", cubin, source],
                          capture_output=True, text=True, check=True).stderr


def resources_on(architecture):
    """{kernel: (registers, spilled bytes, static shared bytes)}"""
    found = {}
    for source in sorted(glob.glob("device/*.cu") + glob.glob("kernels/**/*.cu", recursive=True)):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
            log = compile_to(out.name, source, architecture)
        for entry in re.split(r"Compiling entry function ", log)[1:]:
            name = demangled(re.match(r"'(\S+)'", entry).group(1))
            registers = int(re.search(r"Used (\d+) registers", entry).group(1))
            spills = sum(map(int, re.findall(r"(\d+) bytes spill", entry)))
            shared = re.search(r"(\d+) bytes smem", entry)
            found[name] = (registers, spills, int(shared.group(1)) if shared else 0)
    return found


def resources():
    """{kernel: (registers, spilled bytes, static shared bytes)}: one number, or one per architecture where they differ."""
    def together(values):
        return str(values[0]) if len(set(values)) == 1 else " / ".join(map(str, values))
    each = [resources_on(architecture) for architecture in ARCHITECTURES]
    return {name: tuple(together([found[name][i] for found in each if name in found]) for i in range(3)) for name in each[0]}


def loops_of(sass):
    """The opcodes of each loop in a function's SASS: from a label to the branch back to it."""
    labels, opcodes = {}, []
    for line in sass.split("\n"):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(opcodes)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);", line):
            opcodes.append(instruction.group(1))
            target = re.search(r"`\((\.L_x_\d+)\)", instruction.group(2))
            if opcodes[-1].startswith("BRA") and target and target.group(1) in labels:
                yield opcodes[labels[target.group(1)]:]


def softmax_instructions(architecture):
    """Instructions per logit of the passes of loss_in_shared_memory<bf16>: copy, sum and gradient."""
    passes = [("LDGSTS", "LDGSTS", None), ("LDS.128", "MUFU.EX2", "STG"), ("STG.E.128", "MUFU.EX2", None)]  # access, also in it, not in it
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        compile_to(cubin.name, "kernels/head_loss.cu", architecture)
        sass = subprocess.run(["nvdisasm", "-c", cubin.name], capture_output=True, text=True, check=True).stdout
    function = next(text for text in sass.split("\n.text.")[1:] if re.match(r"\S*loss_in_shared_memoryI\d+__nv_bfloat16", text))
    found = []
    for access, needed, excluded in passes:
        most = (0, 0)  # accesses and instructions of the loop that is unrolled most
        for loop in loops_of(function):
            count = lambda prefix: sum(opcode.startswith(prefix) for opcode in loop)
            if count(needed) and not (excluded and count(excluded)):
                most = max(most, (count(access), len(loop)))
        found.append(most[1] / (8 * most[0]))
    return found


# The same until 2026-11-23, along the path of whole packs; the maximum was then a pass of its own.
SOFTMAX_BEFORE = {"90": (2.6, 8.5, 8.0), "100": (2.0, 8.0, 8.1), "120": (1.8, 8.5, 8.0)}


def statistics(**model):
    """In a step of GPT-2 with these changes, {kernel: (launches, read, written, sectors per load, ideal, sectors per store, ideal, bank conflicts)}"""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"run_dir": folder + "/run", "device": "cuda", "model.n_layer": 1, "model.n_head": H, "model.n_embd": C,
                    "model.n_ctx": T, "model.vocab_size": V, "data.train": "synthetic", "data.val": "", "tokenizer.path": "",
                    "batch.micro_batch": B, "batch.sequence_length": T, "batch.tokens_per_step": M, "precision.dtype": "bf16",
                    "schedule.steps": 1, "schedule.tokens": 0, "schedule.warmup_steps": 0, "sampling.every": 0,
                    "kernels.autotune": "off", "kernels.attention": "own", **{f"model.{key}": value for key, value in model.items()}}
        overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        environment = dict(os.environ, LD_LIBRARY_PATH=args.simulator, GPUSIM_STATS="1")
        run = subprocess.run([args.program, "train", "configs/gpt2-124m.json", *overrides], capture_output=True, text=True,
                             env=environment)
    if run.returncode != 0:
        raise SystemExit(run.stderr)
    found = {}
    for block in run.stderr.split("gpusim stats: ")[1:]:
        name = demangled(block.split("\n", 1)[0].strip())
        launches = int(re.search(r"launches (\d+)", block).group(1))
        loads = re.search(r"global loads: (\d+) bytes, \d+ requests, ([\d.]+) sectors/request \(ideal ([\d.]+)\)", block)
        stores = re.search(r"global stores: (\d+) bytes, \d+ requests, ([\d.]+) sectors/request \(ideal ([\d.]+)\)", block)
        conflicts = re.search(r"bank conflict degree ([\d.]+)", block)
        found[name] = (launches, int(loads.group(1)), int(stores.group(1)), float(loads.group(2)), float(loads.group(3)),
                       float(stores.group(2)), float(stores.group(3)), float(conflicts.group(1)))
    return found


compiled = resources()
moved = statistics(family="qwen3", n_kv_head=H_KV, head_size=C // H, n_ff=F, vocab_size=128256) | statistics()
print("# CUDA kernels without a GPU\n")
print(f"Made by `scripts/kernel_report.py`: registers, spills and static shared memory as ptxas gives them for sm_{', sm_'.join(ARCHITECTURES)}")
print("(one number where it is the same for all), and what a")
print(f"simulated GPU counted in a training step of one layer of GPT-2 124M (C = {C}, {H} heads, vocabulary {V}, B = {B}, T = {T}, bf16),")
print(f"for kernels that it lacks in one of a Qwen3 ({H_KV} key/value heads, hidden layer of {F}), and the warm-up before it. Bytes are those that threads ask for in a launch on average, whether a cache has them or not; the least is")
print("what must be read and written once; where segments are looked up or rows of weights are read again, threads ask for more. Efficiency is ideal sectors over sectors; a bank conflict degree of 1 is none. No times:")
print("[measurements.md](measurements.md#one-h100) has those that were measured. The simulator counts the bytes of asynchronous copies to shared memory (attention, the head, the backward pass of layer")
print("norm) but not their sectors, so that load efficiency there speaks of the other loads alone.\n")
print("| kernel | registers | spills | shared B | MB moved | least MB | load efficiency | store efficiency | bank conflicts |")
print("|---|---|---|---|---|---|---|---|---|")
for name in sorted(moved):
    if name.startswith("cub::"):  # CUDA's own sort
        continue
    launches, read, written, load, load_ideal, store, store_ideal, conflicts = moved[name]
    registers, spills, shared = compiled.get(name, ("–", "–", "–"))
    least = next((bytes for pattern, bytes in LEAST if re.search(pattern, name)), None)
    efficiency = ["–" if sectors == 0 else f"{min(100, 100 * ideal / sectors):.0f} %" for sectors, ideal in ((load, load_ideal), (store, store_ideal))]
    print(f"| `{name}` | {registers} | {spills} | {shared} | {(read + written) / launches / 1e6:.2f} | "
          f"{'' if least is None else format(least / 1e6, '.2f')} | {efficiency[0]} | {efficiency[1]} | "
          f"{'–' if conflicts == 0 else format(conflicts, '.2f')} |")
others = sorted(name for name in set(compiled) - set(moved) if not name.startswith("cub::"))
print(f"\nKernels that this step does not use ({len(others)}): registers and spills.\n")
print("| kernel | registers | spills | shared B |")
print("|---|---|---|---|")
for name in others:
    print(f"| `{name}` | {compiled[name][0]} | {compiled[name][1]} | {compiled[name][2]} |")
if shutil.which("nvdisasm"):
    print("\nSASS instructions of the head's softmax per bf16 logit (`loss_in_shared_memory<bf16>`): those of each loop over a row, from its")
    print("label to the branch back, over 8 for each 16-byte access to the row in it. Of the loops of a pass the one that is unrolled most counts.")
    print("Before: until 2026-11-23, along the path of whole packs.\n")
    print("| GPU | copy to shared memory | maximum and sum | gradient | all | before: copy | maximum and sum | gradient | all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for architecture in ARCHITECTURES:
        counts, before = softmax_instructions(architecture), SOFTMAX_BEFORE[architecture]
        print(f"| sm_{architecture} | " + " | ".join(f"{count:.1f}" for count in [*counts, sum(counts), *before, sum(before)]) + " |")
