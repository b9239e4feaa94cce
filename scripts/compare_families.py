#!/usr/bin/env python3
"""Compares how well a Llama-class and a GPT-2-class model of the same size learn the quickstart's
text in the same time on a CPU.

    scripts/compare_families.py [--seconds 120] [--seeds 1 2 3] [--rates 0.0015 0.0025 0.004]
        [--data data/quickstart] [--program build/train_gpt] [--folder build/compare-families]

Both are configs/llama-10m.json, about 10 million parameters: as it is, and with model.family=gpt2
(the same layers, width and heads, a head for each key, an MLP four times as wide). The steps of
each are measured in turns, and each trains for as many steps as take --seconds; its schedule ends
there. Every learning rate is tried with a seed of its own (1337), then the best one of each model
with each seed. Prints Markdown: bits per byte of the text that is kept for validation. With the
defaults it takes about half an hour, on a machine that does nothing else; `make quickstart`
prepares the text. A run that is in --folder is not repeated.
"""
import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

from bench_gpu import Results, last_line

CONFIG = "configs/llama-10m.json"
MODELS = {"Llama": {}, "GPT-2": {"model.family": "gpt2", "model.n_kv_head": 0, "model.n_ff": 0,
                                 "model.rope_theta": 0}}
SEED_FOR_RATES = 1337


class Comparison:
    def __init__(self, args):
        self.args = args
        self.results = Results(args.folder / "results.jsonl")

    def train(self, model, name, **changes):
        """Trains and returns the lines of metrics."""
        run = self.args.folder / name
        shutil.rmtree(run, ignore_errors=True)
        data = self.args.data
        settings = {"run_dir": run, "device": "cpu", "tokenizer.path": data / "tokenizer.json",
                    "data.train": data / "train_*.bin", "data.val": data / "val_*.bin",
                    "checkpoint.every": 0, "evaluation.every": 0, "sampling.every": 0,
                    "sampling.samples": 0, "log.every": 1, **MODELS[model], **changes}
        done = subprocess.run(
            [self.args.program, "train", CONFIG,
             *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))],
            capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"error: {model}: {last_line(done.stderr)}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(run)
        return lines

    def milliseconds(self):
        """Of a step of each model: medians of two short runs each, in turns."""
        def measure():
            times = {model: [] for model in MODELS}
            for _ in range(2):
                for model in MODELS:
                    lines = self.train(
                        model, "timing",
                        **{"schedule.steps": 40, "schedule.warmup_steps": 1, "data.val": ""})
                    times[model] += [line["ms"] for line in lines if "ms" in line][5:]
            return {model: statistics.median(of_model) for model, of_model in times.items()}
        return self.results.measured({"measured": "milliseconds", "seconds": self.args.seconds},
                                     measure)

    def run(self, model, steps, rate, seed):
        """What a run of these steps reached, and how long its steps took."""
        def measure():
            lines = self.train(
                model, f"{model}-{rate}-{seed}",
                **{"schedule.steps": steps, "optimizer.learning_rate": rate, "seed": seed})
            result = {"bits": lines[-1]["val_bits_per_byte"],
                      "trained": sum(line["ms"] for line in lines if "ms" in line) / 1e3}
            print(f"  {model}, learning rate {rate}, seed {seed}: {result['bits']:.4f} bits per "
                  f"byte after {steps} steps, {result['trained']:.0f} s", file=sys.stderr)
            return result
        return self.results.measured({"model": model, "steps": steps, "rate": rate, "seed": seed},
                                     measure)

    def report(self):
        milliseconds, rows, tried = self.milliseconds(), [], []
        for model in MODELS:
            steps = int(1e3 * self.args.seconds / milliseconds[model])
            if steps < 200:
                sys.exit(f"error: {steps} steps of {model} are too few for a warm-up of 100; a "
                         f"step takes {milliseconds[model]:.0f} ms here; raise --seconds")
            of_rates = {rate: self.run(model, steps, rate, SEED_FOR_RATES)["bits"]
                        for rate in self.args.rates}
            best = min(of_rates, key=of_rates.get)
            tried.append(
                f"| {model} | " + " | ".join(f"{bits:.3f}" for bits in of_rates.values()) + " |")
            runs = [self.run(model, steps, best, seed) for seed in self.args.seeds]
            bits, trained = [run["bits"] for run in runs], [run["trained"] for run in runs]
            rows.append(
                f"| {model} | {steps} | {milliseconds[model]:.0f} | {min(trained):.0f} to "
                f"{max(trained):.0f} | {best} | " +
                " | ".join(f"{value:.3f}" for value in bits) + f" | {statistics.mean(bits):.3f} |")
        seeds = " | ".join(f"seed {seed}" for seed in self.args.seeds)
        print(f"Bits per byte after {self.args.seconds:g} s of training:\n")
        print(
            f"| model | steps | ms a step | seconds of training | learning rate | {seeds} | mean |")
        print("|" + "---|" * (6 + len(self.args.seeds)))
        print("\n".join(rows))
        print(f"\nThe learning rates, tried with seed {SEED_FOR_RATES}:\n")
        print("| model | " + " | ".join(map(str, self.args.rates)) + " |")
        print("|" + "---|" * (1 + len(self.args.rates)))
        print("\n".join(tried))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0015, 0.0025, 0.004])
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("data/quickstart"))
    parser.add_argument("--program", default="build/train_gpt")
    parser.add_argument("--folder", type=pathlib.Path,
                        default=pathlib.Path("build/compare-families"))
    args = parser.parse_args()
    if not (args.data / "tokenizer.json").exists():
        sys.exit(f"error: {args.data} has no tokenizer.json; make quickstart prepares the text, "
                 "--data DIR names another folder")
    args.folder.mkdir(parents=True, exist_ok=True)
    Comparison(args).report()


if __name__ == "__main__":
    main()
