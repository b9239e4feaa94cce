#!/usr/bin/env python3
"""Reads the event files of runs with the tensorboard package.             needs: tensorboard

    scripts/check_tensorboard.py TRAIN_GPT

Scalars, texts and hyperparameters must be those of the run's metrics.jsonl, output and config.json,
as TensorBoard's own server gives them to a browser; also after a run was killed and resumed, and
for a TensorBoard that was reading all the time. The last line that it prints is "N passed, M
failed".
"""
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.parse
import urllib.request
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata as hparams

SCALARS = {"loss": "train/loss", "grad_norm": "train/grad_norm",
           "learning_rate": "train/learning_rate", "ms": "speed/ms_per_step",
           "tokens_per_second": "speed/tokens_per_second", "val_loss": "validation/loss",
           "val_bits_per_byte": "validation/bits_per_byte", "loss/a": "sources/loss/a",
           "loss/b": "sources/loss/b"}
DEADLINE = 60  # seconds


class Checks:
    """Each method whose name begins with check_ is one check."""

    def __init__(self, program, folder, seed):
        self.program, self.folder, self.random = (Path(program).resolve(), Path(folder),
                                                  random.Random(seed))
        words = ["".join(self.random.choices("abcdefgh", k=self.random.randint(2, 6)))
                 for _ in range(50)]
        text = self.folder / "text.txt"
        text.write_text(
            "".join(" ".join(self.random.choices(words, k=8)) + ".\n" for _ in range(1500)))
        subprocess.run([self.program, "tokenize", text, "--train-vocab", "300",
                        "--out", self.folder / "data"], check=True, capture_output=True)
        data = f"{self.folder}/data"
        self.config = self.folder / "config.json"
        self.config.write_text(json.dumps({
            "run_dir": str(self.folder / "runs/one"), "seed": self.random.randrange(1 << 30),
            "device": "cpu", "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_ctx": 32},
            "tokenizer": {"path": f"{data}/tokenizer.json"},
            "data": {"train": [{"glob": f"{data}/train_*.bin", "weight": 1, "name": "a"},
                               {"glob": f"{data}/val_*.bin", "weight": 1, "name": "b"}],
                     "val": f"{data}/val_*.bin"},
            "batch": {"tokens_per_step": 256, "micro_batch": 4, "sequence_length": 32},
            "schedule": {"steps": 1000000}, "evaluation": {"every": 5, "max_tokens": 500},
            "checkpoint": {"every": 5},
            "sampling": {"every": 10, "max_tokens": 8, "prompt": "ab"}}))
        self.run_dir = self.folder / "runs/one"

    def command(self, *more):
        return [self.program, "train", self.config, *more]

    def train(self, *more):
        done = subprocess.run(self.command(*more), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done
        return done.stdout

    def kill_at(self, step):
        """Runs until the step is done, and kills the run somewhere after it."""
        with subprocess.Popen(self.command(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True) as run:
            for line in run.stdout:
                if line.startswith(f"step {step}/"):
                    time.sleep(self.random.random() / 20)
                    run.send_signal(signal.SIGKILL)

    def event_file(self):
        files = list(self.run_dir.glob("*tfevents*"))
        assert len(files) == 1, files
        return files[0]

    def metrics(self):
        """The values of each field that is shown, as (step, value), from metrics.jsonl."""
        values = {}
        for line in (self.run_dir / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            for field, tag in SCALARS.items():
                if field in record:
                    values.setdefault(tag, []).append((record["step"], record[field]))
        return values

    def assert_same(self, shown):
        """shown: by tag, (step, value)."""
        wanted = self.metrics()
        assert set(wanted) <= set(shown), (sorted(wanted), sorted(shown))
        for tag, values in wanted.items():
            assert [step for step, _ in shown[tag]] == [step for step, _ in values], (
                tag, shown[tag], values)
            for (step, ours), (_, theirs) in zip(values, shown[tag]):
                assert abs(ours - theirs) <= 1e-6 * abs(ours), (tag, step, ours, theirs)

    @contextlib.contextmanager
    def server(self):
        """TensorBoard's server on the folder of runs; gives a function that fetches a path."""
        log = self.folder / "server.log"
        with open(log, "w") as out:
            server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", "--logdir",
                                       self.folder / "runs", "--port", "0", "--samples_per_plugin",
                                       "scalars=100000,text=1000", "--reload_interval", "1"],
                                      stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + DEADLINE
            while not (found := re.search(r"http://localhost:(\d+)", log.read_text())):
                assert server.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)

            def fetch(path, **arguments):
                url = (f"http://localhost:{found.group(1)}/data/plugin/{path}"
                       f"?{urllib.parse.urlencode(arguments)}")
                with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
                    return json.load(answer)
            yield fetch
        finally:
            server.kill()
            server.wait()

    @staticmethod
    def eventually(check):
        """TensorBoard reads files again every second or so."""
        end = time.monotonic() + DEADLINE
        while True:
            try:
                return check()
            except (AssertionError, KeyError, OSError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def scalars(self, fetch):
        tags = fetch("scalars/tags")["one"]
        return {
            tag: [(step, value) for _, step, value in fetch("scalars/scalars", run="one", tag=tag)]
            for tag in tags}

    def check_browser(self):
        out = self.train("--stop-at", "23")
        with self.server() as fetch:
            self.eventually(lambda: self.assert_same(self.scalars(fetch)))
            shares = [tag for tag in self.scalars(fetch) if tag.startswith("time/")]
            assert sorted(shares) == [f"time/{part}_share"
                                      for part in ("communication", "compute", "data_wait",
                                                   "optimizer")], shares
            config = self.eventually(lambda: fetch("text/text", run="one", tag="config"))
            assert (len(config) == 1 and "<pre><code>" in config[0]["text"] and
                    '"seed": ' in config[0]["text"]), config
            samples = fetch("text/text", run="one", tag="samples")
            assert [sample["step"] for sample in samples] == [10, 20], samples
            assert all("ab" in sample["text"] for sample in samples), samples
            assert out.count("--- sample\n") == 2, out
            sessions = fetch("hparams/experiment", request="{}")
            names = {info["name"] for info in sessions["hparamInfos"]}
            assert {"optimizer.learning_rate", "model.n_layer", "data.train",
                    "log.tensorboard"} <= names, sorted(names)

    def check_records(self):
        self.train("--stop-at", "3")
        values = {}
        for event in EventFileLoader(str(self.event_file())).Load():
            for value in event.summary.value:
                values.setdefault(value.tag, []).append(value)
        config = json.loads((self.run_dir / "config.json").read_text())
        text = values["config"][0].tensor.string_val[0].decode()
        assert json.loads("\n".join(line[4:] for line in text.split("\n"))) == config, text
        assert values["config"][0].metadata.plugin_data.plugin_name == "text"
        start = hparams.parse_session_start_info_plugin_data(
            values[hparams.SESSION_START_INFO_TAG][0].metadata.plugin_data.content)
        assert start.hparams["optimizer.learning_rate"].number_value == config["optimizer"][
            "learning_rate"]
        assert start.hparams["device"].string_value == "cpu"
        assert start.hparams["data.document_mask"].HasField("bool_value")

    def check_resumed(self):
        for step in (self.random.randint(6, 18), self.random.randint(22, 30)):
            self.kill_at(step)
            # What a kill in the middle of a write leaves.
            with open(self.event_file(), "ab") as file:
                file.write(self.event_file().read_bytes()[:self.random.randint(0, 60)])
        self.train("--stop-at", "41")
        with self.server() as fetch:
            self.eventually(lambda: self.assert_same(self.scalars(fetch)))

    def check_watched(self):
        self.train("--stop-at", "12")
        with self.server() as fetch:
            self.eventually(lambda: self.assert_same(self.scalars(fetch)))
            self.train("--stop-at", "15")  # the same file, continued
            self.eventually(lambda: self.assert_same(self.scalars(fetch)))
            self.kill_at(23)
            self.train("--stop-at", "31")  # another file, in which the steps after 20 come again
            self.eventually(lambda: self.assert_same(self.scalars(fetch)))


def main():
    seed = int(os.environ.get("TEST_SEED", random.randrange(1 << 32)))
    print(f"TEST_SEED={seed} repeats this run's random inputs")
    passed = failed = 0
    for name in [name for name in dir(Checks) if name.startswith("check_")]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                getattr(Checks(sys.argv[1], folder, seed), name)()
                passed += 1
            except Exception:  # pylint: disable=broad-exception-caught
                print(f"FAILED: {name}")
                traceback.print_exc(limit=-3, file=sys.stdout)
                failed += 1
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
