#!/usr/bin/env python3
"""Draws the pictures of the docs that are not of one run: docs/images/mesh.svg, step.svg,
memory.svg and run-folder.svg.

    scripts/pictures.py [--check] [FOLDER]      FOLDER: default docs/images

The memory is what `train_gpt plan` calculates (TRAIN_GPT: the program, default build/train_gpt).
--check writes nothing and exits with 1 if a picture in FOLDER is not what would be drawn. The
pictures have a background of their own, which is dark where the reader's browser is.
scripts/schedule_pictures.sh draws the schedules of pipelines.
"""
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

# Colours on a light and on a dark background.
COLOURS = {
    "page": ("#ffffff", "#161b22"), "ink": ("#1f2933", "#e6edf3"), "soft": ("#5b6775", "#9aa7b4"),
    "line": ("#667281", "#8b98a5"), "box": ("#eef1f5", "#232b35"), "edge": ("#c3cbd5", "#3d4855"),
    "blue": ("#2d68c4", "#6aa1f4"), "green": ("#16805c", "#4cc38a"),
    "orange": ("#b7560b", "#f0934a"), "purple": ("#7a4fc0", "#b48cf0"),
    "red": ("#b3314b", "#f07f93"), "grey": ("#8592a1", "#707d8b"),
}


def style():
    def rules(i):
        both = "".join(f".f-{name}{{fill:{pair[i]}}}.s-{name}{{stroke:{pair[i]}}}"
                       for name, pair in COLOURS.items())
        return f"text{{fill:{COLOURS['ink'][i]}}}text.soft{{fill:{COLOURS['soft'][i]}}}{both}"

    return ("<style>text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',"
            "sans-serif;font-size:14px}.small{font-size:12px}.title{font-size:18px;font-weight:600}"
            ".head{font-weight:600}.mid{text-anchor:middle}.end{text-anchor:end}"
            ".s{fill:none;stroke-width:1.6}.dash{stroke-dasharray:5 4}"
            f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}</style>")


class Picture:
    def __init__(self, width, height, title, words):
        self.size, self.title, self.words, self.parts = (width, height), title, words, []
        self.text(24, 32, title, "title")
        self.text(24, 54, words, "soft")

    def text(self, x, y, words, kind=""):
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def rect(self, x, y, w, h, fill="box", edge="edge", round_by=6, dash=False):
        kind = f"f-{fill} s-{edge}" + (" dash" if dash else "")
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" '
                          f'rx="{round_by}" class="{kind}"/>')

    def box(self, x, y, w, h, lines, fill="box", edge="edge", dash=False):
        """A box with lines of text in its middle; the first one is its heading."""
        self.rect(x, y, w, h, fill, edge, dash=dash)
        step = 17
        top = y + h / 2 - step * (len(lines) - 1) / 2 + 5
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + i * step, line, "mid head" if i == 0 else "mid small")

    def path(self, points, colour="line", arrow=True, both=False, dash=False):
        way = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        ends = f' marker-end="url(#to-{colour})"' if arrow else ""
        ends += f' marker-start="url(#from-{colour})"' if both else ""
        kind = f"s s-{colour}" + (" dash" if dash else "")
        self.parts.append(f'<path d="{way}" class="{kind}"{ends}/>')

    def svg(self):
        width, height = self.size
        markers = "".join(
            f'<marker id="{end}-{name}" viewBox="0 0 8 8" refX="{at}" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path class="f-{name}" d="{way}"/></marker>'
            for end, at, way in (("to", 7, "M0 0L8 4L0 8z"), ("from", 1, "M8 0L0 4L8 8z"))
            for name in ("line", "blue", "green", "orange", "purple"))
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img">\n'
                f"<title>{escape(self.title)}</title>\n<desc>{escape(self.words)}</desc>\n"
                f"{style()}\n<defs>{markers}</defs>\n"
                f'<rect class="f-page s-edge" x="0.5" y="0.5" width="{width - 1}" '
                f'height="{height - 1}" rx="8"/>\n' + "\n".join(self.parts) + "\n</svg>\n")


def mesh():
    """As MeshLayout (parallel/mesh.cpp) lays ranks: tensor, context, data, pipeline."""
    p = Picture(1000, 526, "The mesh of 16 ranks", "parallel.tensor=2, parallel.context=2, "
                "parallel.pipeline=2; two data-parallel ranks are left. Numbers are ranks.")
    box, gap, left, top = 84, 16, 92, 116
    half, pair = 4 * box + 3 * gap + 32, 2 * box + gap + 30
    for stage in range(2):
        x0 = left + stage * (half + 40)
        p.rect(x0 - 14, top - 34, half + 12, 238, "page", "edge", dash=True)
        p.text(x0 + half / 2 - 8, top - 13,
               ("pipeline 0: embedding, first layers", "pipeline 1: last layers, head")[stage],
               "mid head")
        for data in range(2):
            y = top + data * 120
            if stage == 0:
                p.text(x0 - 24, y + 38, f"data {data}", "end head")
            for context in range(2):
                for tensor in range(2):
                    rank = tensor + 2 * context + 4 * data + 8 * stage
                    x = x0 + context * pair + tensor * (box + gap)
                    p.box(x, y, box, 68, [str(rank), f"tensor {tensor}", f"context {context}"])
                x = x0 + context * pair
                p.path([(x + box + 1, y + 20), (x + box + gap - 1, y + 20)], "blue", both=True)
            p.path([(x0 + pair - 28, y + 48), (x0 + pair - 2, y + 48)], "purple", both=True)
        for column in range(4):
            x = x0 + (column // 2) * pair + (column % 2) * (box + gap) + box / 2
            p.path([(x, top + 70), (x, top + 118)], "green", both=True)
    for data in range(2):
        y = top + data * 120 + 34
        p.path([(left + half - 14, y), (left + half + 38, y)], "orange", both=True)
    rows = [("blue", "tensor", "each has a part of every matrix; activations, several times a "
             "layer; neighbouring ranks, on one node"),
            ("purple", "context", "each has two chunks of every sequence; keys and values, in each "
             "layer's attention, from 0 to 2, from 1 to 3, …"),
            ("green", "data", "each has other samples; gradients and weights, in buckets, beside "
             "computing (ZeRO splits what is kept)"),
            ("orange", "pipeline", "each has other layers; activations and their gradients, once "
             "a micro-batch, from 0 to 8, from 1 to 9, …")]
    for i, (colour, name, words) in enumerate(rows):
        y = 362 + i * 34
        p.path([(28, y - 5), (66, y - 5)], colour, both=True)
        p.text(80, y, name, "head")
        p.text(156, y, words, "small")
    p.text(24, 362 + 4 * 34, "Gradients are added over data and context together. A tied "
           "embedding is on both ends of a pipeline, which add its gradients.", "soft small")
    return p


def step():
    p = Picture(1000, 640, "How a step flows", "One rank; the exchanges are with the other ranks. "
                "docs/design.md names the files.")
    p.rect(24, 72, 952, 312, "page", "edge", dash=True)
    p.text(40, 96, "for each micro-batch of this rank", "head")
    y = 112
    p.box(40, y, 124, 62, ["shards", "a thread reads", "tokens ahead"])
    p.box(196, y, 116, 62, ["batch", "copied to", "the device"])
    p.box(344, y, 116, 62, ["embedding"], edge="blue")
    p.box(492, y, 150, 62, ["blocks", "1, 2, …, L"], edge="blue")
    p.box(674, y, 110, 62, ["final norm"], edge="blue")
    p.box(816, y, 144, 150, ["head and loss", "in chunks of rows:", "logits of a whole",
                               "batch never exist"], edge="blue")
    for x in (164, 312):
        p.path([(x, y + 31), (x + 31, y + 31)])
    for x in (460, 642, 784):
        p.path([(x, y + 31), (x + 31, y + 31)], "blue")
    y = 200
    p.box(674, y, 110, 62, ["final norm"], edge="green")
    p.box(492, y, 150, 62, ["blocks", "L, …, 2, 1"], edge="green")
    p.box(344, y, 116, 62, ["embedding"], edge="green")
    for x in (816, 674, 492):
        p.path([(x, y + 31), (x - 31, y + 31)], "green")
    p.text(40, y + 24, "forward", "small")
    p.path([(100, y + 20), (150, y + 20)], "blue")
    p.text(40, y + 46, "backward", "small")
    p.path([(100, y + 42), (150, y + 42)], "green")
    p.path([(567, 174), (567, 199)], "line", dash=True)
    p.text(577, 191, "activations, kept or computed again", "small soft")
    p.rect(344, 300, 616, 62, "box", "orange")
    p.text(652, 326, "exchange, on a stream of its own beside computing", "mid head")
    p.text(652, 346, "gradients are reduced bucket by bucket; with ZeRO-3 weights are gathered "
           "one bucket ahead", "mid small")
    for x in (402, 567, 729):
        p.path([(x, 262), (x, 299)], "orange")
    p.text(40, 330, "A unit's last gradient", "small")
    p.text(40, 348, "sends its bucket.", "small")
    p.rect(24, 404, 952, 212, "page", "edge", dash=True)
    p.text(40, 428, "once a step", "head")
    y = 444
    p.box(40, y, 170, 66, ["loss and sums", "of each tensor's squares, in",
                           "the order of ranks"])
    p.box(250, y, 150, 66, ["gradient norm", "clipping; is all finite?"])
    p.box(440, y, 190, 66, ["AdamW or Muon", "this rank's share of", "masters and moments"])
    p.box(670, y, 290, 66, ["new weights", "gathered bucket by bucket; the next",
                            "forward pass waits unit by unit"], edge="orange")
    for x in (210, 400, 630):
        p.path([(x, y + 33), (x + 39, y + 33)])
    p.path([(652, 362), (652, 386), (535, 386), (535, 443)], "orange")
    p.box(40, 534, 360, 62, ["outcome: loss and norm", "the host reads it a step later, so that it",
                             "does not wait for the device in a step"])
    p.box(440, 534, 520, 62, ["pause between two steps, when one is due",
                              "evaluation, sample, checkpoint"])
    p.path([(325, 510), (325, 533)])
    p.path([(815, 510), (815, 533)])
    return p


def planned(stage):
    """Bytes by purpose in GiB, from `train_gpt plan`."""
    program = os.environ.get("TRAIN_GPT", "build/train_gpt")
    command = [program, "plan", "configs/llama3-8b.json", "--world", "8"]
    for setting in ("device=cpu", "precision.dtype=bf16", f"parallel.zero={stage}",
                    "batch.micro_batch=1", "memory.recompute=block", "checkpoint.async=off"):
        command += ["--set", setting]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    units = {"GiB": 1, "MiB": 1 / 1024}
    rows = re.findall(r"^  ([\w ()]+?)  +[\d.]+ \wiB +[\d.]+ \wiB +([\d.]+) (\wiB)$", text, re.M)
    if not rows:
        raise SystemExit(f"error: {' '.join(command)} printed no table of memory:\n{text}")
    return {name: float(number) * units[unit] for name, number, unit in rows}


def memory():
    purposes = [("parameters", "weights, bf16", "blue"), ("gradients", "gradients", "green"),
                ("masters", "fp32 masters", "orange"), ("moments", "two moments", "purple"),
                ("activations", "activations", "red"), ("others", "the rest", "grey")]
    p = Picture(1000, 402, "What each of 8 data-parallel ranks holds, by ZeRO's stage",
                "Llama 3 8B in bf16, one sequence of 8,192 tokens, blocks recomputed; calculated "
                "by train_gpt plan")
    split = ["nothing is split", "+ masters and moments", "+ gradients", "+ weights"]
    scale = 620 / 145
    for stage in range(4):
        held = planned(stage)
        held["others"] = held["total"] - sum(held[name] for name, _, _ in purposes[:-1])
        y, x = 80 + stage * 62, 214.0
        p.text(24, y + 19, f"ZeRO-{stage}", "head")
        p.text(24, y + 37, split[stage], "small soft")
        for name, _, colour in purposes:
            width = held[name] * scale
            p.rect(x, y, width, 40, colour, "page", 0)
            x += width
        p.text(976, y + 25, f"{held['total']:.1f} GiB", "head end")
    p.path([(214 + 80 * scale, 72), (214 + 80 * scale, 326)], "line", arrow=False, dash=True)
    p.text(214 + 80 * scale, 342, "80 GiB", "mid small")
    for i, (_, words, colour) in enumerate(purposes):
        x = 24 + i * 160
        p.rect(x, 366, 14, 14, colour, "page", 2)
        p.text(x + 22, 378, words, "small")
    return p


def run_folder():
    p = Picture(1000, 590, "The life of a run's folder", "The same command starts a run, resumes "
                "it, and says that it is complete.")
    y = 84
    p.box(40, y, 180, 92, ["start", "config.json, manifest.json", "choices.json",
                           "history.jsonl: start"], edge="blue")
    p.box(290, y, 210, 92, ["steps", "metrics.jsonl, events.out…",
                            "fingerprints.jsonl, routers.jsonl", "where they are asked for"],
          edge="green")
    p.box(570, y, 180, 92, ["checkpoint", "step-00000480.tmp", "renamed when complete:",
                            "step-00000480"], edge="orange")
    p.box(820, y, 140, 92, ["end", "last checkpoint,", "report.html", "exit code 0"], edge="blue")
    for x, to in ((220, 290), (500, 570), (750, 820)):
        p.path([(x, y + 46), (to - 1, y + 46)])
    p.path([(660, y), (660, y - 14), (395, y - 14), (395, y - 1)], "line")
    p.text(456, 196, "report.html is written at every checkpoint; checkpoint.keep says how many",
           "small soft")
    p.text(456, 212, "of the newest checkpoints stay", "small soft")
    y = 270
    p.box(40, y, 270, 74, ["Ctrl-C, SIGTERM, a time limit", "a checkpoint is saved first",
                           "exit code 130 or 75"])
    p.box(345, y, 285, 74, ["killed, or the machine fails", "complete checkpoints stay;",
                            "what was begun is removed later"])
    p.box(665, y, 295, 74, ["a gradient that is not finite", "the last good weights are saved,",
                            "and a tensor is named; exit code 1"])
    p.path([(380, 176), (380, 222), (175, 222), (175, y - 1)])
    p.path([(410, 176), (410, 244), (487, 244), (487, y - 1)])
    p.path([(440, 176), (440, 226), (812, 226), (812, y - 1)])
    y = 392
    p.box(40, y, 590, 74, ["the same command again",
                           "begins at the newest complete checkpoint; later lines of "
                           "metrics.jsonl are dropped",
                           "history.jsonl: a start that resumes, with what has changed"],
          edge="blue")
    p.path([(175, 344), (175, y - 1)])
    p.path([(487, 344), (487, y - 1)])
    p.path([(40, y + 37), (16, y + 37), (16, 200), (330, 200), (330, 177)], "blue")
    p.box(665, y, 295, 74, ["remove the later checkpoints",
                            "to go back to one that is named as sane;", "then the same command"])
    p.path([(812, 344), (812, y - 1)])
    p.path([(665, y + 37), (631, y + 37)])
    for i, (name, words) in enumerate((
            ("step-00000480.damaged", "a checkpoint whose files changed after they were written: "
             "runs do not resume from it"),
            ("step-00000480.suspect", "may have been trained on a damaged shard: runs do not "
             "resume from it"),
            ("metrics.old.jsonl", "the metrics of a run that began again in the same folder"))):
        p.text(40, 512 + i * 24, name, "head small")
        p.text(220, 512 + i * 24, words, "small")
    return p


def main():
    words = [word for word in sys.argv[1:] if word != "--check"]
    check = len(words) < len(sys.argv) - 1
    if any(word.startswith("-") for word in words) or len(words) > 1:
        print("usage: scripts/pictures.py [--check] [FOLDER]", file=sys.stderr)
        sys.exit(2)
    folder = Path(words[0]).resolve() if words else None
    os.chdir(Path(__file__).resolve().parent.parent)
    folder = folder or Path("docs/images")
    wrong = 0
    for name, draw in (("mesh", mesh), ("step", step), ("memory", memory),
                       ("run-folder", run_folder)):
        file, text = folder / f"{name}.svg", draw().svg()
        if not check:
            file.write_text(text)
            print(f"wrote {file}")
        elif not file.exists() or file.read_text() != text:
            print(f"{file} is not what scripts/pictures.py draws; run it")
            wrong = 1
    sys.exit(wrong)


main()
