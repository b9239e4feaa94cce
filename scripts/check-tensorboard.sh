#!/usr/bin/env bash
# Reads runs of the built program with the tensorboard package (scripts/check_tensorboard.py).
# `make test-full` calls it.
#   usage: scripts/check-tensorboard.sh
#   PYTHON=python3        the interpreter; if it lacks tensorboard, that is installed once into a
#                         virtual environment in build/tensorboard
#   TRAIN_GPT=program     default: build/train_gpt
# If that fails, prints the reason and skips. The last line that it prints is "N passed, M failed".
set -u
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
environment=build/tensorboard

skip() {
    echo "skipped: reading runs with TensorBoard, since $1"
    echo "0 passed, 0 failed"
    exit
}
complete() { "$1" -c 'import tensorboard.main' > /dev/null 2>&1; }

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
        echo "installing tensorboard into $environment"
        "$python" -m pip install --disable-pip-version-check --quiet --retries 1 \
            tensorboard setuptools > "$environment/pip.log" 2>&1 ||
            skip "it could not be installed: $(tail -n 1 "$environment/pip.log")"
    fi
    complete "$python" || skip "it does not start here, though it is installed in $environment"
fi
"$python" scripts/check_tensorboard.py "${TRAIN_GPT:-build/train_gpt}"
