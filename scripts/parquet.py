#!/usr/bin/env python3
"""Prints the texts of Parquet files as JSON Lines, for train_gpt tokenize.

    scripts/parquet.py FILE… [--field text] | train_gpt tokenize - --field text --tokenizer DIR --out DIR

FILE is a Parquet file, a quoted pattern, or a folder; all *.parquet files below a folder are read, sorted by path. Rows keep their
order, and memory does not grow with the files. Each row becomes one line {"text": …}, with the column's name. Rows whose text is
null are left out and counted. The column must hold strings; if it does not or is missing, the error names the columns that do.

Reading Parquet needs pyarrow. If python3 lacks it, it is installed once into build/parquet (about 150 MB), which needs Debian's
package python3-venv. Exits with 0 if everything was printed, else with 1.
"""
import argparse
import fcntl
import glob
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

REQUIREMENT = "pyarrow>=16,<27"
ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt"
ENVIRONMENT = (ROOT / "build" if (ROOT / "Makefile").exists() else CACHE) / "parquet"  # after `make install`, in the user's cache
BATCH_ROWS = 1024
READ_AHEAD = 1 << 20  # bytes of each column


def stop(message):
    sys.exit(f"error: {message}")


def quoted(name):
    """A name of a file or a column, made safe for a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))


def install():
    """Runs this script again in a virtual environment, which it creates if it is missing."""
    python = ENVIRONMENT / "bin" / "python"
    if Path(sys.prefix) == ENVIRONMENT:
        stop(f"pyarrow does not load, though it is installed in {ENVIRONMENT}; remove that folder and try again")
    try:
        ENVIRONMENT.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"{ENVIRONMENT} cannot be created ({error.strerror}); set XDG_CACHE_HOME to a folder that can be written")
    with open(ENVIRONMENT / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several that begin at once, one installs
        if not (ENVIRONMENT / "complete").exists():
            print(f"installing pyarrow into {ENVIRONMENT}", file=sys.stderr)
            for what, command in (
                    ("the environment", [sys.executable, "-m", "venv", ENVIRONMENT]),
                    ("pyarrow", [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", REQUIREMENT])):
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                      check=False)
                if done.returncode:
                    lines = done.stdout.strip().splitlines() or ["no message"]
                    stop(f"{what} could not be installed ({quoted(lines[-1])}); check the connection and that python3-venv is "
                         "installed, or install pyarrow yourself")
            (ENVIRONMENT / "complete").touch()
    os.execv(python, [python, __file__, *sys.argv[1:]])


def find_files(names):
    """The files that the user named, in order."""
    files = []
    for name in names:
        if os.path.isdir(name):
            found = sorted(str(path) for path in Path(name).rglob("*.parquet") if path.is_file())
            missing = "holds no *.parquet"
        elif os.path.exists(name):
            found = [name]
        else:
            found = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            missing = "is not a file, and no file matches it"
        if not found:
            stop(f"{quoted(name)} {missing}; check the path")
        files += found
    return files


def is_text(kind):
    import pyarrow.types as types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or getattr(types, "is_string_view", lambda _: False)(kind)


def check_column(parquet, name, field):
    """Stops unless the column is there and holds strings."""
    schema = parquet.schema_arrow
    texts = [column.name for column in schema if is_text(column.type)]
    known = f"its columns of strings are: {quoted(', '.join(texts))}" if texts else "it has no column of strings"
    indices = schema.get_all_field_indices(field)
    if not indices:
        stop(f"{quoted(name)} has no column \"{quoted(field)}\"; {known}" + ("; name one with --field" if texts else ""))
    if len(indices) > 1:
        stop(f"{quoted(name)} has {len(indices)} columns \"{quoted(field)}\"; give them different names")
    kind = schema.field(indices[0]).type
    if not is_text(kind):
        stop(f"the column \"{quoted(field)}\" of {quoted(name)} holds {quoted(kind)}, not strings; {known}" +
             ("; name one with --field" if texts else ""))


def open_parquet(name):
    """Reads batches of rows, so that memory does not depend on the size of a row group."""
    import pyarrow.parquet
    return pyarrow.parquet.ParquetFile(name, buffer_size=READ_AHEAD, pre_buffer=False, memory_map=False)


def print_rows(name, field, out):
    """Prints the rows of one file; returns how many have a text, and how many are null."""
    texts = nulls = 0
    with open_parquet(name) as parquet:
        # Reads one row group at a time: a reader of several keeps memory for all that it has read.
        for group in range(parquet.num_row_groups):
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[field], use_threads=False):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        nulls += 1
                        continue
                    texts += 1
                    out.write(json.dumps({field: text}, ensure_ascii=False))
                    out.write("\n")
    return texts, nulls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--field", default="text", help="the column (default: text)")
    arguments = parser.parse_args()
    try:
        import pyarrow
    except ImportError:
        install()
    # The program that reads the output may end first; that is not an error of this script.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = open(sys.stdout.fileno(), "w", encoding="utf-8", newline="\n", buffering=1 << 20, closefd=False)
    files = find_files(arguments.files)
    failures = (pyarrow.ArrowException, OSError, UnicodeError)
    # Checks all files first, so that an error in a later file shows before hours of work.
    for name in files:
        try:
            with open_parquet(name) as parquet:
                check_column(parquet, name, arguments.field)
        except failures as error:
            stop(f"{quoted(name)} cannot be read as Parquet ({quoted(error)}); fetch it again or leave it out")
    texts = nulls = 0
    for name in files:
        try:
            more_texts, more_nulls = print_rows(name, arguments.field, out)
        except failures as error:
            message = f"{quoted(name)} is damaged ({quoted(error)}); fetch it again or leave it out"
            # A line that is not JSON, so that the reader does not take a part of the texts for all of them.
            print(f"error: {message}", file=out, flush=True)
            stop(message)
        texts += more_texts
        nulls += more_nulls
    try:
        out.close()
    except OSError as error:
        stop(f"standard output cannot be written: {error}")
    note = f", {nulls} rows without text were left out" if nulls else ""
    print(f"{texts} texts from {len(files)} files{note}", file=sys.stderr)


if __name__ == "__main__":
    main()
