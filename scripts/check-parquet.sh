#!/usr/bin/env bash
# Checks scripts/parquet.py in the environment that it installs, with generated files (scripts/check_parquet.py).
# `make test-full` calls it.
#   usage: scripts/check-parquet.sh
#   TRAIN_GPT=program     default: build/train_gpt
# If pyarrow is missing and cannot be installed, prints that and skips. The last line that it prints is "N passed, M failed".
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
set -u
cd "$(dirname "$0")/.." || exit
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# With pyarrow, a pattern that matches nothing is refused.
scripts/parquet.py "$(mktemp -u)" > "$log" 2>&1
if ! grep -q 'is not a file' "$log"; then
    echo "skipped: reading Parquet files: $(tail -n 1 "$log")"
    echo "0 passed, 0 failed"
    exit
fi
python=build/parquet/bin/python
[ -x "$python" ] || python=python3
"$python" scripts/check_parquet.py "${TRAIN_GPT:-build/train_gpt}"
