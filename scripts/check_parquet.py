#!/usr/bin/env python3
"""Checks that train_gpt reads Parquet files of other writers as pyarrow does.
needs: pyarrow, duckdb, fastparquet

    scripts/check_parquet.py TRAIN_GPT

Files of random texts are written by pyarrow, DuckDB and fastparquet in some 40 shapes: codecs,
encodings, versions of pages, nulls, row groups, types of strings. train_gpt turns each into tokens
that stand for single bytes, and these bytes must be the texts that pyarrow reads from the same
file, in the same order. Memory must not grow with a file or a row group, and a damaged file must be
named with row group and page. The last line that it prints is "N passed, M failed".
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

import duckdb
import fastparquet
import pandas
import pyarrow as pa
import pyarrow.parquet as pq

DATA_SH = Path(__file__).with_name("data.sh")
ALPHABET = "abcdefgh    \n\t\"\\\u00e9\u4e2d\U0001f600\u2028\x00\x7f"
PEAK_OF = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def shapes_of_pyarrow():
    """Names of shapes, with the type of the column and what write_table is told."""
    for codec in ("none", "snappy", "gzip", "zstd", "lz4"):
        for version in ("1.0", "2.0"):
            yield f"{codec}, pages {version}", pa.string(), {"compression": codec,
                                                             "data_page_version": version}
    for encoding in ("PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"):
        for version in ("1.0", "2.0"):
            yield f"{encoding}, pages {version}", pa.string(), {
                "use_dictionary": False, "column_encoding": {"text": encoding},
                "data_page_version": version, "compression": "zstd"}
    for name, kind in (("large strings", pa.large_string()),
                       ("a dictionary", pa.dictionary(pa.int32(), pa.string())),
                       ("views of strings", pa.string_view())):
        yield name, kind, {}
    yield "checksums", pa.string(), {"write_page_checksum": True, "data_page_size": 500}
    yield "checksums, pages 2.0", pa.string(), {"write_page_checksum": True,
                                                "data_page_version": "2.0", "compression": "gzip"}
    yield "a dictionary that becomes too large", pa.string(), {"dictionary_pagesize_limit": 2000,
                                                               "data_page_size": 1000}
    yield "the oldest version", pa.string(), {"version": "1.0"}
    yield "an index of pages and a size for statistics", pa.string(), {"write_page_index": True,
                                                                       "write_statistics": True}
    yield "one row in a page", pa.string(), {"data_page_size": 1, "write_batch_size": 1,
                                             "row_group_size": 100}
    yield "one row in a group", pa.string(), {"row_group_size": 1}


class Checks:
    """Each method whose name begins with check_ is one check, or yields several."""

    def __init__(self, program, folder, seed):
        self.program, self.folder, self.random = (Path(program).resolve(), Path(folder),
                                                  random.Random(seed))
        self.bytes_of = None

    def text(self, most):
        return "".join(self.random.choices(ALPHABET, k=self.random.randint(0, most)))

    def texts(self, count, most=300, nulls=0.05):
        few = [self.text(most) for _ in range(20)]
        return [None if self.random.random() < nulls else self.random.choice(few)
                if self.random.random() < 0.3 else self.text(most) for _ in range(count)]

    def write(self, name, texts, kind=None, **layout):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({
            "id": list(range(len(texts))), "tags": [["a", "b"]] * len(texts),
            "at": [{"x": 1, "y": "z"}] * len(texts), "text": pa.array(texts, kind or pa.string())})
        pq.write_table(table, path, **layout)
        return path

    def tokenize(self, *arguments, refused=None):
        done = subprocess.run([self.program, "tokenize", *map(str, arguments)], capture_output=True,
                              check=False)
        if refused is None:
            assert done.returncode == 0, done.stderr.decode()
        else:
            message = done.stderr.decode()
            assert (done.returncode == 1 and refused in message and
                    message.count("train_gpt: ") == 1), message
        return done.stdout.decode() + done.stderr.decode()

    def vocabulary(self):
        """A vocabulary of the 256 bytes and the end of a text."""
        folder = self.folder / "bytes"
        if self.bytes_of is None:
            (self.folder / "some.txt").write_text("some text")
            self.tokenize(self.folder / "some.txt", "--out", folder, "--train-vocab", "257",
                          "--val-fraction", "0")
            shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
            characters = {chr(b): b for b in shown}
            characters.update(
                {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in shown)})
            vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))[
                "model"]["vocab"]
            self.bytes_of = {number: characters[word] for word, number in vocabulary.items()
                             if word in characters}
            assert len(self.bytes_of) == 256
        return folder

    def read(self, path, *arguments):
        """The texts that train_gpt finds, empty ones excepted."""
        out = self.folder / "found"
        said = self.tokenize(path, "--tokenizer", self.vocabulary(), "--out", out,
                             "--val-fraction", "0", *arguments)
        texts, text = [], bytearray()
        for shard in sorted(out.glob("train_*.bin")):
            tokens = memoryview(shard.read_bytes()[1024:]).cast("H")
            for token in tokens:
                if token in self.bytes_of:
                    text.append(self.bytes_of[token])
                else:
                    texts.append(bytes(text))
                    text.clear()
        assert not text
        return texts, said

    def compare(self, path):
        column = pq.read_table(path, columns=["text"]).column(0).to_pylist()
        assert any(column), "no texts"
        texts, said = self.read(path)
        assert texts == [text.encode() for text in column if text], (
            f"other texts than pyarrow's, in {path}")
        nulls = column.count(None)
        assert (f"{nulls} row{'s' * (nulls != 1)} of Parquet without a text" in said) == (
            nulls > 0), said
        manifest = json.loads((self.folder / "found/data.json").read_text(encoding="utf-8"))
        assert manifest["sources"][0].get("nulls", 0) == nulls

    def check_files_of_pyarrow(self):
        for name, kind, layout in shapes_of_pyarrow():
            yield name
            count = self.random.randint(1, 1500)
            layout = {"row_group_size": self.random.randint(1, 1 + count),
                      "data_page_size": self.random.randint(100, 20_000)} | layout
            if "column_encoding" in layout:
                layout["column_encoding"] = {"text": layout["column_encoding"]["text"]}
            self.compare(self.write("shape.parquet", ["x"] + self.texts(count), kind, **layout))
        yield "a column that cannot be null"
        schema = pa.schema([pa.field("text", pa.string(), nullable=False)])
        pq.write_table(pa.table([pa.array(self.texts(900, nulls=0) + ["x"])], schema=schema),
                       self.folder / "required.parquet")
        self.compare(self.folder / "required.parquet")
        yield "long runs of nulls"
        runs = [text for text in self.texts(20) + ["x"] for text in [text] * 300 + [None] * 500]
        self.compare(
            self.write("runs.parquet", runs, data_page_version=self.random.choice(["1.0", "2.0"])))

    def check_files_of_duckdb(self):
        for codec in ("uncompressed", "snappy", "gzip", "zstd", "lz4_raw"):
            for version in ("V1", "V2"):
                yield f"{codec}, {version}"
                texts = self.texts(self.random.randint(2100, 6000)) + ["x"]
                frame = pandas.DataFrame(  # pylint: disable=unused-variable
                    {"id": range(len(texts)), "text": texts})
                path = self.folder / "duck.parquet"
                with duckdb.connect() as connection:
                    connection.register("frame", frame)
                    connection.execute(f"COPY (SELECT id, text FROM frame ORDER BY id) TO '{path}' "
                                       f"(FORMAT parquet, CODEC '{codec}', PARQUET_VERSION "
                                       f"{version}, ROW_GROUP_SIZE 2048)")
                self.compare(path)

    def check_files_of_fastparquet(self):
        for codec in ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4_RAW"):
            yield codec
            texts = self.texts(self.random.randint(1, 3000)) + ["x"]
            frame = pandas.DataFrame({
                "id": range(len(texts)), "text": pandas.Series(texts, dtype=object)})
            fastparquet.write(str(self.folder / "fast.parquet"), frame, compression=codec,
                              object_encoding={"text": "utf8"},
                              row_group_offsets=self.random.randint(100, 1000))
            self.compare(self.folder / "fast.parquet")
        yield "categories"
        words = [self.text(20) + "." for _ in range(30)]
        frame = pandas.DataFrame({"text": pandas.Categorical(self.random.choices(words, k=2000))})
        fastparquet.write(str(self.folder / "categories.parquet"), frame)
        self.compare(self.folder / "categories.parquet")

    def check_shards_are_those_of_json_lines(self):
        texts = self.texts(3000)
        lines = self.folder / "lines.jsonl"
        lines.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts if text is not None),
            encoding="utf-8")
        self.tokenize(lines, "--train-vocab", "400", "--out", self.folder / "expected")
        path = self.write("rows.parquet", texts, row_group_size=250)
        self.tokenize(path, "--train-vocab", "400", "--out", self.folder / "rows")
        for name in ("tokenizer.json", "train_000000.bin", "val_000000.bin"):
            assert (self.folder / "expected" / name).read_bytes() == (
                self.folder / "rows" / name).read_bytes(), name

    def check_columns_that_hold_no_strings_are_refused_with_those_that_do(self):
        path = self.write("columns.parquet", ["x"])
        for field, kind in (("body", "has no column"), ("id", "holds integers"),
                            ("tags", "holds lists"), ("at", "holds structures"),
                            ("at.y", "has no column")):
            said = self.tokenize(path, "--field", field, "--tokenizer", self.vocabulary(),
                                 "--out", self.folder / "no", refused=kind)
            assert "strings are: text; name one with --field" in said, said
        pq.write_table(pa.table({"text": [b"bytes"]}), path)
        self.tokenize(path, "--tokenizer", self.vocabulary(), "--out", self.folder / "no",
                      refused="no column of strings")

    def check_damage_is_named_with_file_row_group_and_page(self):
        path = self.write("whole.parquet", self.texts(5000), row_group_size=500,
                          write_page_checksum=True, data_page_size=5000)
        whole = path.read_bytes()
        for cut in (0, 3, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            self.tokenize(path, "--tokenizer", self.vocabulary(), "--out", self.folder / "no",
                          refused=str(path))
        group = pq.ParquetFile(self.write("whole.parquet", self.texts(5000), row_group_size=500,
                                          write_page_checksum=True))
        column = group.metadata.row_group(3).column(group.metadata.num_columns - 1)
        assert column.path_in_schema == "text"
        whole = bytearray(path.read_bytes())
        whole[(column.dictionary_page_offset or column.data_page_offset) +
              column.total_compressed_size // 2] ^= 0x10
        path.write_bytes(whole)
        said = self.tokenize(path, "--tokenizer", self.vocabulary(), "--out", self.folder / "no",
                             refused=f"{path} is damaged in row group 4 of 10, page ")
        assert "checksum" in said, said
        _, said = self.read(path, "--skip-bad")
        assert "left out: the rest of 1 file that is damaged" in said, said

    def check_memory_is_that_of_a_page(self):
        # 240 MB of text in one row group, and in many.
        texts = [os.urandom(5000).hex() for _ in range(400)] * 60
        (self.folder / "hex.txt").write_text("".join(texts[:100]))
        self.tokenize(self.folder / "hex.txt", "--out", self.folder / "hex", "--train-vocab", "300",
                      "--val-fraction", "0")
        sizes = {}
        for name, rows in (("one", len(texts)), ("many", 400)):
            path = self.write(f"{name}.parquet", texts, row_group_size=rows, use_dictionary=False,
                              compression="none")
            assert os.path.getsize(path) > 200_000_000
            # A child's peak is at least that of the process that starts it, so a small process
            # starts it.
            command = [self.program, "tokenize", path, "--tokenizer", self.folder / "hex",
                       "--out", self.folder / name]
            done = subprocess.run([sys.executable, "-c", PEAK_OF, *command, "--threads", "2"],
                                  capture_output=True, check=True)
            sizes[name] = int(done.stdout) // 1024
        print(f"  most memory: {sizes} MiB")
        assert max(sizes.values()) < 150, sizes

    def check_data_sh_tokenizes_a_set_of_parquet_files(self):
        served, tools = self.folder / "served", self.folder / "tools"
        tools.mkdir()
        for i in range(3):
            self.write(f"served/{i:03}_00000.parquet", [self.text(2000) + "." for _ in range(300)])
        # In place of a server: understands the calls "curl … -o FILE URL" and, with no answer,
        # "curl … -sSI URL".
        (tools / "curl").write_text(
            '#!/bin/sh\nfor last; do :; done\ncase "$*" in *-sSI*) exit 0 ;; esac\n'
            'while [ "$1" != -o ]; do shift; done\ncp "$SERVED/${last##*/}" "$2"\n')
        (tools / "curl").chmod(0o755)
        environment = dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}", SERVED=str(served),
                           SHARDS="2", DATA_DIR=str(self.folder / "data"),
                           TRAIN_GPT=str(self.program), TOKENIZER=str(self.vocabulary()))
        to = self.folder / "data/fineweb-edu-text"

        def data_sh(name="fineweb-edu-text"):
            return subprocess.run(["bash", DATA_SH, name], env=environment, capture_output=True,
                                  text=True, check=False)

        done = data_sh()
        assert done.returncode == 0 and f"data.train={to}/train_*.bin" in done.stdout, done
        manifest = json.loads((to / "data.json").read_text(encoding="utf-8"))
        assert manifest["complete"] and sum(manifest["documents"].values()) == 600, manifest
        made = (to / "data.json").stat().st_mtime_ns
        assert data_sh().returncode == 0 and (to / "data.json").stat().st_mtime_ns == made, (
            "not made once")
        environment["SHARDS"] = "3"
        whole = (served / "002_00000.parquet").read_bytes()
        (served / "002_00000.parquet").write_bytes(whole[:1000])
        done = data_sh()
        assert done.returncode == 1 and "002_00000.parquet is truncated" in done.stderr, done
        (to / "002_00000.parquet").write_bytes(whole)
        for kept in to.glob("002_00000.parquet.*"):  # hashes of the first download
            kept.unlink()
        done = data_sh()
        manifest = json.loads((to / "data.json").read_text(encoding="utf-8"))
        assert done.returncode == 0 and sum(manifest["documents"].values()) == 900, done
        done = data_sh("fineweb-edu-32k")
        own = json.loads(
            (self.folder / "data/fineweb-edu-32k/data.json").read_text(encoding="utf-8"))
        assert (done.returncode == 0 and sum(own["documents"].values()) == 900 and
                own["vocab_size"] > 257), done


def main():
    seed = int(os.environ.get("TEST_SEED", random.randrange(1 << 32)))
    print(f"TEST_SEED={seed} repeats this run's random inputs")
    passed = failed = 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for check in [name for name in dir(Checks) if name.startswith("check_")]:
        with tempfile.TemporaryDirectory() as folder:
            name = check
            try:
                parts = getattr(Checks(sys.argv[1], folder, seed), check)() or [None]
                for part in parts:
                    passed += name != check
                    name = f"{check}: {part}"
                passed += 1
            except Exception:  # pylint: disable=broad-exception-caught
                print(f"FAILED: {name}")
                traceback.print_exc(limit=-3, file=sys.stdout)
                failed += 1
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
