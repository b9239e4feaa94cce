#!/usr/bin/env bash
# Checks that Parquet files of pyarrow, DuckDB and fastparquet are read as pyarrow reads them
# (scripts/check_parquet.py). `make test-full` calls it.
#   usage: scripts/check-parquet.sh
#   PYTHON=python3        the interpreter; if it lacks these packages, they are installed once into
#                         a virtual environment in build/parquet
#   TRAIN_GPT=program     default: build/train_gpt
# If that fails, prints the reason and skips. The last line that it prints is "N passed, M failed".
set -u
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
environment=build/parquet

skip() {
    echo "skipped: Parquet files of other writers, since $1"
    echo "0 passed, 0 failed"
    exit
}
complete() { "$1" -c 'import duckdb, fastparquet, pyarrow.parquet' > /dev/null 2>&1; }

command -v "$python" > /dev/null || skip "there is no $python"
if ! complete "$python"; then
    if ! [ -x "$environment/bin/python" ] ||
        ! "$environment/bin/python" -m pip --version > /dev/null 2>&1; then
        rm -rf "$environment"
        "$python" -m venv "$environment" > /dev/null 2>&1 ||
            skip "$python makes no virtual environments (Debian's package for that is python3-venv)"
    fi
    python=$environment/bin/python
    if ! complete "$python"; then
        echo "installing pyarrow, duckdb and fastparquet into $environment"
        "$python" -m pip install --disable-pip-version-check --quiet --retries 1 \
            pyarrow duckdb fastparquet > "$environment/pip.log" 2>&1 ||
            skip "they could not be installed: $(tail -n 1 "$environment/pip.log")"
    fi
    complete "$python" || skip "they do not start here, though they are installed in $environment"
fi
"$python" scripts/check_parquet.py "${TRAIN_GPT:-build/train_gpt}"
