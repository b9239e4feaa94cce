#!/usr/bin/env bash
# Compares the built program with Hugging Face's transformers (scripts/check_transformers.py
# --interchange). `make test-full` calls it.
#   usage: scripts/check-transformers.sh
#   PYTHON=python3        the interpreter; if it lacks torch or transformers, they are installed
#                         once into a virtual environment in build/transformers (torch alone is
#                         several GB)
#   TRAIN_GPT=program     default: build/train_gpt
# If that fails, prints the reason and skips. The last line that it prints is "N passed, M failed".
set -u
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
environment=build/transformers

skip() {
    echo "skipped: comparison with transformers, since $1"
    echo "0 passed, 0 failed"
    exit
}
# complete PYTHON: whether it can load models; transformers goes without a torch that is too old
complete() {
    "$1" -c \
        'from transformers import GPT2LMHeadModel; import torch; GPT2LMHeadModel.from_pretrained' \
        > /dev/null 2>&1
}
install() {
    echo "installing $1 into $environment"
    "$environment/bin/python" -m pip install --disable-pip-version-check --quiet --retries 1 "$1" \
        > "$environment/pip.log" 2>&1 ||
        skip "$1 could not be installed: $(tail -n 1 "$environment/pip.log")"
}

command -v "$python" > /dev/null || skip "there is no $python"
if ! complete "$python"; then
    if ! [ -x "$environment/bin/python" ] ||
        ! "$environment/bin/python" -m pip --version > /dev/null 2>&1; then
        rm -rf "$environment"
        "$python" -m venv --system-site-packages "$environment" > /dev/null 2>&1 ||
            skip "$python makes no virtual environments (Debian's package for that is python3-venv)"
    fi
    python=$environment/bin/python
    complete "$python" || install transformers
    complete "$python" || install torch
    complete "$python" ||
        skip "transformers does not load models here, though it is installed in $environment"
fi
HF_HUB_OFFLINE=1 "$python" scripts/check_transformers.py --interchange \
    "${TRAIN_GPT:-build/train_gpt}"
