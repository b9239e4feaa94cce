#!/usr/bin/env python3
"""Opens reports in headless Chromium and compares what it draws with metrics.jsonl.

usage: scripts/check_report.py TRAIN_GPT CHROMIUM FOLDER [RUN…]

scripts/check-report.sh calls it. Pages, screenshots and a PDF go into FOLDER. With folders of runs,
it photographs these; without, the runs that it makes up. The last line that it prints is "N passed,
M failed".
"""
import html.parser
import http.server
import json
import math
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

passed = failed = 0


def check(condition, claim):
    global passed, failed
    passed += bool(condition)
    failed += not condition
    if not condition:
        print(f"failed: {claim}")


# ---- Runs that are made up -----------------------------------------------------------------------


def make_loads(rng, layers, experts, share):
    """How often each expert was chosen, in thousandths of the mean: uneven, and more so in later
    layers. share: of the run that is done."""
    loads = []
    for layer in range(layers):
        spread = 0.2 + (2.5 * share if layer % 7 == 5 else 1.2 * (1 - share))
        weights = [math.exp(rng.gauss(0, spread)) for _ in range(experts)]
        loads.append([round(1000 * experts * w / sum(weights)) if w > 0.05 else 0 for w in weights])
    return loads


def make_run(folder, steps, seed, sources=(), layers=4, experts=0):
    """A run's folder with random metrics that look like those of a run; it was stopped and resumed
    in the middle. experts: of each layer but the first one."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "run_dir": str(folder),
        "model": {"family": "gpt2", "n_layer": layers, "n_embd": 256},
        "batch": {"tokens_per_step": 16384},
        "optimizer": {"learning_rate": 1e-3, "grad_clip": 1.0},
        "schedule": {"steps": steps},
    }
    (folder / "config.json").write_text(json.dumps(config))
    start = {
        "event": "start", "step": 0, "time": 1772366400, "resumes": False, "version": "made up",
        "device": "CPU", "ranks": 2, "hosts": ["node-1", "node-2"], "parameters": 4000000,
        "vocabulary": 4096, "tokenizer": "0123456789abcdef",
        "memory": {"parameters": 8 << 20, "gradients": 16 << 20, "masters": 16 << 20,
                   "moments": 32 << 20, "activations": 70 << 20},
    }
    half = steps // 2
    history = [start]
    seconds = 0.0
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in range(1, steps + 1):
            ms = rng.uniform(70, 80) + (400 if rng.random() < 0.001 else 0)
            seconds += ms / 1000
            loss = 2.5 + 5.8 * math.exp(-step / (steps / 40)) + (
                step / steps * 30 + 1) ** -0.5 + rng.gauss(0, 0.06)
            line = {
                "step": step, "loss": loss,
                "grad_norm": 0.3 + rng.expovariate(15) + 3 * math.exp(-step / 100),
                "learning_rate": 1e-3 * min(1, step / (0.02 * steps)) * (1 - 0.9 * step / steps),
                "tokens_per_second": 16384e3 / ms, "peak_fraction": 40 / ms, "compute_ms": 0.9 * ms,
                "communication_ms": 0.04 * ms, "data_wait_ms": 0.01 * ms, "optimizer_ms": 0.05 * ms,
            }
            for i, source in enumerate(sources):
                line[f"loss/{source}"] = loss + i - 0.5 + rng.gauss(0, 0.1)
            if experts:
                line["router_load"], line["router_idle"] = (1 + rng.expovariate(1),
                                                            rng.randrange(experts))
            line["seconds"] = seconds
            metrics.write(json.dumps(line) + "\n")
            if step % max(1, steps // 20) == 0:
                metrics.write(json.dumps({"step": step, "val_loss": loss + 0.05,
                                          "val_bits_per_byte": loss / 3, "seconds": seconds}) +
                              "\n")
                text = " was the </script> word, & <b>it</b> was\nwith the " + " ".join(
                    rng.choices("house king land men said".split(), k=40))
                history.append({"event": "sample", "step": step, "time": 1772366400,
                                "prompt": "In the beginning", "text": text})
            if step == half:
                history.append({"event": "end", "step": step, "time": 1772370000,
                                "reason": "SIGTERM", "code": 75})
                history.append(dict(start, step=step, resumes=True, time=1772380000))
    history.append({
        "event": "end", "step": steps, "time": 1772390000, "reason": "complete", "code": 0})
    if experts:
        with open(folder / "routers.jsonl", "w") as file:
            for step in range(max(1, steps // 100), steps + 1, max(1, steps // 100)):
                file.write(json.dumps({
                    "step": step,
                    "load": [None] + make_loads(rng, layers - 1, experts, step / steps)}) + "\n")
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    return folder


# ---- The browser ---------------------------------------------------------------------------------

# Runs after the page's own script. It uses the page as a reader does, and leaves what it saw in an
# element.
USE = """
<script>
(() => {
const seen = {};
const svg = id => document.querySelector(`svg[data-plot="${id}"]`);
const domain = () => svg('loss').dataset.domain.split(' ').map(Number);
const chart = svg('loss').parentElement;
const at = (type, share) => {
    const box = chart.getBoundingClientRect(),
        [left, right] = svg('loss').dataset.area.split(' ').map(Number);
    const scale = box.width / svg('loss').viewBox.baseVal.width;
    const x = box.left + scale * (left + share * (right - left));
    (type === 'pointerup' ? window : chart).dispatchEvent(
        new PointerEvent(type, {clientX: x, clientY: box.top + 90, button: 0, bubbles: true}));
};
seen.domain = domain();
seen.cut = [...document.querySelectorAll('svg[data-plot] circle.dot')].filter(dot => {
    const area = dot.closest('svg').querySelector('clipPath rect'),
        number = (of, name) => +of.getAttribute(name);
    const x = number(dot, 'cx'), r = number(dot, 'r'), left = number(area, 'x');
    return x - r < left || x + r > left + number(area, 'width');
}).length;
seen.ends = [...document.querySelectorAll('svg[data-plot^="time/"]')].map(plot => {
    const host = plot.parentElement, box = host.getBoundingClientRect(),
        right = +plot.dataset.area.split(' ')[1];
    host.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + right - 0.01,
        clientY: box.top + 90, bubbles: true}));
    return host.querySelector('.tip b').textContent;
});
at('pointermove', 0.5);
seen.tip = chart.querySelector('.tip').innerText;
seen.tipShown = !chart.querySelector('.tip').hidden;
seen.crosses = [...document.querySelectorAll('.cross')].filter(line =>
    line.getAttribute('visibility') === 'visible').length;
seen.plots = document.querySelectorAll('svg[data-plot]').length;
at('pointerleave', 0.5);
at('pointerdown', 0.25); at('pointermove', 0.6); at('pointerup', 0.75);
seen.zoomed = domain();
seen.zoomedAll = [...document.querySelectorAll('svg[data-plot]')].map(node =>
    node.dataset.domain.split(' ').slice(0, 2).map(Number));
document.getElementById('reset').click();
seen.reset = domain();
for (const axis of ['tokens', 'hours', 'step']) {
    document.querySelector(`[data-axis=${axis}]`).click();
    seen[axis] = domain();
}
const buttons = document.querySelectorAll('#runs button');
seen.buttons = buttons.length;
if (buttons.length) {
    buttons[0].click();
    seen.hidden = !document.querySelector('path[data-run="0"]') &&
        !!document.querySelector('path[data-run="1"]');
    buttons[0].click();
    seen.back = !!document.querySelector('path[data-run="0"]');
}
seen.loads = [];
for (const slider of document.querySelectorAll('.time input')) {
    const host = slider.closest('section').querySelector('.heat'),
        frame = () => host.getBoundingClientRect();
    for (const place of [0, Math.floor(slider.max / 2), +slider.max]) {
        slider.value = place;
        slider.dispatchEvent(new Event('input'));
        const map = host.querySelector('svg');
        host.dispatchEvent(new PointerEvent('pointermove', {clientX: frame().left + 60,
            clientY: frame().top + 24, bubbles: true}));
        seen.loads.push({run: +map.dataset.heat, step: +map.dataset.step,
            said: slider.nextElementSibling.textContent,
            tip: host.querySelector('.tip').innerText,
            cells: [...map.querySelectorAll('path')].map(path =>
                [+path.dataset.level, path.getAttribute('d')])});
    }
}
seen.unit = document.querySelector('[data-axis=hours]').textContent;
const page = document.documentElement.clientWidth;
seen.outside = [...document.querySelectorAll('svg text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.width && (box.left < -0.5 || box.right > page + 0.5);
}).map(text => text.textContent);
seen.logarithmic = [...document.querySelectorAll('svg[data-log="1"]')]
    .every(plot => plot.querySelector('.unit').textContent.includes('logarithmic'));
const inner = document.getElementById('first').clientWidth;
seen.tables = [...document.querySelectorAll('table.facts')].filter(table => table.offsetWidth)
    .map(table => table.offsetWidth / inner);
seen.limits = [...document.querySelectorAll('path[data-limit]')].filter(line =>
    line.closest('svg').dataset.plot === 'speed').map(line => line.dataset.limit);
seen.raw = [...document.querySelectorAll('#configuration td')]
    .filter(cell => cell.textContent === 'auto')
    .map(cell => cell.parentElement.textContent);
seen.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
seen.errors = window.errorsSeen;
const node = document.createElement('pre');
node.id = 'seen';
node.textContent = JSON.stringify(seen);
document.body.append(node);
})();
</script>
"""
WATCH = ("<script>window.errorsSeen = []; addEventListener('error', event => "
         "errorsSeen.push(String(event.message)));</script>")


class Browser:
    def __init__(self, program):
        self.program = program

    def run(self, page, *options):
        """Loads a page; returns its standard output and what it wrote to the console."""
        done = subprocess.run([self.program, "--headless", "--no-sandbox", "--disable-gpu",
                               "--hide-scrollbars", "--virtual-time-budget=5000",
                               "--enable-logging=stderr", *options, page.resolve().as_uri()],
                              capture_output=True, text=True, timeout=120, check=False)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


class Drawing(html.parser.HTMLParser):
    """The SVG of each plot in a page: its frame, and its curves."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.plots = {}
        self.external = []
        self.seen = None
        self.inside = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        if tag == "svg" and "data-plot" in of:
            self.inside = {"domain": [float(n) for n in of["data-domain"].split()],
                           "log": of["data-log"] == "1",
                           "area": [float(n) for n in of["data-area"].split()], "curves": {}}
            self.plots[of["data-plot"]] = self.inside
        if tag == "path" and "data-curve" in of:
            pixels = [float(n) for n in re.findall(r"-?[\d.]+", of["d"])]
            self.inside["curves"][int(of["data-run"]), of["data-curve"]] = list(
                zip(pixels[::2], pixels[1::2]))
        for name in ("src", "href"):
            if of.get(name) and not of[name].startswith(("#", "data:")):
                self.external.append(of[name])
        if tag == "pre" and of.get("id") == "seen":
            self.seen = ""

    def handle_data(self, data):
        if self.seen == "":
            self.seen = data


def values_of(plot, pixels):
    """The values that pixels of a plot stand for."""
    x0, x1, y0, y1 = plot["domain"]
    left, right, base, top = plot["area"]
    for px, py in pixels:
        share = (base - py) / (base - top)
        y = y0 * (y1 / y0) ** share if plot["log"] else y0 + share * (y1 - y0)
        yield x0 + (px - left) / (right - left) * (x1 - x0), y


def check_points(name, drawing, folders):
    """Each drawn point is a line of metrics.jsonl, and in each pixel the extremes are drawn."""
    metrics = [[json.loads(line) for line in open(folder / "metrics.jsonl")] for folder in folders]
    compared = 0
    for plot_name, plot in drawing.plots.items():
        x0, x1, y0, y1 = plot["domain"]
        left, right, base, top = plot["area"]
        for (run, field), pixels in plot["curves"].items():
            written = {line["step"]: line[field] for line in metrics[run] if field in line}
            if not written:
                continue  # computed: running means and limits
            per_pixel = (x1 - x0) / (right - left)
            height = 0.02 * (base - top)  # what half a hundredth of a pixel is, generously
            wrong = 0
            for x, y in values_of(plot, pixels):
                near = [step for step in (round(x) - 1, round(x), round(x) + 1)
                        if step in written and abs(step - x) < 0.02 * per_pixel + 0.02]
                def differs(value):
                    if plot["log"]:
                        return (
                            abs(math.log(max(y, 1e-300) / value)) > 1e-4 * math.log(y1 / y0) + 1e-6)
                    return abs(y - value) > 1e-4 * (y1 - y0) + 1e-6 * height
                candidates = near or [min(written, key=lambda step: abs(step - x))]
                wrong += all(differs(written[step]) for step in candidates)
            check(wrong == 0, f"{name}: {wrong} of {len(pixels)} points of {field} in {plot_name} "
                              "are not in metrics.jsonl")
            drawn = [y for _, y in values_of(plot, pixels)]
            close = 2e-4 * (y1 - y0)
            if not plot["log"]:
                check(abs(max(drawn) - max(written.values())) < close and
                      abs(min(drawn) - min(written.values())) < close,
                      f"{name}: the extremes of {field} are drawn")
            compared += 1
    check(compared >= 3 * len(folders), f"{name}: curves were compared ({compared})")


def level_of(load):
    """The level with which a load is drawn (training/report/router_picture.h)."""
    return min(63, max(1, round(32 + 6 * math.log2(load / 1000)))) if load else 0


def check_loads(name, seen, folders):
    """Each drawn cell is a load of routers.jsonl, in the place of its layer and expert."""
    for i, folder in enumerate(folders):
        maps = [map_ for map_ in seen["loads"] if map_["run"] == i]
        if not (folder / "routers.jsonl").exists():
            check(not maps, f"{name}: a run without experts has no map of their loads")
            continue
        written = {line["step"]: [layer for layer in line["load"] if layer]
                   for line in map(json.loads, open(folder / "routers.jsonl"))}
        check(len(maps) == 3 and maps[0]["step"] == min(written) and
              maps[2]["step"] == max(written), f"{name}: loads of the first and last step")
        for map_ in maps:
            loads = written[map_["step"]]
            cells = sorted((float(y), float(x), level) for level, path in map_["cells"]
                           for x, y in re.findall(r"M([-\d.]+) ([-\d.]+)", path))
            wanted = [level_of(load) for layer in loads for load in layer]
            drawn = [level for _, _, level in cells]
            # A load between two levels may be rounded to either.
            check(len(drawn) == len(wanted) and
                  all(abs(a - b) <= (a > 0) * (b > 0) for a, b in zip(drawn, wanted)) and
                  sum(a != b for a, b in zip(drawn, wanted)) <= 0.01 * len(wanted),
                  f"{name}: the loads of step {map_['step']} are drawn")
            check(map_["said"] == f"step {map_['step']:,}",
                  f"{name}: the slider names its step: {map_['said']!r}")
            check("layer 1, expert " in map_["tip"] and
                  ("times the mean" in map_["tip"] or "never chosen" in map_["tip"]),
                  f"{name}: pointing shows a load: {map_['tip']!r}")


def check_page(browser, folder, name, folders, program):
    page = folder / f"{name}.html"
    done = subprocess.run([program, "report", *map(str, folders), "--out", str(page)],
                          capture_output=True, text=True, check=False)
    check(done.returncode == 0 and page.exists(), f"{name}: the report is written: {done.stderr}")
    text = page.read_text()
    check(len(text.encode()) <= 300_000, f"{name}: at most 300,000 bytes ({len(text.encode())})")
    used = folder / f"{name}-used.html"
    used.write_text(
        text.replace("<head>", "<head>" + WATCH, 1).replace("</body>", USE + "</body>", 1))
    dom, console = browser.run(used, "--window-size=1280,1000", "--dump-dom")
    check(not console, f"{name}: nothing is written to the console: {console[:3]}")
    drawing = Drawing(dom)
    check(not drawing.external, f"{name}: nothing is loaded: {drawing.external[:3]}")
    if not drawing.seen:
        check(False, f"{name}: the page can be used")
        return
    seen = json.loads(drawing.seen)
    first, last = seen["domain"][:2]
    middle = (first + last) / 2
    check(seen["errors"] == [], f"{name}: no script fails: {seen['errors']}")
    check(not seen["wide"], f"{name}: the page is not wider than the window")
    check(seen["tipShown"] and "running mean" in seen["tip"],
          f"{name}: pointing shows values: {seen['tip']!r}")
    step = re.search(r"step ([\d,]+)", seen["tip"])
    check(step and abs(int(step[1].replace(",", "")) - middle) < 0.02 * (last - first) + 1,
          f"{name}: they are those of the step: {seen['tip']!r}")
    check(seen["crosses"] == seen["plots"] > 4, f"{name}: the place is shown in all plots")
    ends = [max(json.loads(line)["step"] for line in open(f / "metrics.jsonl")) for f in folders]
    check([end.split(" · ")[0] for end in seen["ends"]] == [f"step {end:,}" for end in ends],
          f"{name}: after the end of a run its last times are shown: {seen['ends']}")
    check(seen["cut"] == 0, f"{name}: no dot is cut: {seen['cut']}")
    quarter = [first + 0.25 * (last - first), first + 0.75 * (last - first)]
    check(all(abs(a - b) < 0.01 * (last - first) for range_ in seen["zoomedAll"]
              for a, b in zip(range_, quarter)), f"{name}: dragging zooms all plots")
    check(seen["reset"] == seen["domain"] == seen["step"], f"{name}: the whole run comes back")
    check(seen["tokens"][1] == 16384 * seen["step"][1],
          f"{name}: tokens are steps times tokens of a step")
    seconds = max(json.loads(open(f / "metrics.jsonl").read().splitlines()[-1])["seconds"]
                  for f in folders)
    unit = "minutes" if seconds < 3 * 3600 else "hours"
    check(seen["unit"] == unit, f"{name}: the axis of time is in {unit}: {seen['unit']}")
    time = seconds / (60 if unit == "minutes" else 3600)
    check(abs(seen["hours"][1] / time - 1) < 1e-4, f"{name}: {unit} are those of metrics.jsonl")
    check(seen["outside"] == [], f"{name}: no label leaves the page: {seen['outside'][:3]}")
    check(seen["logarithmic"], f"{name}: logarithmic axes say so")
    check(min(seen["tables"]) > 0.97, f"{name}: tables use the page's width: {seen['tables']}")
    check(len(seen["limits"]) == len(folders), f"{name}: each run has one limit: {seen['limits']}")
    check(not seen["raw"], f"{name}: no setting is a bare auto: {seen['raw'][:3]}")
    if len(folders) > 1:
        check(seen["buttons"] == len(folders) and seen["hidden"] and seen["back"],
              f"{name}: runs can be hidden and shown")
    check_points(name, drawing, folders)
    check_loads(name, seen, folders)
    without = Drawing(re.sub(r"<script.*?</script>", "", text, flags=re.S))
    check(not without.plots and "<svg" in text, f"{name}: the loss is drawn without a script too")
    photograph(browser, folder, page)


# What a window of some size shows of a page, at first and with the pointer in the middle of the
# loss.
LOOK = """
<script>
(() => {
const plot = document.querySelector('svg[data-plot=loss]'), box = plot.getBoundingClientRect();
const seen = {top: box.top, bottom: box.bottom, domain: plot.dataset.domain.split(' ').map(Number),
    unit: plot.querySelector('.unit').textContent, above: +plot.dataset.top,
    thin: +getComputedStyle(document.querySelector('.line.thin')).opacity,
    names: [...document.querySelectorAll('#runs button')].map(button => button.textContent),
    width: document.documentElement.clientWidth, wide: document.documentElement.scrollWidth,
    cut: [...document.querySelectorAll('table.facts')].filter(table => table.offsetWidth &&
        table.parentElement.scrollWidth > table.parentElement.clientWidth).length,
    right: Math.max(...[...document.querySelectorAll('table.facts td')]
        .map(cell => cell.getBoundingClientRect().right)),
    marks: [...document.querySelectorAll('svg[data-plot=loss] .mark-text')].map(text => {
        const mark = text.getBoundingClientRect();
        return mark.right <= document.documentElement.clientWidth && mark.left >= 0;
    })};
plot.parentElement.dispatchEvent(new PointerEvent('pointermove',
    {clientX: (box.left + box.right) / 2, clientY: box.top + 90, bubbles: true}));
const tip = plot.parentElement.querySelector('.tip'), frame = tip.getBoundingClientRect();
seen.tip = {left: frame.left, right: frame.right, cut: tip.scrollWidth > tip.clientWidth,
    rows: [...tip.querySelectorAll('b, tr')].map(row => row.getBoundingClientRect().height)};
const node = document.createElement('pre');
node.id = 'seen';
node.textContent = JSON.stringify(seen);
(window.parent === window ? document : window.parent.document).body.append(node);
})();
</script>
"""


def look(browser, folder, name, text, *options, phone=False):
    """What a window shows of a page's text; phone: 390 pixels wide."""
    text = text.replace("</body>", LOOK + "</body>", 1)
    if phone:
        text = ('<body style="margin:0"><iframe style="width:390px;height:3000px;border:0" srcdoc="'
                + html.escape(text) + '"></iframe>')
    page = folder / f"{name}-looked-at.html"
    page.write_text(text)
    dom, _ = browser.run(page, *options, "--dump-dom")
    page.unlink()
    return json.loads(Drawing(dom).seen or "{}")


def check_windows(browser, folder, program, runs):
    """What pages look like in windows of several sizes, and with extraordinary runs."""
    short, other = runs
    twins = [make_run(folder / "runs" / parent / "story", 300, 7 + i, ("web",))
             for i, parent in enumerate(("first", "second"))]
    models = []
    for i, family in enumerate(("gpt2", "llama", "qwen3")):  # their note names many keys
        models.append(make_run(folder / "runs" / family, 300, 20 + i, layers=4 + i))
        config = json.loads((models[-1] / "config.json").read_text())
        config["model"].update(family=family, n_head=4 + i, n_embd=64 * (4 + i), n_ff=256 * i,
                               n_ctx=128 << i, n_kv_head=i)
        (models[-1] / "config.json").write_text(json.dumps(config))
    spiky = make_run(folder / "runs" / "spiky", 12000, 5)
    lines = (spiky / "metrics.jsonl").read_text().splitlines()
    for at in range(500, len(lines), 100):  # a tenth of the points that are drawn
        line = json.loads(lines[at])
        if "loss" in line:
            lines[at] = json.dumps(dict(line, loss=1e7))
    (spiky / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def page(*folders):
        out = folder / "window.html"
        subprocess.run([program, "report", *map(str, folders), "--out", str(out)],
                       capture_output=True, check=True)
        return out.read_text()

    for what, folders in (("a run", [short]), ("a long one", [other]), ("two runs", twins),
                          ("three models", models)):
        seen = look(browser, folder, "laptop", page(*folders), "--window-size=1366,768")
        check(seen and 0 < seen["top"] and seen["bottom"] <= 768,
              f"the loss of {what} is seen on 1366 x 768: {seen}")
        check(seen and all(seen["marks"]) and (seen["marks"] or len(folders) > 1),
              f"marks of {what} are inside, and that of a single run has its text: {seen}")
        check(seen and seen["tip"]["rows"] and max(seen["tip"]["rows"]) < 30,
              f"each value of {what} under the pointer is a line: {seen}")
        seen = look(browser, folder, "phone", page(*folders), phone=True)
        check(seen and seen["width"] == seen["wide"] == 390, f"{what} fits on a phone: {seen}")
        check(seen and seen["cut"] == 0 and seen["right"] <= 390,
              f"no value of {what} is cut on a phone: {seen}")
    seen = look(browser, folder, "twins", page(*twins), "--window-size=1366,768")
    check(len(seen["names"]) == 2 and len(set(seen["names"])) == 2,
          f"runs with equal names are told apart: {seen['names']}")
    named = make_run(folder / "runs" / "_".join(["a_run_with_a_long_name"] * 6), 300, 30)
    seen = look(browser, folder, "named", page(named, short), phone=True)
    check(seen["tip"]["left"] >= 0 and seen["tip"]["right"] <= 390 and not seen["tip"]["cut"],
          f"a long name under the pointer stays on a phone: {seen['tip']}")
    many = [short, other, *twins, *models]
    seen = look(browser, folder, "many", page(*many), "--window-size=1366,768")
    check(seen["cut"] == 0 and seen["right"] <= 1366,
          f"no value of {len(many)} runs is cut on 1366 x 768: {seen}")
    seen = look(browser, folder, "spiky", page(spiky), "--window-size=1366,768")
    check(seen["domain"][3] < 20 and seen["above"] > 9e6 and "higher" in seen["unit"],
          f"losses of 10^7 do not flatten the rest: {seen}")
    dark = ("--window-size=1366,768", "--blink-settings=preferredColorScheme=0")
    seen = look(browser, folder, "dark", page(short), *dark)
    check(seen["thin"] >= 0.6, f"thin lines are seen in dark mode: {seen['thin']}")
    (folder / "window.html").unlink()


# The pointer seems to rest on a plot until the page says that there are new steps; the server hears
# what it says.
READING = """<script>
addEventListener('DOMContentLoaded', () => {
    const real = document.querySelector.bind(document), kind = real('.kind');
    let reading = true;
    document.querySelector = selector =>
        selector === '.chart:hover' ? (reading ? document.body : null) : real(selector);
    new MutationObserver(() => {
        if (!reading || !kind.textContent.includes(':')) return;
        reading = false;
        fetch('said?' + encodeURIComponent(kind.textContent));
    }).observe(kind, {childList: true, characterData: true, subtree: true});
});
</script>"""


def check_live(browser, folder, program):
    """The page of a live report, which loads itself again when the run has gone on, and while a
    plot is read only says so. The browser reaches it through a server that appends a step when the
    page first asks for data."""
    run = make_run(folder / "runs" / "live", 200, 11)
    live = subprocess.Popen([program, "report", "--live", str(run)], stdout=subprocess.PIPE,
                            text=True)
    address = re.search(r"http://\S+/", live.stdout.readline())[0]
    asked = []

    class Between(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path.startswith("/said?"):
                self.send_response(200)
                self.end_headers()
                return
            if self.path == "/data" and asked.count("/data") == 1:
                with open(run / "metrics.jsonl", "a") as metrics:
                    metrics.write(json.dumps({"step": 300, "loss": 2.75, "seconds": 99}) + "\n")
            try:
                with urllib.request.urlopen(address + self.path.removeprefix("/")) as answer:
                    content, headers = answer.read(), answer.headers
                    self.send_response(answer.status)
            except urllib.error.HTTPError as error:  # a browser asks for a favicon
                content, headers = error.read(), error.headers
                self.send_response(error.code)
            for name in ("Content-Type", "Content-Security-Policy"):
                self.send_header(name, headers[name])
            self.end_headers()
            if self.path == "/" and asked.count("/") == 1:
                content = content.replace(b"<head>", b"<head>" + READING.encode(), 1)
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Between)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    done = subprocess.run(
        [browser.program, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--virtual-time-budget=15000", "--dump-dom", f"http://127.0.0.1:{server.server_port}/"],
        capture_output=True, text=True, timeout=120, check=False)
    server.shutdown()
    live.send_signal(signal.SIGINT)
    check(live.wait(60) == 0, "a live report ends at Ctrl-C")
    console = [line for line in done.stderr.splitlines()
               if "CONSOLE" in line and "favicon" not in line]
    check(not console, f"live: nothing is written to the console: {console[:3]}")
    check(asked.count("/") >= 2 and "/data" in asked, f"live: the page loads itself again: {asked}")
    said = [urllib.parse.unquote(path) for path in asked if path.startswith("/said?")]
    check(len(said) == 1 and said[0].endswith(
        ": new steps are there; move the pointer away to see them"),
          f"live: the page says that there are new steps while a plot is read: {said}")
    loss = Drawing(done.stdout).plots.get("loss")
    check(loss and loss["domain"][1] == 300,
          f"live: the new step is drawn: {loss and loss['domain']}")


def photograph(browser, folder, page):
    """Screenshots, each of which must be a picture of some size."""
    phone = folder / "phone.html"  # windows have a least width
    phone.write_text(f'<body style="margin:0"><iframe src="{page.name}" '
                     'style="width:390px;height:5600px;border:0"></iframe>')
    name = page.stem
    pictures = [
        (page, f"{name}-light.png", ["--window-size=1280,3800"]),
        (page, f"{name}-dark.png",
         ["--window-size=1280,3800", "--blink-settings=preferredColorScheme=0"]),
        (phone, f"{name}-phone.png", ["--window-size=520,5600"]),
    ]
    for source, picture, options in pictures:
        (folder / picture).unlink(missing_ok=True)
        browser.run(source, *options, f"--screenshot={(folder / picture).resolve()}")
        check((folder / picture).exists() and (folder / picture).stat().st_size > 20_000,
              f"{picture} is written")
    pdf = folder / f"{name}.pdf"
    pdf.unlink(missing_ok=True)
    browser.run(page, "--no-pdf-header-footer", f"--print-to-pdf={pdf.resolve()}")
    check(pdf.exists() and pdf.stat().st_size > 20_000, f"{pdf.name} is written")
    phone.unlink()
    print(f"screenshots of {name}: {folder}/{name}-*.png, {pdf}")


def main():
    if len(sys.argv) < 4 or "--help" in sys.argv:
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    program, browser, folder = sys.argv[1], Browser(sys.argv[2]), pathlib.Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    given = [pathlib.Path(run) for run in sys.argv[4:]]
    if given:
        page = folder / "given.html"
        subprocess.run([program, "report", *map(str, given), "--out", str(page)], check=True)
        photograph(browser, folder, page)
    else:
        seed = random.randrange(1 << 30)
        print(f"seed {seed}")
        runs = folder / "runs"
        short = make_run(runs / "short", 400, seed, ("web", "code <b>"))
        long = make_run(runs / "long", 100_000, seed + 1, ("web", "books"))
        other = make_run(runs / "other", 60_000, seed + 2, layers=6)
        small = make_run(runs / "small", 2000, seed + 3, layers=5, experts=8)
        large = make_run(runs / "large", 30_000, seed + 4, layers=48, experts=128)
        check_windows(browser, folder, program, (short, other))
        check_live(browser, folder, program)
        check_page(browser, folder, "one", [short], program)
        check_page(browser, folder, "mixture", [large], program)
        check_page(browser, folder, "mixtures", [large, small, short], program)
        check_page(browser, folder, "long", [long], program)
        check_page(browser, folder, "three", [long, other, short], program)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
