#!/usr/bin/env python3
"""Checks scripts/parquet.py with random Parquet files.             needs: pyarrow

    scripts/check_parquet.py TRAIN_GPT

The lines that parquet.py prints must be the rows that were written, whatever the layout of the files, and must give the same shards
as JSON Lines of the same texts. Its memory must stay bounded, and each error must be one sentence. The last line that it prints is
"N passed, M failed".
"""
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import pyarrow as pa
import pyarrow.parquet as pq

SCRIPT = Path(__file__).with_name("parquet.py")
ALPHABET = "abcdefgh    \n\t\"\\\u00e9\u4e2d\U0001f600\u2028\x00\x7f"

PEAK_OF = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


class Checks:
    """Each method whose name begins with check_ is one check."""

    def __init__(self, program, folder, seed):
        self.program, self.folder, self.random = Path(program).resolve(), Path(folder), random.Random(seed)

    def text(self, most):
        return "".join(self.random.choices(ALPHABET, k=self.random.randint(0, most)))

    def texts(self, count, most=300):
        return [None if self.random.random() < 0.05 else self.text(most) for _ in range(count)]

    def write(self, name, texts, kind=None, field="text", **layout):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        column = pa.array(texts, kind or pa.string())
        table = pa.table({"id": list(range(len(texts))), field: column, "tags": [["a", "b"]] * len(texts)})
        pq.write_table(table, path, **layout)
        return path

    def run(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, check=False)

    def rows(self, *arguments, field="text"):
        done = self.run(*arguments)
        if done.returncode:
            raise ValueError(done.stderr.decode())
        found = [json.loads(line) for line in done.stdout.decode().split("\n")[:-1]]
        assert all(list(row) == [field] for row in found), "a line with other fields"
        return [row[field] for row in found]

    def refused(self, *arguments):
        done = self.run(*arguments)
        message = done.stderr.decode()
        assert done.returncode == 1, f"exit code {done.returncode}: {message}"
        assert message.startswith("error: ") and message.count("\n") == 1, f"not one sentence: {message}"
        return message

    def check_rows_and_their_order_for_every_layout(self):
        kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
        for compression in ("none", "snappy", "gzip", "zstd"):
            texts = self.texts(self.random.randint(0, 4000))
            path = self.write("layout.parquet", texts, self.random.choice(kinds), compression=compression,
                              row_group_size=self.random.randint(1, 3000), data_page_size=self.random.randint(100, 100_000),
                              data_page_version=self.random.choice(["1.0", "2.0"]))
            assert self.rows(path) == [text for text in texts if text is not None], compression

    def check_files_patterns_and_folders_in_their_order(self):
        parts = [self.texts(50) for _ in range(4)]
        for name, part in zip(("set/a.parquet", "set/b.parquet", "set/deep/c.parquet", "other.parquet"), parts):
            self.write(name, part, field="body")
        (self.folder / "set/notes.txt").write_text("no Parquet")
        kept = [[text for text in part if text is not None] for part in parts]
        found = self.rows(self.folder / "other.parquet", self.folder / "set/*.parquet", "--field", "body", field="body")
        assert found == kept[3] + kept[0] + kept[1]
        assert self.rows(self.folder / "set", "--field", "body", field="body") == kept[0] + kept[1] + kept[2]
        assert f"{sum(map(len, kept[:3]))} texts from 3 files" in self.run(self.folder / "set", "--field=body").stderr.decode()

    def check_hidden_entries_are_left_out_and_counted(self):
        for name in ("shown/a.parquet", "shown/._a.parquet", "shown/.git/b.parquet", "shown/deep/.c.parquet"):
            self.write(name, [name])
        assert self.rows(self.folder / "shown") == ["shown/a.parquet"]
        assert "3 of the folders' entries were left out" in self.run(self.folder / "shown").stderr.decode()
        assert self.rows(self.folder / "shown/._a.parquet") == ["shown/._a.parquet"]

    def check_links_that_lead_nowhere_or_back_are_refused(self):
        self.write("linked/a.parquet", ["a"])
        for name, target, words in (("b.parquet", "gone.parquet", "dangling"), ("b.parquet", "b.parquet", "leads back"),
                                    ("deep", "../linked", "a folder that it lies in")):
            link = self.folder / "linked" / name
            link.symlink_to(target)
            assert words in self.refused(self.folder / "linked")
            assert words in self.refused(link if name != "deep" else link.parent)
            assert name == "deep" or words in self.refused(self.folder / "linked/*.parquet")
            link.unlink()

    def check_what_downloads_leave_is_named(self):
        pointer = self.folder / "pointer.parquet"
        pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
        assert "is a Git LFS pointer" in self.refused(pointer)
        self.write("datasets--x/snapshots/1/a.parquet", ["a"])
        (self.folder / "datasets--x/blobs").mkdir()
        assert "datasets--x/snapshots/1" in self.refused(self.folder / "datasets--x")
        assert self.rows(self.folder / "datasets--x/snapshots/1") == ["a"]

    def check_columns_that_hold_no_strings_are_refused_with_those_that_do(self):
        path = self.write("columns.parquet", ["x"])
        for field in ("body", "id", "tags", "tags.element"):
            message = self.refused(path, "--field", field)
            assert str(path) in message and f'"{field}"' in message and message.endswith("strings are: text; name one "
                                                                                         "with --field\n"), message
        assert "list<" in self.refused(path, "--field", "tags")
        pq.write_table(pa.table({"text": [b"bytes"]}), path)
        assert "no column of strings" in self.refused(path)

    def check_what_is_no_whole_parquet_file_is_one_sentence(self):
        path = self.write("whole.parquet", self.texts(5000), row_group_size=500)
        whole = path.read_bytes()
        good = self.write("good.parquet", ["kept"])
        for cut in (0, 3, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            assert str(path) in self.refused(good, path)
        # Bytes changed inside the file are noticed when they are read, if at all.
        path.write_bytes(whole[:len(whole) // 2] + bytes(4000) + whole[len(whole) // 2 + 4000:])
        assert "is damaged" in self.refused(good, path)
        self.tokenize(good, "vocabulary", "--train-vocab", "257", "--val-fraction", "0", refused="is a Parquet file")
        (self.folder / "a.txt").write_text("some text")
        self.tokenize(self.folder / "a.txt", "vocabulary", "--train-vocab", "257", "--val-fraction", "0")
        cut = self.run(good, path).stdout
        self.tokenize("-", "cut", "--field", "text", "--tokenizer", self.folder / "vocabulary", stdin=cut,
                      refused="is not valid JSON")
        assert not (self.folder / "cut/data.json").exists()
        assert "is not a file" in self.refused(self.folder / "none.parquet")
        (self.folder / "empty").mkdir()
        assert "holds no *.parquet" in self.refused(self.folder / "empty")

    def check_memory_is_that_of_a_batch(self):
        # 240 MB of text in one row group, and in many.
        texts = [os.urandom(5000).hex() for _ in range(400)] * 60
        sizes = {}
        for name, rows in (("one", len(texts)), ("many", 400)):
            path = self.write(f"{name}.parquet", texts, row_group_size=rows, use_dictionary=False, compression="none")
            # A child's peak is at least that of the process that starts it, so a small process starts it.
            done = subprocess.run([sys.executable, "-c", PEAK_OF, sys.executable, SCRIPT, path], capture_output=True, check=True)
            sizes[name] = int(done.stdout) // 1024
            assert os.path.getsize(path) > 200_000_000
        print(f"  most memory: {sizes} MiB")
        assert max(sizes.values()) < 190, sizes

    def check_a_reader_that_ends_before_is_no_error(self):
        path = self.write("long.parquet", self.texts(20_000))
        done = subprocess.run(["bash", "-c", 'set -o pipefail; "$0" "$1" "$2" | head -n 1', sys.executable, SCRIPT, path],
                              capture_output=True, check=False)
        assert done.returncode == 128 + 13 and not done.stderr and done.stdout.count(b"\n") == 1, done

    def check_a_full_disk_is_one(self):
        path = self.write("full.parquet", self.texts(2000))
        with open("/dev/full", "wb") as full:
            done = subprocess.run([sys.executable, SCRIPT, path], stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1 and done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1, done

    def check_shards_are_those_of_the_texts(self):
        texts = [text for text in self.texts(3000) if text is not None]
        (self.folder / "vocabulary.txt").write_text(" ".join(filter(None, texts)), encoding="utf-8")
        self.tokenize(self.folder / "vocabulary.txt", "vocabulary", "--train-vocab", "400", "--val-fraction", "0")
        lines = self.folder / "lines.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        vocabulary = ("--tokenizer", self.folder / "vocabulary")
        self.tokenize(lines, "expected", *vocabulary)
        path = self.write("rows.parquet", texts, row_group_size=250)
        # The command line that the program prints if it is given the file itself.
        refusal = subprocess.run([self.program, "tokenize", path, "--out", self.folder / "no", *vocabulary],
                                 capture_output=True, text=True, check=False).stderr
        line = refusal[refusal.index("scripts/parquet.py"):].strip()
        line = line.replace("train_gpt tokenize", f"{self.program} tokenize")
        line = line.replace("--tokenizer DIR", f"--tokenizer {self.folder}/vocabulary")
        line = line.replace("--out DIR", f"--out {self.folder}/found")
        subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], cwd=SCRIPT.parent.parent, capture_output=True, check=True)
        shards = [self.folder / name / "train_000000.bin" for name in ("expected", "found")]
        assert shards[0].read_bytes() == shards[1].read_bytes() and shards[0].stat().st_size > 10_000

    def check_data_sh_tokenizes_a_set_of_parquet_files(self):
        (self.folder / "a.txt").write_text("some text")
        self.tokenize(self.folder / "a.txt", "vocabulary", "--train-vocab", "257", "--val-fraction", "0")
        served, tools = self.folder / "served", self.folder / "tools"
        tools.mkdir()
        for i in range(3):
            self.write(f"served/{i:03}_00000.parquet", [self.text(2000) + "." for _ in range(300)])
        # In place of a server: understands the calls "curl … -o FILE URL" and, with no answer, "curl … -sSI URL".
        (tools / "curl").write_text('#!/bin/sh\nfor last; do :; done\ncase "$*" in *-sSI*) exit 0 ;; esac\n'
                                    'while [ "$1" != -o ]; do shift; done\ncp "$SERVED/${last##*/}" "$2"\n')
        (tools / "curl").chmod(0o755)
        environment = dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}", SERVED=str(served), SHARDS="2",
                           DATA_DIR=str(self.folder / "data"), TRAIN_GPT=str(self.program),
                           TOKENIZER=str(self.folder / "vocabulary"))
        to = self.folder / "data/fineweb-edu-text"

        def data_sh():
            return subprocess.run(["bash", SCRIPT.with_name("data.sh"), "fineweb-edu-text"], env=environment,
                                  capture_output=True, text=True, check=False)

        done = data_sh()
        assert done.returncode == 0 and f"data.train={to}/train_*.bin" in done.stdout, done
        manifest = json.loads((to / "data.json").read_text(encoding="utf-8"))
        assert manifest["complete"] and sum(manifest["documents"].values()) == 600, manifest
        made = (to / "data.json").stat().st_mtime_ns
        assert data_sh().returncode == 0 and (to / "data.json").stat().st_mtime_ns == made, "not made once"
        environment["SHARDS"] = "3"
        whole = (served / "002_00000.parquet").read_bytes()
        (served / "002_00000.parquet").write_bytes(whole[:1000])
        done = data_sh()
        assert done.returncode == 1 and "002_00000.parquet cannot be read as Parquet" in done.stderr, done
        (to / "002_00000.parquet").write_bytes(whole)
        done = data_sh()
        manifest = json.loads((to / "data.json").read_text(encoding="utf-8"))
        assert done.returncode == 0 and sum(manifest["documents"].values()) == 900, done

    def tokenize(self, text, out, *arguments, stdin=b"", refused=None):
        done = subprocess.run([self.program, "tokenize", text, "--out", self.folder / out, *arguments], input=stdin,
                              capture_output=True, check=False)
        if refused is None:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode == 1 and refused in done.stderr.decode(), done.stderr


def main():
    seed = int(os.environ.get("TEST_SEED", random.randrange(1 << 32)))
    print(f"TEST_SEED={seed} repeats this run's random inputs")
    passed = failed = 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
