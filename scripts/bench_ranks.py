#!/usr/bin/env python3
"""Compares two ranks with half the threads each to one rank with all threads, on the CPU, along
each axis of the mesh. `make bench` runs it.

    scripts/bench_ranks.py [--only NAME …] [--rounds 7] [--steps 16]
        [--program build/train_gpt] [--folder build/bench-runs/ranks]

Both train the same steps of synthetic data, in turns. Prints Markdown: the median over the rounds
of the lower quartile of a run's steps, since disturbances only make steps longer, and the ratios of
the rounds. For pipelines also how much longer a step takes than its schedule with the stages'
times: those are medians of the same run's trace, without the waits in them, and the update is
added.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

THREADS = int(os.environ.get("OMP_NUM_THREADS", 2))
MODEL = {"model.n_layer": 8, "model.n_head": 8, "model.n_embd": 256, "model.n_ctx": 256,
         "model.vocab_size": 4096, "batch.sequence_length": 256, "batch.micro_batch": 4,
         "batch.tokens_per_step": 8192, "precision.dtype": "fp32"}
LONG = MODEL | {"model.n_layer": 4, "model.n_ctx": 4096, "batch.sequence_length": 4096,
                "batch.micro_batch": 1}
PIPELINE = {"parallel.pipeline": 2, "model.tied_head": "off"}
CASES = {  # the name of a mesh: the model, what only two ranks have
    "data": (MODEL, {}),
    "ZeRO-3": (MODEL, {"parallel.zero": 3}),
    "tensor": (MODEL, {"parallel.tensor": 2}),
    "pipeline 1f1b": (MODEL, PIPELINE),
    "pipeline zero_bubble": (MODEL, PIPELINE | {"parallel.schedule": "zero_bubble"}),
    "pipeline interleaved": (MODEL, PIPELINE | {"parallel.schedule": "interleaved",
                                               "parallel.stages_per_rank": 2}),
    "context": (LONG, {"parallel.context": 2}),
}
WARM_UP = 4  # steps
BACKWARD = ("backward", "backward of weights")


def lower_quartile(values):
    return sorted(values)[len(values) // 4]


def train(args, ranks, settings):
    """Returns the folder of a run and the milliseconds of its steps."""
    run = args.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    settings = {"run_dir": run, "device": "cpu", "data.train": "synthetic", "data.val": "",
                "tokenizer.path": "", "checkpoint.every": 0, "evaluation.every": 0,
                "sampling.every": 0, "schedule.steps": WARM_UP + args.steps,
                "schedule.warmup_steps": 1, "log.every": 1} | settings
    command = [args.program, "train", "configs/quickstart.json",
               *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]
    if "parallel.pipeline" in settings:
        command += ["--trace", str(args.steps)]
    threads = THREADS // ranks
    launch = ["mpirun", "-np", str(ranks), "--bind-to", "core", "--map-by", f"slot:PE={threads}",
              "-x", f"OMP_NUM_THREADS={threads}"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(launch + command, capture_output=True, text=True, env=os.environ | root)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))}:\n{(done.stderr or done.stdout).strip()}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return run, [line["ms"] for line in lines if "ms" in line][WARM_UP:]


def traced_stages(run, steps):
    """What each rank computes in a step, in order, as names, and the milliseconds of each name and
    of the update."""
    [path] = [path for path in (run / "trace").glob("step-*.json") if "rank" not in path.name]
    spans = [span for span in json.loads(path.read_text())["traceEvents"]
             if span["ph"] == "X" and span["tid"] == 3]
    stages = []
    for rank in sorted({span["pid"] for span in spans}):
        mine = sorted((span for span in spans if span["pid"] == rank), key=lambda span: span["ts"])
        waits = [span for span in mine if span["name"] == "wait for a stage"]
        times, order, updates = {}, [], [span["dur"] for span in mine if span["name"] == "update"]
        for span in mine:
            if span["name"] != "forward" and span["name"] not in BACKWARD:
                continue
            end = span["ts"] + span["dur"]
            waited = sum(wait["dur"] for wait in waits if span["ts"] <= wait["ts"] < end)
            order.append(span["name"])
            times.setdefault(span["name"], []).append(span["dur"] - waited)
        stages.append((order[:len(order) // steps],
                       {name: statistics.median(all_) / 1e3 for name, all_ in times.items()},
                       statistics.median(updates) / 1e3))
    return stages


def replayed(stages):
    """Milliseconds of the schedule, each rank with one stage: a forward pass needs that of the rank
    before, a backward pass that of the rank after it; sending takes no time."""
    ends = [{name: [] for name in ("forward", *BACKWARD)} for _ in stages]
    clocks, positions = [0.0] * len(stages), [0] * len(stages)
    while any(position < len(order) for position, (order, _, _) in zip(positions, stages)):
        for rank, (order, times, _) in enumerate(stages):
            while positions[rank] < len(order):
                name = order[positions[rank]]
                before = rank - 1 if name == "forward" else rank + 1
                number = len(ends[rank][name])
                start = clocks[rank]
                if name != BACKWARD[1] and 0 <= before < len(stages):
                    if number >= len(ends[before][name]):
                        break
                    start = max(start, ends[before][name][number])
                clocks[rank] = start + times[name]
                ends[rank][name].append(clocks[rank])
                positions[rank] += 1
    return max(clocks)


def measure(args, name):
    model, mesh = CASES[name]
    for_one = model | {key: value for key, value in mesh.items() if key.startswith("model.")}
    ones, twos, of_schedule = [], [], []
    for _ in range(args.rounds):
        run, times = train(args, 2, model | mesh)
        twos.append(lower_quartile(times))
        if "parallel.pipeline" in mesh and "parallel.stages_per_rank" not in mesh:
            stages = traced_stages(run, args.steps)
            of_schedule.append(statistics.median(times) /
                               (replayed(stages) + max(update for _, _, update in stages)))
        ones.append(lower_quartile(train(args, 1, for_one)[1]))
    ratios = [two / one for two, one in zip(twos, ones)]
    of_schedule = f"{statistics.median(of_schedule):.3f}" if of_schedule else "–"
    print(f"| {name} | {statistics.median(twos):.1f} | {statistics.median(ones):.1f} | "
          f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} | "
          f"{of_schedule} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--program", default="build/train_gpt")
    parser.add_argument("--folder", type=pathlib.Path,
                        default=pathlib.Path("build/bench-runs/ranks"))
    args = parser.parse_args()
    if not shutil.which("mpirun"):
        print(
            "skipped: comparison of two ranks with one, which needs mpirun (scripts/setup.sh mpi)")
        return
    if THREADS < 2 or len(os.sched_getaffinity(0)) < THREADS:
        print("skipped: comparison of two ranks with one, which needs a core for each of "
              f"{THREADS} threads, and at least 2")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"| mesh | two ranks × {THREADS // 2} threads, ms | one rank × {THREADS}, ms | ratio, "
          f"median of {args.rounds} rounds | least to greatest | of the pipeline's schedule |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        measure(args, name)
    shutil.rmtree(args.folder / "run", ignore_errors=True)


if __name__ == "__main__":
    main()
