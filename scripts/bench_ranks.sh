#!/usr/bin/env bash
# Compares two ranks with half the threads each to one rank with all threads, on the CPU: the quickstart's model on synthetic data,
# the same step of 1024 tokens. `make bench` runs it. They take turns. Each number is the lower quartile of a turn's steps, since
# disturbances only make steps longer. Prints Markdown.
#   usage: scripts/bench_ranks.sh
# Environment: BUILD (build), ROUNDS (7), OMP_NUM_THREADS (2).
set -euo pipefail
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.."
build=${BUILD:-build}
rounds=${ROUNDS:-7}
threads=${OMP_NUM_THREADS:-2}
command -v mpirun > /dev/null || { echo "skipped: comparison of two ranks with one, which needs mpirun (scripts/setup.sh mpi)"; exit 0; }
[ "$(nproc)" -ge "$threads" ] && [ "$threads" -ge 2 ] ||
    { echo "skipped: comparison of two ranks with one, which needs a core for each of $threads threads, and at least 2"; exit 0; }
folder=$build/bench-runs/ranks
log=$folder/log
mkdir -p "$folder"
root=()
[ "$(id -u)" = 0 ] && root=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)

milliseconds() {  # milliseconds RANKS: of a step
    rm -rf "$folder/run"
    "${root[@]}" mpirun -np "$1" --bind-to core --map-by "slot:PE=$((threads / $1))" -x OMP_NUM_THREADS=$((threads / $1)) \
        "$build/train_gpt" train configs/quickstart.json --set run_dir="$folder/run" --set device=cpu --set data.train=synthetic \
        --set data.val= --set tokenizer.path= --set model.vocab_size=4096 --set batch.tokens_per_step=1024 \
        --set batch.micro_batch=$((8 / $1)) --set schedule.steps=60 --set schedule.warmup_steps=10 --set checkpoint.every=0 --set log.every=1 > "$log" 2>&1 ||
        { tail -n 5 "$log" >&2; exit 1; }
    sed -n 's/.*"ms":\([0-9.]*\).*/\1/p' "$folder/run/metrics.jsonl" | tail -n +11 | sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 3) / 4)] }'
}

{
    for _ in $(seq "$rounds"); do
        two=$(milliseconds 2)
        one=$(milliseconds 1)
        echo "$two $one"
    done
} | awk -v threads="$threads" '
    { two[NR] = $1; one[NR] = $2; ratio[NR] = $1 / $2 }
    function median(v, n,   i, j, t) {
        for (i = 2; i <= n; ++i) for (j = i; j > 1 && v[j] < v[j - 1]; --j) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
        return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
    }
    END {
        printf "| two ranks × %d threads, ms | one rank × %d, ms | ratio, median of %d turns | least to greatest |\n|---|---|---|---|\n", threads / 2, threads, NR
        m = median(ratio, NR)
        printf "| %.1f | %.1f | %.3f | %.3f to %.3f |\n", median(two, NR), median(one, NR), m, ratio[1], ratio[NR]
    }'
rm -rf "$folder/run"
