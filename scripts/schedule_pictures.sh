#!/bin/sh
# Draws the pipeline schedules of docs/parallelism.md again, from FLOPs alone.
#   usage: scripts/schedule_pictures.sh
set -eu
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.."
draw() {
    file=docs/images/schedule-$1.svg
    shift
    "${TRAIN_GPT:-build/train_gpt}" plan configs/gpt2-124m.json --world 4 --set device=cpu \
        --set model.n_layer=16 --set model.n_embd=2048 --set model.n_head=16 \
        --set model.vocab_size=4096 --set batch.micro_batch=1 --set batch.tokens_per_step=12288 \
        --set precision.dtype=bf16 --set memory.recompute=none --set parallel.pipeline=4 \
        --picture "$file" "$@" |
        grep 'bubble .*calculated'
    echo "wrote $file"
}
draw 1f1b
draw interleaved --set parallel.schedule=interleaved --set parallel.stages_per_rank=4
draw zero-bubble --set parallel.schedule=zero_bubble
