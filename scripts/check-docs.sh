#!/usr/bin/env bash
# Runs the commands that README.md and docs/ show, and checks links, images, paths, options and
# keys that they name (scripts/check_docs.py). `make test-full` calls it.
#   usage: scripts/check-docs.sh [--list] [PAGE…]      PAGE: such as docs/recipes.md; default: all
#   --list                the blocks of commands, and how each is run or why it is not
#   TRAIN_GPT=program     default: build/train_gpt
#   COMPARE=program       default: build/compare, which is built if it is missing
# Without Python, prints that and skips. The last line that it prints is "N passed, M failed".
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
set -u
cd "$(dirname "$0")/.." || exit
if ! command -v python3 > /dev/null; then
    echo "skipped: commands of the docs, since there is no python3"
    echo "0 passed, 0 failed"
    exit
fi
compare=${COMPARE:-build/compare}
if [ "${1:-}" != --list ] && ! [ -x "$compare" ]; then
    ${MAKE:-make} --no-print-directory compare || exit
fi
exec python3 scripts/check_docs.py "${TRAIN_GPT:-build/train_gpt}" "$compare" "$@"
