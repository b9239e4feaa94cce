#!/usr/bin/env python3
"""Prints the texts of Parquet files as JSON Lines, for train_gpt tokenize.

    scripts/parquet.py FILE… [--field text] | train_gpt tokenize - --field text --tokenizer DIR --out DIR

FILE is a Parquet file, a quoted pattern, or a folder; all *.parquet files below a folder are read, sorted by path, except entries
whose names begin with a dot (.ipynb_checkpoints, ._a.parquet), which are counted. Rows keep their order, and memory does not grow
with the files. Each row becomes one line {"text": …}, with the column's name. Rows whose text is null are left out and counted. The column must hold strings; if it does not or is missing, the error names the columns that do.

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


def check_link(path):
    """Stops if a path is a symbolic link that leads nowhere."""
    if os.path.islink(path) and not os.path.exists(path):
        stop(f"{quoted(path)} is a dangling symbolic link, or one that leads back to itself (to {quoted(os.readlink(path))}); "
             "restore it or remove the link")


def check_cache(folder):
    """Stops if a folder is the root of what Hugging Face's cache holds of a data set: it would have some files several times."""
    if all((folder / name).is_dir() for name in ("blobs", "snapshots")):
        snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
        advice = f"name a snapshot in it: {quoted(snapshots[0])}" if snapshots else "its snapshots are empty: download the files again"
        stop(f"{quoted(folder)} is the root of a Hugging Face cache (blobs, refs, snapshots); {advice}")


def files_below(folder, above=()):
    """The *.parquet files in a folder and its subfolders, and the number of entries whose names begin with a dot."""
    real = os.path.realpath(folder)
    if real in above:
        stop(f"{quoted(folder)} is a symbolic link to {quoted(real)}, a folder that it lies in; remove the link")
    files, hidden = [], 0
    for path in folder.iterdir():
        if path.name.startswith("."):
            hidden += 1
            continue
        check_link(path)
        if path.is_dir():
            more, more_hidden = files_below(path, (*above, real))
            files += more
            hidden += more_hidden
        elif path.name.endswith(".parquet") and path.is_file():
            files.append(str(path))
    return files, hidden


def find_files(names):
    """The files that the user named, in order, and the number of entries of folders whose names begin with a dot."""
    files, all_hidden = [], 0
    for name in map(os.path.expanduser, names):
        check_link(name)
        if os.path.isdir(name):
            check_cache(Path(name))
            found, hidden = files_below(Path(name))
            found.sort()
            all_hidden += hidden
            missing = "holds no *.parquet"
        elif os.path.exists(name):
            found = [name]
        else:
            found = sorted(path for path in glob.glob(name, recursive=True) if os.path.lexists(path) and not os.path.isdir(path))
            for path in found:
                check_link(path)
            missing = "is not a file, and no file matches it"
        if not found:
            stop(f"{quoted(name)} {missing}; check the path")
        files += found
    return files, all_hidden


def check_pointer(name):
    """Stops if a file is what Git without LFS leaves in the place of a large file."""
    with open(name, "rb") as file:
        if file.read(64).startswith(b"version https://git-lfs.github.com/spec/"):
            stop(f"{quoted(name)} is a Git LFS pointer, which stands for a file that was not fetched; run git lfs pull in its "
                 "repository, or download the file itself")


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
    files, hidden = find_files(arguments.files)
    failures = (pyarrow.ArrowException, OSError, UnicodeError)
    # Checks all files first, so that an error in a later file shows before hours of work.
    for name in files:
        try:
            check_pointer(name)
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
    if hidden:
        note += f", {hidden} of the folders' entries were left out, since their names begin with a dot"
    print(f"{texts} texts from {len(files)} files{note}", file=sys.stderr)


if __name__ == "__main__":
    main()
