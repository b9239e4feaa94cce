"""The parts of scripts/first_hour.sh, the most worth knowing first, and its targets.

A part's function gets a Work (first_hour.py): it runs commands with work.run(), which gives what
they print, keeps the part's time limit and notes what goes wrong; it fills work.lines, the Markdown
of its section, and work.data, which targets are judged by. On a simulated GPU (work.tiny) it takes
sizes with which it ends in seconds.
"""
import csv
import glob
import json
import os
import pathlib
import re
import shutil
import statistics
from typing import Callable, NamedTuple

import bench_gpu


class Skipped(Exception):
    """The part cannot run here; says why."""


class Part(NamedTuple):
    name: str
    minutes: int
    title: str
    run: Callable
    # What it has measured when its time is over, so that it can be given its time in pieces
    keeps: bool = False


def code(text):
    return ["```", *text.strip().splitlines(), "```"]


def markdown_table(header, rows):
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)] + [
        "| " + " | ".join(map(str, row)) + " |" for row in rows]


# --- Correctness ----------------------------------------------------------------------------------

def selfcheck(work):
    """Rates of the GPU, or of all GPUs and of the links between them."""
    command = [work.program("train_gpt"), "selfcheck", "--device", "cuda",
               *(["--max-bytes", 65536, "--tolerance", 100] if work.tiny else [])]
    count, launcher = len(work.machine.gpus), []
    mpi = re.search(r"^MPI +(.*)$", work.machine.version, re.MULTILINE)
    if count > 1 and (not mpi or mpi.group(1) == "not in this build"):
        work.lines += [f"Only the first of {count} GPUs: the program is built without MPI.", ""]
    elif count > 1:
        work.need("mpirun")
        launcher = ["mpirun", "-np", count]
        if "Open MPI" in mpi.group(1):
            launcher += ["--oversubscribe", "--bind-to", "none"] + (
                ["--allow-run-as-root"] if os.geteuid() == 0 else [])
    work.lines += code(work.run(*launcher, *command))


def count_tests(work, output):
    """Adds the closing counts of a run of tests to the part's data, and what failed to its lines.
    Returns "N passed, M failed"."""
    counts = re.findall(r"^(\d+) passed, (\d+) failed$", output, re.MULTILINE)
    passed, failed = map(int, counts[-1]) if counts else (0, 0)
    work.data["passed"] = work.data.get("passed", 0) + passed
    work.data["failed"] = work.data.get("failed", 0) + failed
    work.lines += ["- " + line
                   for line in dict.fromkeys(re.findall(r"^failed: .*$", output, re.MULTILINE))]
    return f"{passed} passed, {failed} failed" if counts else "no count: it did not reach its end"


def tests(tags, tiny):
    def run(work):
        output = work.run("scripts/run-tests.sh", work.program("test"), tiny if work.tiny else tags)
        counts = count_tests(work, output)
        work.lines[:0] = [counts, ""] if work.lines else [counts]
        if work.data["failed"] and not work.timed_out:
            work.problem = f"{work.data['failed']} tests failed"
    return run


def memcheck(work):
    """The tests of kernels under compute-sanitizer, file by file, so that a part that runs out of
    time still says something."""
    work.need("compute-sanitizer")
    files = sorted(pathlib.Path(path).stem for path in glob.glob("test/kernels/*_test.cpp"))
    rows = []
    for file in ["gelu_test"] if work.tiny else files:
        before = work.problem
        arguments = ["gelu may overwrite*"] if work.tiny else ["-#", f"[#{file}][cuda]"]
        output = work.run("scripts/run-tests.sh", work.program("test"), *arguments,
                          environment={"MEMCHECK": "1"})
        errors = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", output)]
        counts = count_tests(work, output)
        rows.append((file, counts, sum(errors) if errors else "–"))
        if errors:
            work.data["errors"] = work.data.get("errors", 0) + sum(errors)
        if work.timed_out:
            break
        if not before and work.problem:
            work.problem = f"{file}: {counts}"
    work.lines[:0] = [*markdown_table(("tests", "result", "errors found"), rows), ""]


def training(work, run_dir, text, device, dtype):
    """Trains the quickstart's model on a text for 300 steps. Returns its losses by step, and the
    validation loss at the end (None: unknown)."""
    settings = {"run_dir": run_dir, "tokenizer.path": text / "tokenizer.json",
                "data.train": text / "train_*.bin", "data.val": text / "val_*.bin",
                "device": device, "precision.dtype": dtype, "evaluation.every": 0,
                "checkpoint.every": 0, "sampling.every": 0, "sampling.samples": 0, "log.every": 1,
                "schedule.steps": 300, "schedule.warmup_steps": 30,
                # What the limits were measured with.
                "batch.tokens_per_step": 1024, "optimizer.name": "adamw",
                "optimizer.learning_rate": 0.0025, "optimizer.weight_decay": 0.1}
    if work.tiny:
        settings.update({
            "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 32, "model.n_ctx": 32,
            "batch.micro_batch": 2, "batch.sequence_length": 32, "batch.tokens_per_step": 64,
            "schedule.steps": 4, "schedule.warmup_steps": 1, "evaluation.max_tokens": 64})
    shutil.rmtree(run_dir, ignore_errors=True)
    work.run(work.program("train_gpt"), "train", "configs/quickstart.json",
             *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")))
    metrics = run_dir / "metrics.jsonl"
    lines = ([json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists()
             else [])
    val = next((line["val_loss"] for line in reversed(lines) if "val_loss" in line), None)
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, val


def losses(work):
    """The same run on the CPU and on the GPU. Its text is the project's own sources and
    documentation, which are always here."""
    text, runs = work.folder / "text", work.folder / "runs"
    sources = sorted(path for pattern in ("*.md", "docs/*.md", "*/*.h", "*/*.cpp", "*/*.cu",
                                          "*/*/*.h", "*/*/*.cpp", "*/*/*.cu")
                     for path in glob.glob(pattern)
                     if not path.startswith(("build/", "third_party/")))
    if not (text / "data.json").exists():
        vocabulary, fraction = (512, 0.5) if work.tiny else (4096, 0.05)
        work.run(work.program("train_gpt"), "tokenize", *(sources[:20] if work.tiny else sources),
                 "--train-vocab", vocabulary, "--val-fraction", fraction, "--out", text)
        work.commands[-1] = ("train_gpt tokenize (sources and documentation) " +
                             work.commands[-1][work.commands[-1].index("--train-vocab"):])
    found = {}
    for name, device, dtype in (("GPU, bf16", "cuda", "bf16"), ("GPU, fp32", "cuda", "fp32"),
                                ("CPU, fp32", "cpu", "fp32")):
        found[name] = training(work, runs / f"{device}-{dtype}", text, device, dtype)
    reference, reference_val = found["CPU, fp32"]
    rows = []
    for name, (by_step, val) in found.items():
        common = [step for step in by_step if step in reference]
        row = {
            "begin": max((abs(by_step[step] - reference[step]) for step in common if step <= 10),
                         default=None),
            "val": None if val is None or reference_val is None else abs(val - reference_val)}
        work.data[name] = row
        last = max(by_step, default=None)
        rows.append(
            (name, last or "–", "–" if last is None else f"{by_step[last]:.4f}",
             "–" if val is None else f"{val:.4f}",
             *("–" if row[which] is None else f"{row[which]:.1e}" for which in ("begin", "val"))))
    work.lines += markdown_table(("run", "steps", "last loss", "validation loss",
                                  "furthest from the CPU in 10 steps", "validation, from the CPU"),
                                 rows)


# --- Speed ----------------------------------------------------------------------------------------

STEP_RESULTS = "steps.jsonl"


def step(model, with_pytorch=False):
    def run(work):
        command = ["python3", "scripts/bench_gpu.py", "--program", work.program("train_gpt"),
                   "--folder", work.folder / "bench", "--model", model, "--results",
                   work.folder / STEP_RESULTS, *(["--tiny", "--steps", 3] if work.tiny else [])]
        if with_pytorch:
            if not work.machine.python:
                raise Skipped(
                    "there is no Python with PyTorch that sees the GPU; PYTHON=… names one")
            command += ["--python", work.machine.python]
        if work.again:
            forget_steps(work.folder, model, "PyTorch" if with_pytorch else "train_gpt")
        output = work.run(*command)
        for line in output.splitlines():
            if line.startswith("Tried"):
                work.lines += ["", line, ""]
            elif line.startswith(f"{model}: attention: "):
                work.lines += ["", line]
            elif line.startswith("|"):
                work.lines.append(line)
        if work.problem and (work.folder / STEP_RESULTS).exists():
            work.lines += ["", "Measured so far:", "",
                           *code((work.folder / STEP_RESULTS).read_text())]
    return run


def step_results(folder):
    path = folder / STEP_RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def forget_steps(folder, model, program):
    """Those of a program, also with options."""
    kept = [result for result in step_results(folder)
            if (result["model"], result["program"].split()[0]) != (model, program)]
    (folder / STEP_RESULTS).write_text("".join(json.dumps(result) + "\n" for result in kept))


def best_step(folder, model, program):
    """The fastest measurement of a model, or None."""
    results = [result for result in step_results(folder)
               if (result["model"], result["program"]) == (model, program) and "ms" in result]
    measured = [result for result in results if not result.get("tried")] or results
    return min(measured, key=lambda result: result["ms"] / result["batch"], default=None)


def step_arguments(work, model, folder):
    """A model's fastest settings so far, as arguments of `train_gpt train`."""
    sizes = bench_gpu.TINY if work.tiny else bench_gpu.FULL
    best = best_step(work.folder, model, "train_gpt")
    chosen = ({"batch": best["batch"], "recompute": best["recompute"]} if best
              else {"batch": min(8, sizes.batches[0])})
    return bench_gpu.run_arguments(sizes, model, folder, **chosen)


def profile(work):
    """Time by kind of kernel. The runs are ended after the table, since saving a large model takes
    longer."""
    for model in bench_gpu.MODELS:
        folder = work.folder / "bench" / f"profile-{model}"
        shutil.rmtree(folder, ignore_errors=True)
        output = work.run(work.program("train_gpt"), "train", *step_arguments(work, model, folder),
                          "--profile", 2 if work.tiny else 10, until=r"^  step +[\d.]+$")
        shutil.rmtree(folder, ignore_errors=True)
        table = re.search(r"^profile of .*?^  step +[\d.]+$", output, re.MULTILINE | re.DOTALL)
        work.lines += [f"{model}:", "", *code(table.group(0) if table else "no profile"), ""]


def kernels(dtype):
    def run(work):
        chosen = ["gelu_forward", "--repeat", 0] if work.tiny else []
        output = work.run(work.program("compare"), "--all", "--device", "cuda", "--dtype", dtype,
                          *chosen)
        work.lines += [line for line in output.splitlines() if line.startswith("- CUDA")]
        work.lines += ["", *(line for line in output.splitlines() if line.startswith("|"))]
        bandwidth = re.search(r"^- CUDA: .*reaches ([\d.]+) GB/s", output, re.MULTILINE)
        work.data["bandwidth"] = 1e9 * float(bandwidth.group(1)) if bandwidth else None
        for line in output.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) > 6 and cells[1] in ("fp32", "bf16"):
                share = re.fullmatch(r"([\d.]+) %", cells[6])
                work.data.setdefault("rows", []).append({
                    "kernel": cells[0], "dtype": cells[1], "implementation": cells[2],
                    "ms": None if cells[4] == "–" else float(cells[4]),
                    "percent": float(share.group(1)) if share else None})
    return run


ATTENTION = "attention_forward,attention_backward"
WINDOWS = "attention_window_forward,attention_window_backward"
GROUPED = "grouped_linear_forward,grouped_linear_backward_input,grouped_linear_backward_weight"
GROUPED_FP8 = "grouped_linear_forward_fp8,grouped_linear_backward_input_fp8"
OLMOE_UP, OLMOE_DOWN = "M=16384,E=64,k=8,N=2048,K=2048", "M=16384,E=64,k=8,N=2048,K=1024"
# Q heads of queries share a head of keys.
HOPPER_SHAPES = (
    (ATTENTION, "B=64,T=1024,H=12,D=64"),  # 124M
    (ATTENTION, "B=16,T=1024,H=25,D=64"),  # 1558M
    (ATTENTION, "B=1,T=8192,H=8,Q=4,D=128"),  # Llama 3 8B
    (ATTENTION, "B=4,T=4096,H=8,Q=2,D=128"),  # Qwen3 0.6B
    (ATTENTION, "B=4,T=4096,H=16,D=96"),  # GPT-3 760M
    (WINDOWS, "B=1,T=8192,W=128,H=8,Q=8,D=64"),  # gpt-oss 20B
    (GROUPED, OLMOE_UP), (GROUPED, OLMOE_DOWN), (GROUPED_FP8, OLMOE_UP), (GROUPED_FP8, OLMOE_DOWN))


def hopper(work):
    """The kernels for sm_90a (docs/kernels.md predicts their times) beside the older ones and
    cuDNN, at shapes of the presets."""
    if "sm_90" not in work.machine.version:
        work.lines += ["The GPU is not of sm_90."]
        return
    shapes = [("attention_forward", "B=1,T=32,H=1,D=64")] if work.tiny else HOPPER_SHAPES
    for kernels_of_shape, shape in shapes:
        for kernel in kernels_of_shape.split(","):
            output = work.run(work.program("compare"), kernel, "--device", "cuda",
                              "--dtype", "bf16", "--shape", shape,
                              *(["--repeat", 0] if work.tiny else ["--no-reference"]))
            work.lines += [f"{kernel}, {shape}:", "",
                           *(line for line in output.splitlines() if line.startswith("|")), ""]


NCU_TIME, NCU_BYTES = "gpu__time_duration.sum", ("dram__bytes_read.sum", "dram__bytes_write.sum")


def ncu(work):
    """Time and traffic of each kernel in steps of a model of one layer, so that few kernels are
    enough."""
    work.need("ncu")
    folder = work.folder / "bench" / "ncu"
    shutil.rmtree(folder, ignore_errors=True)
    arguments = step_arguments(work, "124M", folder)
    output = work.run("ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units",
                      "base", "--launch-count", 300, "--metrics", ",".join((NCU_TIME, *NCU_BYTES)),
                      work.program("train_gpt"), "train", *arguments, "--set", "model.n_layer=1",
                      "--set", "kernels.autotune=off", "--set", "schedule.steps=2")
    shutil.rmtree(folder, ignore_errors=True)
    launches = {}
    for row in csv.DictReader(line for line in output.splitlines() if line.startswith('"')):
        try:
            ns, moved = (float(row[NCU_TIME].replace(",", "")),
                         sum(float(row[name].replace(",", "")) for name in NCU_BYTES))
        except (KeyError, TypeError, ValueError):
            continue  # the row of units
        launches.setdefault(row["Kernel Name"], []).append((ns, moved))
    rows = sorted(((sum(ns for ns, _ in all), name, len(all),
                    statistics.median(ns for ns, _ in all),
                    statistics.median(moved / ns for ns, moved in all))
                   for name, all in launches.items()), reverse=True)
    work.data["kernels"] = {name: {"us": ns / 1e3, "bytes_per_second": 1e9 * rate}
                            for _, name, _, ns, rate in rows}
    work.lines += markdown_table(("kernel", "launches", "median µs", "GB/s to and from memory"),
                                 [(f"`{name[:80]}`", count, f"{ns / 1e3:.1f}", f"{rate:.0f}")
                                  for _, name, count, ns, rate in rows[:40]])
    if not rows and not work.problem:
        work.problem = "ncu listed no kernels"


def nsys(work):
    """The kernels of whole steps of 124M, by their share of the time."""
    work.need("nsys")
    folder = work.folder / "nsys"
    folder.mkdir(exist_ok=True)
    run_dir = work.folder / "bench" / "nsys"
    shutil.rmtree(run_dir, ignore_errors=True)
    work.run("nsys", "profile", "--trace", "cuda,nvtx", "--force-overwrite", "true",
             "--output", folder / "124M", work.program("train_gpt"), "train",
             *step_arguments(work, "124M", run_dir),
             "--set", f"schedule.steps={2 if work.tiny else 12}")
    output = work.run("nsys", "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv",
                      folder / "124M.nsys-rep")
    shutil.rmtree(run_dir, ignore_errors=True)
    lines = output.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith("Time (%)")), len(lines))
    rows = [(row["Time (%)"], row["Instances"], row["Med (ns)"], f"`{row['Name'][:80]}`")
            for row in csv.DictReader(lines[begin:]) if row.get("Name")]
    work.lines += markdown_table(("share of time, %", "launches", "median ns", "kernel"), rows[:30])
    if not rows and not work.problem:
        work.problem = "nsys listed no kernels"


# The tests that start programs take long on a GPU; those of kernels and models say more, and come
# first.
STARTS_PROGRAMS = ("cli", "training", "communicator", "failure", "selfcheck")
PARTS = [
    Part("selfcheck", 2, "Rates of the GPUs and their links", selfcheck),
    Part("tests", 6, "Tests of kernels and models on the GPU",
         tests("[cuda]" + "".join(f"~[{tag}]" for tag in STARTS_PROGRAMS), "gelu may overwrite*")),
    Part("124M", 4, "A training step of 124M", step("124M"), keeps=True),
    Part("kernels", 6, "Kernels against float64 and their limits, bf16", kernels("bf16")),
    Part("hopper", 3, "Kernels for sm_90a beside the older ones", hopper),
    Part("losses", 4, "Training on the GPU and on the CPU", losses),
    Part("1558M", 8, "A training step of 1558M", step("1558M"), keeps=True),
    Part("profile", 3, "Where the time of a step goes", profile),
    Part("124M-pytorch", 6, "A training step of 124M beside PyTorch", step("124M", True),
         keeps=True),
    Part("memcheck", 8, "Tests of kernels under compute-sanitizer", memcheck),
    Part("tests-runs", 6, "Tests of whole runs on the GPU",
         tests(",".join(f"[cuda][{tag}]" for tag in STARTS_PROGRAMS), "gelu takes tensors*")),
    Part("1558M-pytorch", 8, "A training step of 1558M beside PyTorch", step("1558M", True),
         keeps=True),
    Part("ncu", 3, "Kernels by Nsight Compute", ncu),
    Part("nsys", 3, "Kernels of whole steps by Nsight Systems", nsys),
    Part("kernels-fp32", 5, "Kernels against float64 and their limits, fp32", kernels("fp32")),
]


# --- Targets --------------------------------------------------------------------------------------

class Target(NamedTuple):
    text: str
    measured: str
    verdict: str  # met, not met or not measured


# Least share of the limit that build/compare measures, in percent, at B·T·C of 50 million elements.
KERNEL_LIMITS = {"layernorm_forward": 85, "norm_partials": 85, "adamw": 85,
                 "layernorm_backward": 70}
# Least speed of our own attention compared with cuDNN's, in percent.
ATTENTION_LIMITS = {"attention_forward": 65, "attention_backward": 45}
# Least bandwidth of the head's softmax, in percent of the measured one. build/compare measures it
# only together with matrix products.
SOFTMAX_KERNEL, SOFTMAX_LIMIT = r"loss_in_shared_memory|softmax", 80
STEP_LIMITS = {"124M": {"tokens": 580e3, "pytorch": 1.15}, "1558M": {"mfu": 56, "pytorch": 1.1}}
# Nats per token: at the end, by dtype (in bf16 two seeds differ by as much, on one H100); in fp32,
# in the first ten steps.
LOSS_LIMITS, FIRST_LOSSES_LIMIT = {"GPU, fp32": 0.02, "GPU, bf16": 0.06}, 1e-3


def at_least(text, value, limit, shown):
    if value is None:
        return Target(text, "–", "not measured")
    return Target(text, shown, "met" if value >= limit else "not met")


def at_most(text, value, limit):
    if value is None:
        return Target(text, "–", "not measured")
    return Target(text, f"{value:.1e}", "met" if value <= limit else "not met")


def correctness_targets(parts):
    for name, what in (("tests", "tests of kernels and models pass"),
                       ("tests-runs", "tests of whole runs pass"),
                       ("memcheck", "compute-sanitizer finds no error")):
        part = parts.get(name, {"status": "to do"})
        data = part.get("data", {})
        ran = "passed" in data and (name != "memcheck" or "errors" in data)
        verdict = ({"done": "met", "failed": "not met"}.get(part["status"], "not measured") if ran
                   else "not measured")
        yield Target(what, f"{data['passed']} passed, {data['failed']} failed" if ran else "–",
                     verdict)
    data = parts.get("losses", {}).get("data", {})
    for name, limit in LOSS_LIMITS.items():
        yield at_most(f"validation loss, {name}: within {limit} of the CPU's",
                      data.get(name, {}).get("val"), limit)
    yield at_most(f"losses of ten steps, GPU, fp32: within {FIRST_LOSSES_LIMIT} of the CPU's",
                  data.get("GPU, fp32", {}).get("begin"), FIRST_LOSSES_LIMIT)


def step_targets(folder):
    for model, limits in STEP_LIMITS.items():
        ours, peer = best_step(folder, model, "train_gpt"), best_step(folder, model, "PyTorch")
        mine, other = (result and 1e3 * bench_gpu.FULL.T * result["batch"] / result["ms"]
                       for result in (ours, peer))
        if "tokens" in limits:
            yield at_least(f"{model}: at least {limits['tokens']:,.0f} tokens/s", mine,
                           limits["tokens"], f"{mine or 0:,.0f}")
        if "mfu" in limits:
            mfu = ours and ours.get("mfu")
            yield at_least(
                f"{model}: at least {limits['mfu']} % MFU of the datasheet's dense bf16 rate", mfu,
                limits["mfu"] / 100, f"{100 * (mfu or 0):.1f} %")
        ratio = mine / other if mine and other else None
        yield at_least(f"{model}: at least {limits['pytorch']} × PyTorch compiled", ratio,
                       limits["pytorch"], f"{ratio or 0:.2f} ×")


def kernel_targets(parts):
    data = parts.get("kernels", {}).get("data", {})
    rows = data.get("rows", [])
    for kernel, limit in KERNEL_LIMITS.items():
        percent = next((row["percent"] for row in rows if row["kernel"] == kernel), None)
        yield at_least(f"{kernel}: at least {limit} % of the limit", percent, limit, f"{percent} %")
    for kernel, limit in ATTENTION_LIMITS.items():
        ms = {row["implementation"]: row["ms"] for row in rows
              if row["kernel"] == kernel and row["ms"]}
        own, cudnn = ms.get("CUDA, own"), ms.get("CUDA, cuDNN")
        share = 100 * cudnn / own if own and cudnn else None
        yield at_least(f"own {kernel}: at least {limit} % of cuDNN's speed", share, limit,
                       f"{share or 0:.0f} %")
    found = parts.get("ncu", {}).get("data", {}).get("kernels", {})
    rate = next((entry["bytes_per_second"] for name, entry in found.items()
                 if re.search(SOFTMAX_KERNEL, name)), None)
    share = 100 * rate / data["bandwidth"] if rate and data.get("bandwidth") else None
    yield at_least(f"the head's softmax: at least {SOFTMAX_LIMIT} % of the measured bandwidth",
                   share, SOFTMAX_LIMIT, f"{share or 0:.0f} %")


def targets(parts, folder, simulated):
    """Each target with what was measured. A simulated GPU has no speed."""
    speeds = [*step_targets(folder), *kernel_targets(parts)]
    if simulated:
        speeds = [Target(target.text, "–", "not measured") for target in speeds]
    return [*correctness_targets(parts), *speeds]
