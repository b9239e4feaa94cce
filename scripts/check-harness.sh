#!/usr/bin/env bash
# Compares the built program's scores on tasks with lm-evaluation-harness, and with CORE's procedure
# on transformers (scripts/check_harness.py). `make test-full` calls it.
#   usage: scripts/check-harness.sh
#   PYTHON=python3        the interpreter; if it lacks lm_eval or torch, they are installed once
#                         into a virtual environment in build/harness (torch alone is several GB)
#   TRAIN_GPT=program     default: build/train_gpt
# If that fails, prints the reason and skips. The last line that it prints is "N passed, M failed".
set -u
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
environment=build/harness

skip() {
    echo "skipped: comparison with lm-evaluation-harness, since $1"
    echo "0 passed, 0 failed"
    exit
}
complete() {  # complete PYTHON: whether it can evaluate models
    HF_HUB_OFFLINE=1 "$1" -c \
        'import torch, transformers; from lm_eval.models.huggingface import HFLM' > /dev/null 2>&1
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
    if ! complete "$python"; then
        echo "installing lm_eval and torch into $environment"
        "$python" -m pip install --disable-pip-version-check --quiet --retries 1 \
            'lm_eval[hf]>=0.4.9,<0.5' > "$environment/pip.log" 2>&1 ||
            skip "lm_eval could not be installed: $(tail -n 1 "$environment/pip.log")"
    fi
    complete "$python" ||
        skip "lm_eval does not load models here, though it is installed in $environment"
fi
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 \
    TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error
"$python" scripts/check_harness.py "${TRAIN_GPT:-build/train_gpt}"
