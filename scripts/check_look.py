#!/usr/bin/env python3
"""Opens pages that `train_gpt look` writes in headless Chromium and compares them with their data.

usage: scripts/check_look.py TRAIN_GPT CHROMIUM FOLDER

scripts/check-report.sh calls it. It trains small models of several kinds for a few steps. Pages and
screenshots go into FOLDER. The last line that it prints is "N passed, M failed".
"""
import html
import json
import math
import pathlib
import random
import re
import subprocess
import sys

import check_report
from check_report import Browser, Drawing, check

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

MODELS = {
    "gpt2": {"family": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "n_ctx": 160},
    "gpt_oss": {"family": "gpt_oss", "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64,
                "head_size": 16, "n_ctx": 160, "window": 9, "n_expert": 6,
                "n_expert_per_token": 2, "n_ff_expert": 32},
    "llama": {"family": "llama", "n_layer": 2, "n_head": 6, "n_kv_head": 2, "n_embd": 96,
              "n_ctx": 160},
}

# Uses the page as a reader does, and leaves what it saw in an element.
USE = """
<script>
(() => {
const seen = {texts: {}, hovers: []};
for (const host of document.querySelectorAll('.text'))
    seen.texts[host.dataset.view] = [...host.children].map(span => span.textContent);
const span = (view, i) => document.querySelector(`.text[data-view=${view}] span[data-i="${i}"]`);
const over = node => node.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
const slider = document.getElementById('layer');
const layer = l => { slider.value = l; slider.dispatchEvent(new Event('input')); };
const count = seen.texts.loss.length;
for (const [l, head, i] of PLACES) {
    layer(l);
    document.querySelector(`#heads [data-head="${head}"]`).click();
    over(span('loss', i));
    seen.hovers.push({layer: l, head, token: i,
        panel: document.getElementById('expected').innerText,
        attended: document.getElementById('attended').innerText,
        outlined: [...document.querySelectorAll('.text span.at')].map(node => +node.dataset.i),
        norms: document.querySelector('#norms path[data-line]').getAttribute('d'),
        experts: [...document.querySelectorAll('#all-experts rect.at')]
            .map(cell => [+cell.dataset.layer, +cell.dataset.place])});
}
span('loss', 2).click();
over(span('loss', 5));
const at = () =>
    [...document.querySelectorAll('.text[data-view=loss] .at')].map(n => +n.dataset.i);
seen.held = at();
dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));
seen.moved = at();
const left = (host, more) => host.dispatchEvent(
    new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true, cancelable: true, ...more}));
seen.untouched = [...['altKey', 'ctrlKey', 'metaKey', 'shiftKey'].map(key =>
    left(window, {[key]: true})), left(slider), left(document.getElementById('all-heads'))];
seen.kept = at();
seen.focused = [...document.querySelectorAll('.text')].filter(host =>
    host.offsetWidth).map(host => {
    host.focus();
    host.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
    return [document.activeElement === host, +host.querySelector('.at').dataset.i];
});
layer(0);
seen.layer = document.querySelector('label:has(#layer)').innerText.trim();
span('loss', 3).click();
if (document.querySelector('.held')) span('loss', 3).click();
const cells = document.querySelectorAll('#all-heads rect');
seen.heads = cells.length;
cells[cells.length - 1].dispatchEvent(new MouseEvent('click', {bubbles: true}));
seen.clicked = document.getElementById('attended').innerText;
seen.experts = document.querySelectorAll('#all-experts rect').length;
seen.map = document.getElementById('map').width;
seen.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
seen.errors = window.errorsSeen;
const node = document.createElement('pre');
node.id = 'seen';
node.textContent = JSON.stringify(seen);
document.body.append(node);
})();
</script>
"""


# What a window shows of a page, without using it: its width, what is cut or leaves it, and texts
# whose contrast with their ground is low. Every layer and token is shown, since they have colours.
LOOK = """
<script>
(() => {
const root = document.documentElement, seen = {width: root.clientWidth, wide: root.scrollWidth};
const name = node => node.tagName + '.' + node.getAttribute('class') + '#' + node.id;
const all = [...document.querySelectorAll('main *')].filter(node => node.getClientRects().length);
seen.cut = all.filter(node => !(node instanceof SVGElement) &&
    getComputedStyle(node).overflowX !== 'visible' &&
    node.scrollWidth > node.clientWidth + 1).map(name);
seen.outside = all.filter(node => {
    const box = node.getBoundingClientRect();
    return box.width && (box.left < -0.5 || box.right > root.clientWidth + 0.5);
}).map(name);
const paper = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const paint = colour => { paper.fillStyle = colour; paper.fillRect(0, 0, 1, 1); };
const luminance = () => [...paper.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, c) => sum + v * [0.2126, 0.7152, 0.0722][c], 0);
const contrast = node => {
    const above = [];
    for (let at = node; at; at = at.parentElement)
        above.unshift(getComputedStyle(at).backgroundColor);
    paint('white');
    above.forEach(paint);
    const ground = luminance();
    paint(getComputedStyle(node)[node instanceof SVGElement ? 'fill' : 'color']);
    const text = luminance();
    return (Math.max(ground, text) + 0.05) / (Math.min(ground, text) + 0.05);
};
const texts = () => [...document.querySelectorAll('main *')].filter(node =>
    node.getClientRects().length && !node.disabled &&
    [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()));
seen.pale = [];
seen.measured = 0;
const slider = document.getElementById('layer'),
    spans = document.querySelectorAll('.text[data-view=loss] span');
for (const i of [0, spans.length >> 1, spans.length - 1]) for (let l = 0; l <= slider.max; ++l) {
    slider.value = l;
    slider.dispatchEvent(new Event('input'));
    spans[i].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
    for (const node of texts()) {
        ++seen.measured;
        const found = contrast(node);
        if (found < 4.5)
            seen.pale.push(`${name(node)} ${node.textContent.slice(0, 20)}: ${found.toFixed(2)}`);
    }
}
seen.errors = window.errorsSeen;
const node = document.createElement('pre');
node.id = 'seen';
node.textContent = JSON.stringify(seen);
(window.parent === window ? document : window.parent.document).body.append(node);
})();
</script>
"""


def check_windows(browser, folder, name, content):
    """What the page looks like in a window, in the dark and on a phone."""
    dark = "--blink-settings=preferredColorScheme=0"
    # 390 pixels are less than a window's least width.
    for kind, width, options in (("light", 1366, []), ("dark", 1366, [dark]), ("phone", 390, []),
                                 ("dark phone", 390, [dark])):
        text = content.replace("<head>", "<head>" + check_report.WATCH, 1)
        text = text.replace("</body>", LOOK + "</body>", 1)
        if width == 390:
            text = ('<body style="margin:0"><iframe style="width:390px;height:4200px;border:0" '
                    f'srcdoc="{html.escape(text)}"></iframe>')
        page = folder / f"look-{name}-looked-at.html"
        page.write_text(text)
        dom, _ = browser.run(page, "--window-size=1366,768", *options, "--dump-dom")
        page.unlink()
        seen = json.loads(Drawing(dom).seen or "{}")
        if not seen:
            check(False, f"{name}, {kind}: the page is seen")
            continue
        check(seen["errors"] == [], f"{name}, {kind}: no script fails: {seen['errors']}")
        check(seen["width"] == seen["wide"] == width,
              f"{name}, {kind}: it is {width} wide: {seen['width']}, {seen['wide']}")
        check(not seen["cut"] and not seen["outside"],
              f"{name}, {kind}: nothing is cut: {seen['cut'][:5]}, {seen['outside'][:5]}")
        check(seen["measured"] > 1000 and not seen["pale"],
              f"{name}, {kind}: texts are legible: {len(seen['pale'])} of {seen['measured']}, "
              f"such as {seen['pale'][:5]}")


def unpacked(text):
    levels = []
    at = 0
    while at < len(text):
        if text[at] == ".":
            at += 1
            levels += [0] * (LETTERS.index(text[at]) + 1)
        else:
            levels.append(LETTERS.index(text[at]))
        at += 1
    return levels


def attention(layer, heads, t):
    """The weights of token t in the mean of some heads, as the page has them: sink, tokens."""
    sink = 1 if layer["sinks"] else 0
    begin = t * (t + 1) // 2 + sink * t
    end = begin + t + 1 + sink
    rows = [[(level / 63) ** 2 for level in unpacked(layer["attention"][h])[begin:end]]
            for h in heads]
    mean = [sum(column) / len(rows) for column in zip(*rows)]
    return (mean[0] if sink else 0), mean[sink:]


def percent(p):
    if p >= 0.0995:
        return f"{100 * p:.0f} %"
    if p >= 0.00095:
        return f"{100 * p:.1f} %"
    return "< 0.1 %" if p > 0 else "0 %"


def near(shown, p):
    """Whether a shown share is p, whichever way its last digit was rounded."""
    return shown in {percent(p * (1 + shift)) for shift in (-3e-3, 0, 3e-3)}


def make_models(program, folder, rng):
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(200)]
    text = " ".join(rng.choices(words, k=30_000))
    (folder / "text.txt").write_text(text)
    run = [program, "tokenize", str(folder / "text.txt"), "--train-vocab", "400", "--out",
           str(folder / "data")]
    subprocess.run(run, check=True, capture_output=True)
    for name, model in MODELS.items():
        config = {"run_dir": str(folder / name), "device": "cpu", "model": model,
                  "batch": {"tokens_per_step": 640}, "optimizer": {"learning_rate": 3e-3},
                  "schedule": {"steps": 20, "warmup_steps": 2}}
        (folder / "config.json").write_text(json.dumps(config))
        done = subprocess.run([program, "train", str(folder / "config.json"), "--data",
                               str(folder / "data")], capture_output=True, text=True, check=False)
        check(done.returncode == 0, f"{name} is trained: {done.stderr}")
    return text


def check_hover(name, data, seen):
    """What the page says of a token at a layer and a head."""
    token = data["tokens"][seen["token"]]
    layer = data["layers"][seen["layer"]]
    where = f"{name}: token {seen['token']}, layer {seen['layer']}, head {seen['head']}"
    check(set(seen["outlined"]) == {seen["token"]}, f"{where}: it is outlined everywhere")
    if token["loss"] is None:
        check("could not expect it" in seen["panel"], f"{where}: nothing before it")
    else:
        check(f"Loss {token['loss']:.2f}: " in seen["panel"] and
              percent(math.exp(-token["loss"])) in seen["panel"], f"{where}: {seen['panel']!r}")
        for _, p in token["expected"]:
            check(percent(p) in seen["panel"], f"{where}: {percent(p)} in {seen['panel']!r}")
    heads = range(len(layer["attention"])) if seen["head"] < 0 else [seen["head"]]
    sink, of = attention(layer, heads, seen["token"])
    check(abs(sink + sum(of) - 1) < 0.2, f"{where}: weights add up to {sink + sum(of)}")
    shown = re.findall(r"(?<=\s)(<? ?[\d.]+ %)", seen["attended"])
    best = sorted((p for p in of if p > 0), reverse=True)[:6]
    check(len(shown) == len(best) + layer["sinks"] and all(map(near, shown, best)),
          f"{where}: {shown} for {best}: {seen['attended']!r}")
    if layer["sinks"]:
        check(near(shown[-1], sink), f"{where}: the sink gets {sink}: {shown[-1]}")
    drawn = [float(n) for n in re.findall(r"-?[\d.]+", seen["norms"])][1::2]
    norms = [of_layer["norm"][seen["token"]] for of_layer in data["layers"]]
    norms.append(data["norm"][seen["token"]])
    # On a logarithmic axis distances are quotients.
    scale = [(math.log(a) - math.log(norms[0])) for a in norms]
    low, high = min(scale), max(scale)
    pixels = drawn[scale.index(low)] - drawn[scale.index(high)]
    for value, y in zip(scale, drawn):
        expected = drawn[scale.index(low)] - pixels * (value - low) / (high - low)
        check(abs(y - expected) < 0.3, f"{where}: a norm is drawn at {y}, not {expected}")
    chosen = sorted([l, e] for l, of_layer in enumerate(data["layers"]) if of_layer["experts"]
                    for e in of_layer["chosen"][seen["token"] * of_layer["each"]:
                                                (seen["token"] + 1) * of_layer["each"]])
    check(sorted(seen["experts"]) == chosen, f"{where}: experts {seen['experts']} for {chosen}")


def check_model(program, browser, folder, name, text, rng):
    page = folder / f"look-{name}.html"
    done = subprocess.run([program, "look", str(folder / name), "--prompt", text[:900], "--out",
                           str(page)], capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"{name}: the page is written: {done.stderr}")
    content = page.read_text()
    check(len(content.encode()) < 2_000_000, f"{name}: less than 2 MB ({len(content)})")
    begin = content.index('id="data">') + len('id="data">')
    data = json.loads(content[begin:content.index("</script>", begin)])
    count, layers = len(data["tokens"]), len(data["layers"])
    check(count == 128 and "the page shows the first 128" in done.stderr,
          f"{name}: 128 tokens: {count}, {done.stderr}")
    places = [[rng.randrange(layers), rng.randrange(-1, 4), t]
              for t in (0, 1, count - 1, *(rng.randrange(count) for _ in range(5)))]
    use = USE.replace("PLACES", json.dumps(places))
    used = folder / f"look-{name}-used.html"
    used.write_text(content.replace("<head>", "<head>" + check_report.WATCH, 1)
                    .replace("</body>", use + "</body>", 1))
    dom, console = browser.run(used, "--window-size=1366,768", "--dump-dom")
    used.unlink()
    check(not console, f"{name}: nothing is written to the console: {console[:3]}")
    drawing = Drawing(dom)
    check(not drawing.external, f"{name}: nothing is loaded: {drawing.external[:3]}")
    if not drawing.seen:
        check(False, f"{name}: the page can be used")
        return
    seen = json.loads(drawing.seen)
    check(seen["errors"] == [], f"{name}: no script fails: {seen['errors']}")
    check(not seen["wide"], f"{name}: the page is not wider than the window")
    check(all(len(view) == count for view in seen["texts"].values()) and
          "".join(seen["texts"]["loss"][1:]) == "".join(t["text"] for t in data["tokens"][1:]),
          f"{name}: the text is there")
    for hover in seen["hovers"]:
        check_hover(name, data, hover)
    check(seen["held"] == [2], f"{name}: a click holds a token: {seen['held']}")
    check(seen["moved"] == [3], f"{name}: an arrow key moves to the next: {seen['moved']}")
    check(all(seen["untouched"]) and seen["kept"] == [3],
          f"{name}: arrow keys with a modifier, on a slider or on a map of heads are not taken: "
          f"{seen['untouched']}, {seen['kept']}")
    check(seen["focused"] == [[True, t] for t in range(4, 4 + len(seen["focused"]))],
          f"{name}: the keyboard reaches each text: {seen['focused']}")
    check(len(seen["focused"]) == 2 + any(of["experts"] for of in data["layers"]),
          f"{name}: texts: {seen['focused']}")
    check(" ".join(seen["layer"].split()) == f"layer 0 (of 0 to {layers - 1})",
          f"{name}: the layer: {seen['layer']!r}")
    check(seen["heads"] == sum(len(of["attention"]) for of in data["layers"]), f"{name}: heads")
    last = len(data["layers"][-1]["attention"]) - 1
    check(f"Layer {layers - 1}, head {last}:" in seen["clicked"], f"{name}: {seen['clicked']!r}")
    check(seen["experts"] == sum(of["experts"] for of in data["layers"]), f"{name}: experts")
    check(seen["map"] == count, f"{name}: the map has a row for each token")
    check_windows(browser, folder, name, content)
    photograph(browser, folder, page)


def photograph(browser, folder, page):
    phone = folder / "phone.html"
    phone.write_text('<body style="margin:0"><iframe style="width:390px;height:4200px;border:0" '
                     f'srcdoc="{html.escape(page.read_text())}"></iframe>')
    for source, kind, options in (
            (page, "light", ["--window-size=1366,2100"]),
            (page, "dark", ["--window-size=1366,2100", "--blink-settings=preferredColorScheme=0"]),
            (phone, "phone", ["--window-size=520,4200"])):
        picture = folder / f"{page.stem}-{kind}.png"
        picture.unlink(missing_ok=True)
        browser.run(source, *options, f"--screenshot={picture.resolve()}")
        check(picture.exists() and picture.stat().st_size > 20_000, f"{picture.name} is written")
    phone.unlink()


def main():
    if len(sys.argv) != 4 or "--help" in sys.argv:
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    program, browser, folder = sys.argv[1], Browser(sys.argv[2]), pathlib.Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    text = make_models(program, folder, rng)
    for name in MODELS:
        check_model(program, browser, folder, name, text, rng)
    print(f"{check_report.passed} passed, {check_report.failed} failed")
    sys.exit(check_report.failed > 0)


if __name__ == "__main__":
    main()
