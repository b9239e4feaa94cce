#!/usr/bin/env python3
"""Runs the commands that README.md and docs/ show, and checks what they name.

    scripts/check_docs.py TRAIN_GPT COMPARE [--list] [PAGE…]        scripts/check-docs.sh calls it

A block of code that holds commands is run by bash, the blocks of a page one after the other in one
folder. The folder has the repository's files, the program, shards in data/quickstart and a short
run in runs/quickstart; what commands write stays in it. Of blocks with lines that begin with "$ "
only these lines are commands. A comment on the lines before a block says what differs:

    <!-- check: skip REASON -->         the block is not run
    <!-- check: set KEY=VALUE … -->     `train` and `sweep` get these settings too, to be short
    <!-- check: replace WORD=TEXT … --> words that stand for something
    <!-- check: before COMMAND -->      runs before the block
    <!-- check: code N -->              the block ends with this exit code

Several of them are divided by semicolons. A block that is only indented is refused if it calls
train_gpt, since it would not be run. Of each page, links to pages, headings and images must
lead somewhere; files of the repository that are named must exist; options of train_gpt must be in
its help, and keys in docs/keys.md. Pictures must be those that scripts/pictures.py draws, and
predictions in docs/running.md those of `train_gpt plan`, which a build with CUDA kernels can say.
The last line that it prints is "N passed, M failed".
"""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SECONDS = 240
# What a line of a block of commands begins with, besides assignments to variables.
COMMANDS = ("train_gpt build/ scripts/ make mpirun docker podman kubectl ssh sbatch torchrun "
            "python3 pip wandb tensorboard source apt-get git lm_eval cat").split()
# Commands before the first block of a page whose blocks need what a later one makes.
BEFORE = {"docs/planning.md": ["cp configs/clusters/h100-dgx.json mine.json"]}
# Options of other programs that the pages name alone.
OTHER_OPTIONS = set("--build-arg --cpus --gpus --shm-size --userns --no-kill --standalone".split())


class Block:
    """A block of code with commands."""

    def __init__(self, page, line, text, comment):
        self.page, self.line = page, line
        self.skip, self.code, self.before, self.settings, self.words = None, 0, [], [], {}
        for clause in (comment or "").split(";"):
            word, _, rest = " ".join(clause.split()).partition(" ")
            if word == "skip":
                self.skip = rest
            elif word == "set":
                self.settings += rest.split()
            elif word == "replace":
                self.words.update(pair.split("=", 1) for pair in rest.split())
            elif word == "before":
                self.before.append(rest)
            elif word == "code":
                self.code = int(rest)
            elif word:
                raise SystemExit(f"error: {self.name()}: unknown word in a comment: {word}")
        self.commands = text
        if re.search(r"^\$ ", text, re.M):
            lines, more = [], False
            for row in text.split("\n"):
                if row.startswith("$ ") or more:
                    lines.append(row.removeprefix("$ "))
                    more = row.endswith("\\")
            self.commands = "\n".join(lines)

    def name(self):
        return f"{self.page}:{self.line}"

    def script(self):
        text = self.commands
        for word, value in self.words.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", value, text)
        return "\n".join(["set -euo pipefail", *self.before, text])


def is_commands(language, text):
    if language in ("sh", "bash", "console"):
        return True
    if language:
        return False
    names = "|".join(re.escape(name) + (r"(?=[\w.])" if name[-1] == "/" else r"(?![\w./-])")
                     for name in COMMANDS)
    return any(re.match(rf"(\$ )?(\w+=\S* )*({names})", line) for line in text.split("\n"))


def blocks_of(page, text):
    pattern = r"(?:<!-- check: ((?:(?!-->).)*)-->\n)?^```(\w*)\n(.*?)^```$"
    blocks = [Block(page, text[:m.start(2)].count("\n") + 1, m[3], m[1])
              for m in re.finditer(pattern, text, re.M | re.S) if is_commands(m[2], m[3])]
    if blocks:
        blocks[0].before = BEFORE.get(page, []) + blocks[0].before
    return blocks


def indented_commands(text):
    """Calls of train_gpt in blocks that are indented and not fenced: paragraphs of such lines."""
    for paragraph in re.split(r"\n[ \t]*\n", without_code(text)):
        lines = [line for line in paragraph.split("\n") if line.strip()]
        if lines and all(line.startswith(("    ", "\t")) for line in lines):
            for line in lines:
                if re.match(r"\s+(\$ )?(\S*/)?train_gpt\s", line):
                    yield f"an indented block, which is not run, calls train_gpt: {line.strip()}"


# --- What pages name ---------------------------------------------------------------------------


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors_of(text):
    """The headings' names in links, as GitHub makes them."""
    found = {}
    for heading in re.findall(r"^#+ (.*)$", without_code(text), re.M):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[name] = found.get(name, 0) + 1
    return set(found) | {f"{name}-{i}" for name, n in found.items() for i in range(1, n)}


def wrong_links(page, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", without_code(text))):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        if not path.exists():
            yield f"{target} leads nowhere"
        elif anchor and anchor not in anchors_of(path.read_text()):
            yield f"{target}: there is no such heading"


def spans_of(text):
    """Code in a page: the spans between backticks, and the blocks."""
    spans = re.findall(r"`([^`]+)`", without_code(text))
    return [" ".join(span.split()) for span in spans]


def wrong_paths(text):
    tops = {path.name for path in ROOT.iterdir()} - {"build", "data", "runs"}
    for span in spans_of(text):
        path = re.match(r"([\w.-]+(?:/[\w.*\-]+)+/?)(?=$| |:)", span)
        if not path or path[1].split("/")[0] not in tops:
            continue
        if re.search(r"\b(NAME|X)\b|X_|X\.", path[1]):  # they stand for a name
            continue
        if not glob.glob(str(ROOT / path[1])) and not glob.glob(str(ROOT / "test" / path[1])):
            yield f"there is no {path[1]}"


def code_of(text):
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)
    lines = [re.sub(r"(^|\s)#.*", "", line)
             for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    return spans_of(text) + lines


def helps_of(program):
    """The options of each command, from its help; under "" those of all commands."""
    def options(*command):
        text = subprocess.run([program, *command, "--help"], capture_output=True, text=True).stdout
        return text, set(re.findall(r"--[a-z][\w-]*", text))

    text, every = options()
    commands = re.findall(r"^  ([a-z]+) ", text, re.M)
    helps = {command: options(command)[1] | {"--help"} for command in commands}
    helps[""] = every.union(*helps.values())
    return helps


def wrong_options(text, helps, others):
    for code in code_of(text):
        called = re.search(r"(?:^|[ /(])train_gpt ([a-z]+)((?: .*)?)$", code)
        if called and called[1] in helps:
            command, rest = called[1], called[2].split(" | ")[0].split(" > ")[0]
            for part in rest.split(" -- "):
                if part.split()[:1] and part.split()[0] in helps:
                    command = part.split()[0]
                for option in re.findall(r"(?<=\s)--[a-z][\w-]*", " " + part):
                    if option not in helps[command]:
                        yield f"train_gpt {command} has no option {option}"
        elif called and code.startswith(("train_gpt", "build/train_gpt")):
            yield f"train_gpt has no command {called[1]}"
        else:
            option = re.match(r"--[a-z][\w-]*", code)
            if option and option[0] not in helps[""] | others:
                yield f"there is no option {option[0]}"


def wrong_keys(text, keys):
    sections = {key.split(".")[0] for key in keys if "." in key}
    files = "md|h|cpp|cu|cuh|json|jsonl|py|sh|txt|log|html|safetensors|bin|old|lock"
    for code in code_of(text):
        for key in re.findall(rf"(?<![\w/.-])((?:{'|'.join(sections)})\.[a-z]\w*)(?![\w/(])",
                              code):
            if key not in keys and not re.search(rf"\.({files})$", key):
                yield f"there is no key {key}"


def wrong_predictions(program, text):
    """The table of predictions in docs/running.md, where the build counts memory of GPUs."""
    rows = re.findall(
        r"^\| ([\w.-]+)( \(2\))? \| ([\d,]+) \| ([\d.]+) GiB \| ([\d,]+) \|", text, re.M)
    for preset, split, gpus, memory, rate in rows:
        command = [program, "plan", preset, "--cluster", "h100-dgx", "--json", "--world",
                   gpus.replace(",", "")] + (["--set", "parallel.zero=2"] if split else [])
        found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
        now = found["memory_bytes"]["total"] / 2**30, found["tokens_per_second_per_gpu"]
        for told, is_now in zip((float(memory), float(rate.replace(",", ""))), now):
            if abs(told / is_now - 1) > 0.02:
                yield f"{preset} on {gpus}: {told:g} is told, and {is_now:.4g} predicted"
    if not rows:
        yield "the table of predictions is not found"


# --- Commands ----------------------------------------------------------------------------------


class Folder:
    """Where the commands run."""

    def __init__(self, program, compare):
        self.held = tempfile.TemporaryDirectory()
        self.path = Path(self.held.name)
        for entry in ROOT.iterdir():
            if entry.name not in ("build", "data", "runs", ".git"):
                (self.path / entry.name).symlink_to(entry)
        for name in ("build", "data", "runs", "bin"):
            (self.path / name).mkdir()
        wrapper = (f'#!/bin/bash\nsettings=()\nfor word; do case $word in train | sweep)\n'
                   f'    for s in $DOCS_SET; do settings+=(--set "$s"); done; break;; esac; done\n'
                   f'exec "{program}" "$@" "${{settings[@]}}"\n')
        for name in ("build/train_gpt", "bin/train_gpt"):
            (self.path / name).write_text(wrapper)
        # `make compare`, the only target that is not skipped, has been made.
        (self.path / "bin/make").write_text('#!/bin/sh\n[ "$*" = compare ]\n')
        for name in ("build/train_gpt", "bin/train_gpt", "bin/make"):
            (self.path / name).chmod(0o755)
        (self.path / "build/compare").symlink_to(compare)

    def run(self, script, settings=(), seconds=BLOCK_SECONDS):
        """The exit code and the output."""
        environment = dict(
            os.environ, PATH=f"{self.path}/bin:{os.environ['PATH']}", LC_ALL="C.UTF-8", TERM="dumb",
            DOCS_SET=" ".join(settings), OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(["bash", "-c", script], cwd=self.path, env=environment,
                                       stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                       start_new_session=True)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = f"none: it ran longer than {seconds} s"
            output.seek(0)
            return code, output.read()

    def prepare(self):
        """What a reader has who follows README: shards, and a run with a checkpoint."""
        code, output = self.run(
            "set -e\n"
            "build/train_gpt tokenize README.md docs/*.md --train-vocab 4096 --val-fraction 0.2 "
            "--out data/quickstart\n"
            "build/train_gpt train quickstart --set batch.tokens_per_step=128 "
            "--set model.n_layer=1 "
            "--set model.n_embd=64 "
            "--set checkpoint.every=240 --set evaluation.every=0 --set sampling.every=0 "
            "--set evaluation.max_tokens=2000 --set log.every=20\n")
        if code != 0:
            raise SystemExit(f"{output}\nerror: preparing a run ended with exit code {code}")


def main():
    words = [word for word in sys.argv[1:] if word != "--list"]
    only_list = len(words) < len(sys.argv) - 1
    program, compare, *pages = words
    program, compare = os.path.abspath(program), os.path.abspath(compare)
    os.chdir(ROOT)
    pages = pages or ["README.md", "CHANGELOG.md", *sorted(glob.glob("docs/*.md"))]
    texts = {page: Path(page).read_text() for page in pages if Path(page).exists()}
    blocks = {page: blocks_of(page, text) for page, text in texts.items()}
    if only_list:
        for block in sum(blocks.values(), []):
            how = f"not run: {block.skip}" if block.skip else "run"
            print(f"{block.name()}: {how}")
        return
    passed, failures = 0, []

    def checked(name, problems):
        nonlocal passed
        problems = sorted(set(problems))
        for problem in problems:
            print(f"{name}: {problem}")
        if problems:
            failures.append(name)
        else:
            passed += 1

    helps = helps_of(program)
    others = set(OTHER_OPTIONS)
    for script in sorted(glob.glob("scripts/*.sh") + glob.glob("scripts/cluster/*.sh")
                         + glob.glob("scripts/*.py")):
        others |= set(re.findall(r"--[a-z][\w-]*", Path(script).read_text()))
    if os.access(compare, os.X_OK):
        text = subprocess.run([compare, "--help"], capture_output=True, text=True).stdout
        others |= set(re.findall(r"--[a-z][\w-]*", text))
    keys = set(re.findall(r"^\| `([\w.]+)` ", Path("docs/keys.md").read_text(), re.M))
    for page, text in texts.items():
        checked(f"{page}: links", wrong_links(page, text))
        checked(f"{page}: blocks of commands", indented_commands(text))
        checked(f"{page}: files of the repository", wrong_paths(text))
        checked(f"{page}: options", wrong_options(text, helps, others))
        if page != "docs/keys.md":  # it also has names of earlier versions
            checked(f"{page}: keys", wrong_keys(text, keys))

    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    if "docs/running.md" not in texts:
        pass
    elif re.search(r"^CUDA +not in", version, re.M):
        print("skipped: predictions in docs/running.md, which need a build with CUDA kernels")
    else:
        checked("docs/running.md: predictions",
                wrong_predictions(program, texts["docs/running.md"]))

    if "docs/design.md" in texts:
        drawn = subprocess.run([sys.executable, "scripts/pictures.py", "--check"],
                               capture_output=True, text=True,
                               env=dict(os.environ, TRAIN_GPT=program))
        checked("docs/images: pictures", [drawn.stdout + drawn.stderr] if drawn.returncode else [])

    folder = Folder(program, compare)
    prepared = False
    for block in sum(blocks.values(), []):
        missing = [tool for tool in ("mpirun", "cmp", "python3")
                   if re.search(rf"(^|\s){tool} ", block.commands, re.M) and not shutil.which(tool)]
        if block.skip or missing:
            print(f"skipped: {block.name()}, {block.skip or 'there is no ' + missing[0]}")
            continue
        if not prepared:
            folder.prepare()
            prepared = True
        start = time.monotonic()
        code, output = folder.run(block.script(), block.settings)
        print(f"{block.name()}: {time.monotonic() - start:.0f} s", flush=True)
        problem = [] if code == block.code else [f"{output[-3000:]}\nexit code {code}"]
        checked(f"{block.name()}: commands", problem)
    for failure in failures:
        print(f"failed: {failure}")
    print(f"{passed} passed, {len(failures)} failed")
    sys.exit(1 if failures else 0)


main()
