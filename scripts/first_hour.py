"""What scripts/first_hour.sh runs: finds the programs and the GPU, runs the parts within the time,
and writes the report."""
import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from first_hour_parts import PARTS, Skipped, targets

START = time.monotonic()
LEAST_PIECE = 2  # minutes: of the time of a part that keeps what it has measured
TIME_IS_UP = 75  # the exit code that also means "run the same command again" in train_gpt
PROGRAMS = ("train_gpt", "test", "compare")


def seconds_since(start):
    return time.monotonic() - start


def give_up(sentence, code=1):
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(code)


def output_of(*command, environment=None, timeout=60):
    """What a command prints, stdout and stderr; None if it fails."""
    try:
        run = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             errors="replace", env=environment, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None


# --- Programs and machine -------------------------------------------------------------------------

def build(folder):
    """Builds the programs into build/. Returns what went wrong, if anything did."""
    log = folder / "build.log"
    print(f"== building the programs, which takes minutes ({log})", flush=True)
    try:
        with open(log, "w") as file:
            # A make that runs this script shares its processes through open files.
            made = subprocess.run(
                [os.environ.get("MAKE", "make"), *(f"build/{name}" for name in PROGRAMS)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, close_fds=False)
    except OSError as error:
        return str(error)
    lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
    return (None if made.returncode == 0
            else next((line for line in lines if "error" in line.lower()), lines[-1]))


def pythons():
    """Those that may have PyTorch, or NVIDIA's libraries, as packages."""
    return filter(
        None, [os.environ.get("PYTHON"), "build/venv/bin/python", "python3", "/usr/bin/python3"])


def library_folders(python):
    """The folders of the libraries that NVIDIA's packages have installed for a Python: CUDA's,
    cuDNN's, NCCL's."""
    asked = ("import importlib.util, pathlib; found = importlib.util.find_spec('nvidia'); "
             "[print(lib) for base in (found.submodule_search_locations if found else []) for lib "
             "in sorted(pathlib.Path(base).glob('*/lib'))]")
    return (output_of(python, "-c", asked) or "").splitlines()


def add_libraries(environment, *folders, first=False):
    """Makes folders known to the loader, before or after those that it already knows."""
    known = [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    new = [folder for folder in folders if folder and folder not in known]
    if new:
        environment["LD_LIBRARY_PATH"] = ":".join(new + known if first else known + new)


def find_programs(options):
    """The folder of the programs."""
    if options.programs:
        if not (options.programs / "train_gpt").exists():
            give_up(f"there is no train_gpt in --programs {options.programs}")
        return options.programs
    bundle, built = pathlib.Path("build/bundle"), pathlib.Path("build")
    commit = output_of("git", "describe", "--always", "--dirty", "--tags")
    if (bundle / "test").exists():
        version = (output_of(bundle / "train_gpt", "--version") or "\n").splitlines()[0]
        if version and (commit is None or version.split()[-1] == commit.strip()):
            return bundle
        print(f"build/bundle is left out: it is {version or 'not able to start'}, and this is "
              f"{(commit or 'unknown').strip()}")
    if (not options.simulator and output_of("nvidia-smi", "-L") is None and
                not pathlib.Path("/dev/nvidiactl").exists()):
        give_up(no_gpu("neither nvidia-smi nor /dev/nvidiactl is here"))
    problem = build(options.folder)
    if problem is None:
        return built
    for folder in (built, bundle):
        if output_of(folder / "train_gpt", "--version"):
            print(f"the programs could not be built ({problem}): those in {folder} are used, which "
                  "may be older")
            return folder
    give_up(f"the programs could not be built ({problem}), and there is no {bundle}; `make bundle "
            "TESTS=1` makes one on another machine")


def no_gpu(reason):
    return (f"there is no GPU to measure: {reason}; GPUSIM=folder of the simulator's libraries "
            "tries this script without one")


class Machine:
    """The programs, the GPU and what they can be compared with."""

    def __init__(self, options, folder):
        self.programs = {name: str((folder / name).resolve()) for name in PROGRAMS
                         if (folder / name).exists()}
        self.train_gpt = self.programs["train_gpt"]
        self.environment = dict(os.environ, GPUSIM="", SIMULATED="", MEMCHECK="")
        for variable, name in (("TRAIN_GPT", "train_gpt"), ("COMPARE", "compare")):
            if name in self.programs:
                self.environment[variable] = self.programs[name]
        self.version = output_of(self.train_gpt, "--version", environment=self.environment)
        if self.version is None:
            give_up(
                f"{folder}/train_gpt does not start here; `{folder}/train_gpt --version` says why")
        self.gpus = re.findall(r"^GPU \d+\s+(.*)$", self.version, re.MULTILINE)
        if not self.gpus:
            cuda = re.search(r"^CUDA .*$", self.version, re.MULTILINE)
            said = " ".join(cuda.group(0).split()) if cuda else "it does not name CUDA"
            give_up(no_gpu(f"{folder}/train_gpt finds none ({said})"))
        self.simulated = "gpusim" in self.gpus[0]
        digest = hashlib.sha256()
        for path in self.programs.values():
            digest.update(pathlib.Path(path).read_bytes())
        self.key = {"programs": digest.hexdigest()[:16], "gpu": self.gpus[0],
                    "simulated": self.simulated}
        self.python, self.torch = self.find_torch()
        self.description = self.describe()

    def find_torch(self):
        """A Python whose PyTorch sees the GPU, and that version. The libraries that came with it
        are made known to the programs."""
        asked = "import torch; assert torch.cuda.is_available(); print(torch.__version__)"
        for python in pythons():
            version = output_of(python, "-c", asked, timeout=120)
            if version:
                add_libraries(self.environment, *library_folders(python))
                return python, version.split()[-1]
        return None, None

    def describe(self):
        """Lines of Markdown."""
        lines = [
            f"- {datetime.date.today()}; commit and libraries as `train_gpt --version` gives them:",
            "", "```", self.version.strip(), "```", ""]
        smi = output_of("nvidia-smi",
                        "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm",
                        "--format=csv")
        lines += ["- nvidia-smi: " + "; ".join(smi.strip().splitlines())] if smi else []
        lines += [f"- PyTorch: {self.torch} ({self.python})" if self.torch
                  else "- PyTorch with CUDA: not found"]
        for tool in ("compute-sanitizer", "ncu", "nsys", "mpirun"):
            said = (output_of(tool, "--version") or "").splitlines()
            lines.append(f"- {tool}: " + next(
                (line.strip() for line in said if re.search(r"\d+\.\d+", line)), "not found"))
        return lines


# --- Running parts --------------------------------------------------------------------------------

class Work:
    """One part while it runs: its commands within its time limit, and what it found."""

    def __init__(self, hour, part):
        self.machine, self.folder, self.tiny = hour.machine, hour.folder, hour.machine.simulated
        self.again = hour.options.again
        self.log = hour.folder / "logs" / f"{part.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.minutes = min(hour.limit(part), hour.minutes_left())
        self.end = time.monotonic() + 60 * self.minutes
        self.is_cut = self.minutes < hour.limit(part)
        self.timed_out, self.problem = False, None
        self.commands, self.lines, self.data = [], [], {}

    def program(self, name):
        if name not in self.machine.programs:
            raise Skipped(
                f"{name} is not among the programs; `make bundle TESTS=1` adds it to a bundle")
        return self.machine.programs[name]

    def need(self, tool):
        if shutil.which(tool) is None:
            raise Skipped(f"{tool} is not installed")

    def run(self, *command, environment=None, until=None):
        """What a command prints (stdout and stderr). It is ended when the part's time is over, or
        when a line matches `until`. A command that fails, or has no time left, is the part's
        problem; the first of these is kept."""
        command = [str(word) for word in command]
        variables = environment or {}
        self.commands.append(" ".join([f"{name}={value}" for name, value in variables.items()] +
                                      [shortened(word) for word in command]))
        if self.timed_out:
            return ""
        begin = self.log.stat().st_size
        with open(self.log, "ab") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**self.machine.environment, **variables}, preexec_fn=os.setpgrp)
        enough = False
        try:
            while process.poll() is None and not enough and time.monotonic() < self.end:
                time.sleep(0.05)
                enough = (until is not None and
                          re.search(until, self.text_from(begin), re.MULTILINE) is not None)
            late = process.poll() is None and not enough
        finally:
            end_group(process, patient=not enough)
        text = self.text_from(begin)
        if late:
            self.timed_out = True
            self.problem = self.problem or (
                f"stopped after {self.minutes:.1f} minutes, at the end of this call's time"
                if self.is_cut else f"stopped at its limit of {self.minutes:g} minutes")
        elif process.returncode != 0 and not enough:
            last = (text.strip() or "no message").splitlines()[-1]
            self.problem = (self.problem or f"{pathlib.Path(command[0]).name} ended with exit code "
                                            f"{process.returncode}: {last}")
        return text

    def text_from(self, begin):
        with open(self.log, "rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")


def shortened(word):
    """A word of a command as a report shows it: relative to this folder, and quoted where the shell
    needs it."""
    word = word.replace(os.getcwd() + "/", "")
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word + "'"


def end_group(process, patient):
    """Ends a process and those that it started; with patience, they get ten seconds to clean up."""
    for number, seconds in ((signal.SIGTERM, 10 if patient else 0), (signal.SIGKILL, 10)):
        if process.poll() is not None and number == signal.SIGTERM:
            continue
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=seconds)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            pass
    process.wait()


class Hour:
    """All parts, and what became of them, now and in earlier calls."""

    def __init__(self, options, machine):
        self.options, self.machine, self.folder = options, machine, options.folder
        self.file = self.folder / "results.json"
        kept = read_results(self.folder)
        if kept and kept.get("key") != machine.key:
            self.set_aside()
            kept = None
        self.parts = kept["parts"] if kept else {}
        self.save()

    def save(self):
        write(self.file, json.dumps({"key": self.machine.key, "parts": self.parts}, indent=1))

    def limit(self, part):
        return part.minutes * self.options.limits

    def minutes_left(self):
        """What is left of this call's time, less what it takes to end a part."""
        return (float("inf") if self.options.minutes is None
                else self.options.minutes - (seconds_since(START) + 5) / 60)

    def fits(self, part):
        return self.minutes_left() >= (min(self.limit(part), LEAST_PIECE * self.options.limits)
                                       if part.keeps else self.limit(part))

    def set_aside(self):
        """Moves the results of other programs or another GPU into a folder of their own."""
        n = 1
        while (self.folder / f"earlier-{n}").exists():
            n += 1
        old = self.folder / f"earlier-{n}"
        old.mkdir()
        for path in list(self.folder.iterdir()):
            if not path.name.startswith("earlier-") and path.name != "build.log":
                path.rename(old / path.name)
        print(f"the results of other programs or another GPU are now in {old}")

    def status(self, part):
        return self.parts.get(part.name, {}).get("status", "to do")

    def due(self):
        """The parts to run: new ones first, then those that failed or ran out of time."""
        wanted = [part for part in PARTS if not self.options.only or part.name in self.options.only]
        if self.options.again:
            return wanted
        wanted = [part for part in wanted if self.status(part) != "done"]
        return sorted(wanted, key=lambda part: self.status(part) in ("failed", "timed out"))

    def go(self):
        """Runs the parts that are due. Returns those that did not fit into the time."""
        left = []
        for part in self.due():
            if self.fits(part):
                self.run(part)
            if self.status(part) in ("to do", "time is up"):
                left.append(part)
        self.write_report()
        return left

    def run(self, part):
        print(f"== {seconds_since(START):3.0f} s: {part.name}: {part.title} (at most "
              f"{self.limit(part):g} minutes)", flush=True)
        start, work = time.monotonic(), Work(self, part)
        try:
            part.run(work)
            status = (("time is up" if work.is_cut else "timed out") if work.timed_out
                      else "failed" if work.problem else "done")
        except Skipped as reason:
            status, work.problem = "skipped", str(reason)
        except Exception as error:
            # A part that meets what it does not expect must not take the others with it.
            status, work.problem = "failed", work.problem or f"{type(error).__name__}: {error}"
        self.parts[part.name] = {"status": status, "problem": work.problem,
                                 "seconds": round(seconds_since(start), 1),
                                 "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
                                 "commands": work.commands, "lines": work.lines, "data": work.data}
        print(f"   {status}{': ' + work.problem if work.problem else ''} "
              f"({seconds_since(start):.0f} s)", flush=True)
        self.save()
        self.write_report()

    def write_report(self):
        lines = ["# The first hour on a GPU", "", *self.machine.description, ""]
        if self.machine.simulated:
            lines += ["The GPU is simulated and sizes are tiny: speeds mean nothing.", ""]
        for part in PARTS:
            found = self.parts.get(part.name)
            lines += [f"## {part.title} ({part.name})", ""]
            if not found:
                lines += ["Not run yet.", ""]
                continue
            lines += [f"{found['status']}{': ' + found['problem'] if found['problem'] else ''}; "
                      f"{found['seconds']} s, {found['date']}", ""]
            lines += ["```", *found["commands"], "```", ""] if found["commands"] else []
            lines += [*found["lines"], ""] if found["lines"] else []
        lines += ["## Targets", "", "| target | measured | |", "|---|---|---|"]
        lines += [f"| {target.text} | {target.measured} | {target.verdict} |"
                  for target in self.targets()]
        write(self.folder / "report.md", "\n".join(lines) + "\n")

    def targets(self):
        return targets(self.parts, self.folder, self.machine.simulated)


def write(path, text):
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def read_results(folder):
    path = folder / "results.json"
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        give_up(f"{path} is damaged ({error}); remove it to begin anew")


def list_parts(folder):
    parts = (read_results(folder) or {"parts": {}})["parts"]
    for part in PARTS:
        print(f"{part.name:14} {part.minutes:2} min  "
              f"{parts.get(part.name, {}).get('status', 'to do'):10} {part.title}")


def parse():
    parser = argparse.ArgumentParser(prog="scripts/first_hour.sh", add_help=False)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--limits", type=float, default=1)
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/first-hour"))
    parser.add_argument("--programs", type=pathlib.Path)
    options = parser.parse_args()
    options.simulator = os.environ.get("GPUSIM")
    if options.simulator and not list(pathlib.Path(options.simulator).glob("libcudart.so*")):
        give_up(f"GPUSIM={options.simulator} has no libcudart.so; it must be the folder of the "
                "simulator's libraries", 2)
    return options


def interrupt(*_):
    raise KeyboardInterrupt


def main():
    options = parse()
    if options.list:
        return list_parts(options.folder)
    signal.signal(signal.SIGTERM, interrupt)
    # The toolkit's programs are often not in PATH.
    os.environ["PATH"] += "".join(
        f":{home}/bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home)
    options.folder.mkdir(parents=True, exist_ok=True)
    add_libraries(os.environ, options.simulator, first=True)
    for python in pythons():
        if folders := library_folders(python):
            add_libraries(os.environ, *folders)
            break
    hour = Hour(options, Machine(options, find_programs(options)))
    left = hour.go()
    print()
    for target in hour.targets():
        print(f"{target.verdict:12} {target.text}: {target.measured}")
    print(f"\nthe report is {options.folder}/report.md")
    if left:
        print(f"left for want of time: {', '.join(part.name for part in left)}. The same command "
              f"continues; a part that needs {max(map(hour.limit, left)):g} minutes at a time "
              f"needs --minutes {max(map(hour.limit, left)) + 1:g}.")
        return TIME_IS_UP
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    return 1 if any(hour.status(part) in ("failed", "timed out") for part in chosen) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
