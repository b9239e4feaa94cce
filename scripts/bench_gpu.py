#!/usr/bin/env python3
"""The GPU part of `make bench`: compares whole training steps with PyTorch in its fastest settings,
one after the other in one run.

    scripts/bench_gpu.py --program build/train_gpt --folder build/bench-runs [--python PYTHON]
        [--model 124M|1558M] [--steps 50] [--results FILE] [--tiny]

GPT-2 124M and 1558M, sequences of 1024 tokens, bf16, no accumulation, synthetic data, medians over
the steps after 20 warm-up steps.
train_gpt: the fastest pair of micro-batch and recompute level. Of the micro-batches that fit at a
level, and not with less recomputation, the two largest are tried with a few steps; the fastest pair
is then measured. PyTorch: torch.compile, fused AdamW; the fastest of autocast and bf16 weights with
fp32 masters, and of the flash and cuDNN backends of scaled_dot_product_attention, with the largest
micro-batch that fits. Prints Markdown.
    --results FILE   keeps each measurement as a line of JSON, and does not repeat those that the
                     file has, except failures
    --tiny           a tiny model, to try this script on a simulated GPU
"""
import argparse
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

MODELS = {"124M": SimpleNamespace(layers=12, heads=12, width=768),
          "1558M": SimpleNamespace(layers=48, heads=25, width=1600)}
BATCHES = [64, 56, 48, 40, 32, 24, 16, 12, 8, 4, 2, 1]
FULL = SimpleNamespace(models=MODELS, batches=BATCHES, T=1024, vocabulary=50257, warm_up=20,
                       try_warm_up=5, try_steps=8)
TINY = SimpleNamespace(models=dict.fromkeys(MODELS, SimpleNamespace(layers=2, heads=2, width=64)),
                       batches=[4, 2], T=64, vocabulary=512, warm_up=1, try_warm_up=1, try_steps=2)


def flops_per_token(sizes, model):
    """6·N + 6·L·C·T, N the parameters in matrix products, causal attention counted half."""
    return 6 * (12 * model.layers * model.width ** 2 +
                sizes.vocabulary * model.width) + 6 * model.layers * model.width * sizes.T


def run_arguments(sizes, name, folder, batch=64, recompute="auto"):
    """A configuration and --set for `train_gpt plan` and `train`: steps of one micro-batch of
    synthetic data, without an end."""
    model = sizes.models[name]
    settings = {"device": "cuda", "run_dir": folder, "data.train": "synthetic", "data.val": "",
                "tokenizer.path": "", "model.n_layer": model.layers, "model.n_head": model.heads,
                "model.n_embd": model.width, "model.vocab_size": sizes.vocabulary,
                "batch.micro_batch": batch, "batch.sequence_length": sizes.T,
                "batch.tokens_per_step": batch * sizes.T, "schedule.steps": 100000,
                "schedule.tokens": 0, "precision.dtype": "bf16", "memory.recompute": recompute,
                "sampling.every": 0, "checkpoint.every": 0, "evaluation.every": 0, "log.every": 1}
    return [f"configs/gpt2-{name.lower()}.json",
            *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


def attention_of(folder, log, steps):
    """What runs attention, as a run's metrics or its manifest name it, and the line at its start
    that also says why not cuDNN."""
    said = next((line.split(":", 1)[1].strip() for line in log.splitlines()
                 if line.startswith("attention: ")), "not reported")
    named = next((step["attention"] for step in reversed(steps) if "attention" in step), None)
    if named is None and (folder / "manifest.json").exists():
        named = json.loads((folder / "manifest.json").read_text()).get("attention")
    return {"attention": named or said, "attention_line": said}


def last_line(text, otherwise="no message"):
    return (text.strip() or otherwise).splitlines()[-1]


class Results:
    """Measurements, each a dictionary. With a file they outlive this process."""

    def __init__(self, path):
        self.path = path
        self.all = []
        if path and path.exists():
            self.all = [json.loads(line) for line in path.read_text().splitlines()]

    def measured(self, key, measure):
        """The measurement with these entries; measure() makes it, and gives a dictionary with the
        others."""
        found = next((result for result in reversed(self.all) if key.items() <= result.items()),
                     None)
        if found is None or ("error" in found and "out of memory" not in found["error"].lower()):
            found = {**key, **measure()}
            self.all.append(found)
            if self.path:
                with open(self.path, "a") as file:
                    file.write(json.dumps(found) + "\n")
        return found


class Bench:
    def __init__(self, args):
        self.args = args
        self.sizes = TINY if args.tiny else FULL
        self.results = Results(args.results)

    # --- train_gpt --------------------------------------------------------------------------------

    def level_that_fits(self, name, batch):
        """The recompute level that recomputes the least among those that fit, or None."""
        plan = subprocess.run([self.args.program, "plan",
                               *run_arguments(self.sizes, name, self.args.folder / "none", batch)],
                              capture_output=True, text=True)
        if "DOES NOT FIT" in plan.stdout:
            return None
        chosen = re.search(r"memory\.recompute = (\w+)", plan.stdout)
        if plan.returncode != 0 or not chosen:
            sys.exit(f"error: {self.args.program} plan: {last_line(plan.stderr)}")
        return chosen.group(1)

    def candidates(self, name):
        """Pairs of micro-batch and recompute level: the two largest of each level, the largest of
        all levels first."""
        of_level = {}
        for batch in self.sizes.batches:
            level = self.level_that_fits(name, batch)
            if level is not None:
                of_level.setdefault(level, []).append(batch)
        return [(batches[i], level) for i in range(2)
                for level, batches in sorted(of_level.items(), reverse=True) if i < len(batches)]

    def train(self, name, batch, recompute, warm_up, steps, *more):
        """Runs warm_up + steps steps, with more arguments. The run is killed after them, since
        saving a large model takes longer than they do."""
        folder = self.args.folder / f"gpu-{name}"
        log = self.args.folder / f"gpu-{name}-{batch}-{recompute}.log"
        shutil.rmtree(folder, ignore_errors=True)
        metrics = folder / "metrics.jsonl"

        def lines():
            return metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        with open(log, "w") as out:
            run = subprocess.Popen([self.args.program, "train",
                                    *run_arguments(self.sizes, name, folder, batch, recompute),
                                    *more], stdout=out, stderr=subprocess.STDOUT)
            try:
                while run.poll() is None and len(lines()) <= warm_up + steps:
                    time.sleep(0.05)
            finally:
                run.kill()
                run.wait()
        done = [json.loads(line) for line in lines() if line.endswith("\n")]
        measured = [step for step in done if "ms" in step][warm_up:warm_up + steps]
        if len(measured) < steps:
            return {"error": last_line(log.read_text())}
        result = {"ms": statistics.median(step["ms"] for step in measured),
                  **attention_of(folder, log.read_text(), done)}
        if all("mfu" in step for step in measured):
            result["mfu"] = statistics.median(step["mfu"] for step in measured)
        shutil.rmtree(folder)
        return result

    def ours(self, name):
        """The candidates, tried with a few steps, and the fastest of them, measured."""
        sizes, tried = self.sizes, []
        for batch, recompute in self.candidates(name):
            key = {"program": "train_gpt", "model": name, "batch": batch, "recompute": recompute,
                   "steps": sizes.try_steps, "tried": True}
            tried.append(self.results.measured(
                key,
                lambda: self.train(name, batch, recompute, sizes.try_warm_up, sizes.try_steps)))
            print(f"  train_gpt, batch {batch}, recompute {recompute}: {outcome(tried[-1])}",
                  file=sys.stderr)
        ran = [result for result in tried if "ms" in result]
        if not ran:
            return tried, {"error": tried[0]["error"] if tried else "does not fit"}
        best = max(ran, key=lambda result: result["batch"] / result["ms"])
        key = {**{entry: best[entry] for entry in ("program", "model", "batch", "recompute")},
               "steps": self.args.steps, "tried": False}
        return tried, self.results.measured(
            key,
            lambda: self.train(name, best["batch"], best["recompute"], sizes.warm_up,
                               self.args.steps))

    def traced(self, name, best):
        """The same steps as the fastest of ours(), with --trace."""
        sizes = self.sizes
        key = {"program": "train_gpt --trace",
               **{entry: best[entry] for entry in ("model", "batch", "recompute")},
               "steps": self.args.steps, "tried": False}
        trace = ("--trace", str(sizes.warm_up + self.args.steps))
        return self.results.measured(
            key,
            lambda: self.train(name, best["batch"], best["recompute"], sizes.warm_up,
                               self.args.steps, *trace))

    # --- PyTorch ----------------------------------------------------------------------------------

    def pytorch(self, name, batch, dtype, sdpa):
        model = self.sizes.models[name]
        command = [self.args.python, "scripts/bench_pytorch.py", "--n-layer", model.layers,
                   "--n-embd", model.width, "--n-head", model.heads,
                   "--vocab", self.sizes.vocabulary, "--batch", batch, "--sequence", self.sizes.T,
                   "--dtype", dtype, "--compile", "--device", "cuda", "--sdpa", sdpa,
                   "--threads", 4, "--warmup", self.sizes.warm_up, "--steps", self.args.steps]
        run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if run.returncode != 0:
            return {"error": last_line(run.stderr)}
        ready, result = (json.loads(line) for line in run.stdout.splitlines()[-2:])
        return {"ms": statistics.median(result["ms"]), "torch": ready["torch"]}

    def peer(self, name):
        """The fastest settings of PyTorch, with the largest micro-batch that fits."""
        for batch in self.sizes.batches:
            if batch > self.largest_expected(name):
                continue
            ran = []
            for dtype, sdpa in (("masters", "cudnn"), ("autocast", "cudnn"), ("masters", "flash"),
                                ("autocast", "flash")):
                key = {"program": "PyTorch", "model": name, "batch": batch, "dtype": dtype,
                       "sdpa": sdpa, "steps": self.args.steps}
                result = self.results.measured(key, lambda: self.pytorch(name, batch, dtype, sdpa))
                print(f"  PyTorch {dtype}, {sdpa}, batch {batch}: {outcome(result)}",
                      file=sys.stderr)
                ran += [result] if "ms" in result else []
            if ran:
                return min(ran, key=lambda result: result["ms"])
        return {"error": "no setting ran"}

    def largest_expected(self, name):
        """A micro-batch with which PyTorch needs about the GPU's memory. Larger ones are not tried,
        since each attempt takes a minute: 20 bytes for each parameter, 36·C for each token and
        layer, and 12 for each logit."""
        total = nvidia_smi("memory.total", "nounits")
        if not total:
            return self.sizes.batches[0]
        model, sizes = self.sizes.models[name], self.sizes
        free = 0.95 * 2 ** 20 * float(total) - 20 * (
            12 * model.layers * model.width ** 2 + sizes.vocabulary * model.width)
        return max(1, free / (sizes.T * (36 * model.layers * model.width + 12 * sizes.vocabulary)))

    # --- The report -------------------------------------------------------------------------------

    def row(self, name, mine):
        model = self.sizes.models[name]
        if "ms" in mine:
            rate = 1e3 * mine["batch"] * self.sizes.T / mine["ms"]
            row = (f"| {name} | {mine['batch']} (recompute {mine['recompute']}, attention "
                   f"{mine['attention']}) | {mine['ms']:.1f} | {rate:,.0f} | "
                   f"{1e-12 * rate * flops_per_token(self.sizes, model):.0f} | "
                   f"{format(mine['mfu'], '.1%') if 'mfu' in mine else '–'} |")
        else:
            row = f"| {name} | {mine['error']} | | | | |"
        peer = self.peer(name) if self.args.python else {"error": "–"}
        if "ms" not in peer:
            return row + f" {peer['error']} | – | – | – |"
        peer_rate = 1e3 * peer["batch"] * self.sizes.T / peer["ms"]
        row += (f" {peer['batch']} ({peer['dtype']}, {peer['sdpa']}) | {peer['ms']:.1f} | "
                f"{peer_rate:,.0f} |")
        return row + (f" {rate / peer_rate:.2f} × |" if "ms" in mine else " – |")

    def report(self):
        """Prints the tables. Returns whether train_gpt ran."""
        print("\n# Speed of a training step on the GPU\n")
        print(f"{nvidia_smi('name,driver_version') or 'a GPU without nvidia-smi'}; bf16, T = "
              f"{self.sizes.T}, no accumulation, median of {self.args.steps} steps\n")
        print("| model | train_gpt batch | ms | tokens/s | model TFLOP/s | MFU | PyTorch batch | "
              "ms | tokens/s | train_gpt / PyTorch |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        found = {}
        for name in self.args.model or self.sizes.models:
            found[name] = self.ours(name)
            print(self.row(name, found[name][1]), flush=True)
        print()
        for name, (_, mine) in found.items():
            if "ms" in mine:
                print(f"{name}: attention: {mine['attention_line']}")
                traced = self.traced(name, mine)
                print(f"{name}: a step that is traced: {outcome(traced)}" +
                      (f", {traced['ms'] / mine['ms']:.3f} ×" if "ms" in traced else ""))
        print(f"\nTried with {self.sizes.try_steps} steps each:\n")
        print("| model | batch | recompute | attention | ms | tokens/s |")
        print("|---|---|---|---|---|---|")
        for result in (result for tried, _ in found.values() for result in tried):
            speed = (f"{result['attention']} | {result['ms']:.1f} | "
                     f"{1e3 * result['batch'] * self.sizes.T / result['ms']:,.0f}"
                     if "ms" in result else f"{result['error']} | – | –")
            print(f"| {result['model']} | {result['batch']} | {result['recompute']} | {speed} |")
        return all("ms" in mine for _, mine in found.values())


def outcome(result):
    return f"{result['ms']:.1f} ms" if "ms" in result else result["error"]


def nvidia_smi(query, *options):
    """What nvidia-smi says of the first GPU; nothing if it is not here."""
    try:
        return subprocess.run(["nvidia-smi", f"--query-gpu={query}",
                               ",".join(["--format=csv", "noheader", *options]), "-i", "0"],
                              capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--python")
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if Bench(args).report() else 1)


if __name__ == "__main__":
    main()
