#!/usr/bin/env bash
# Compares training speed and memory with the machine's limits and with PyTorch, and the tokenizer
# with Hugging Face's tokenizers and tiktoken. `make bench` runs it.
#   usage: scripts/bench.sh [quick]       takes about 30 minutes; quick: only the small model, under
#                                         3 minutes
# Prints Markdown and keeps it in build/bench.md. PyTorch is taken from, in this order: $PYTHON, a
# virtual environment in build/venv (created with `pip install torch`, 5 GB), Debian's
# python3-torch. Without PyTorch, only this program is measured.
# Threads: OMP_NUM_THREADS (default 2, or 1 on one core).
set -u
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit
build=${BUILD:-build}
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 2 ? cores : 2))}
inductor=$(realpath -m "$build/bench-runs/inductor")
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$inductor}

has_torch() { "$1" -c 'import torch' > /dev/null 2>&1; }

python=
if [ -n "${PYTHON:-}" ]; then
    has_torch "$PYTHON" || {
        echo "error: $PYTHON cannot import torch; unset PYTHON or install torch there" >&2
        exit 1
    }
    python=$PYTHON
elif [ -x "$build/venv/bin/python" ] && has_torch "$build/venv/bin/python"; then
    python=$build/venv/bin/python
else
    echo "installing PyTorch into $build/venv (5 GB; PYTHON=… names a Python that has it)" >&2
    if python3 -m venv "$build/venv" > "$build/venv.log" 2>&1 &&
        "$build/venv/bin/pip" install torch transformers numpy setuptools tokenizers tiktoken \
            >> "$build/venv.log" 2>&1 &&
        has_torch "$build/venv/bin/python"; then
        python=$build/venv/bin/python
    else
        tail -1 "$build/venv.log" >&2
        if has_torch python3; then
            echo "pip could not install PyTorch; using the system's" >&2
            python=python3
        elif has_torch /usr/bin/python3; then
            echo "pip could not install PyTorch; using the system's" >&2
            python=/usr/bin/python3
        else
            echo "pip could not install PyTorch (see $build/venv.log), nor is python3-torch" \
                "installed: measuring without it" >&2
        fi
    fi
fi

mkdir -p "$build/bench-runs"
"$build/bench" "$@" --program "$build/train_gpt" --folder "$build/bench-runs" \
    ${python:+--python "$python"} | tee "$build/bench.md"
status=${PIPESTATUS[0]}
python3 scripts/bench_ranks.py --program "$build/train_gpt" --folder "$build/bench-runs/ranks" |
    tee -a "$build/bench.md"
[ "${PIPESTATUS[0]}" = 0 ] || status=1
# Uses GPT-2's vocabulary and the quickstart's text if they are here, with empty lines between the
# documents.
prose=()
text=data/quickstart/king-james-bible.txt
if [ -n "${GPT2_VOCAB_DIR-}" ] && [ -s $text ]; then
    sed '/^$/d; s/^<|endoftext|>$//' $text > "$build/bench-runs/bible.txt"
    prose=(--vocab "$GPT2_VOCAB_DIR" --text "$build/bench-runs/bible.txt")
fi
"${python:-python3}" scripts/bench_tokenizer.py "${prose[@]}" --program "$build/bench_tokenizer" \
    --folder "$build/bench-runs/tokenizer" "$@" | tee -a "$build/bench.md"
[ "${PIPESTATUS[0]}" = 0 ] || status=1
if nvidia-smi > /dev/null 2>&1; then
    {
        python3 scripts/bench_gpu.py --program "$build/train_gpt" --folder "$build/bench-runs" \
            ${python:+--python "$python"} &&
            "$build/compare" --all
    } | tee -a "$build/bench.md"
    [ "${PIPESTATUS[0]}" = 0 ] || status=1
fi
exit "$status"
