#!/usr/bin/env bash
# Lesson 6: a plan of Llama 3.1 405B
#
# No computer here can train a model of 405 billion weights. But everything that a run allocates and
# sends follows from its configuration, and `train_gpt plan` computes it without starting the run.
# Meta trained this model on 16,384 H100 (Grattafiori et al. 2024, arXiv 2407.21783).
#
# In bf16 the weights alone have 2 bytes x 405 billion = 756 GiB. Training needs more for each
# weight: gradients, a master in fp32 (4 bytes) and two moments (8 bytes). A GPU has 80 GB. So the
# weights are split over 8 GPUs of a node (tensor parallelism), the layers over 16 nodes (a
# pipeline), and the rest over the 128 groups of these (data parallelism, ZeRO).

# shellcheck source=scripts/lessons/common.sh
. "$(dirname "$0")/common.sh"

model=(--set model.n_layer=126 --set model.n_embd=16384 --set model.n_head=128
    --set model.n_kv_head=8 --set model.n_ff=53248 --set batch.tokens_per_step=16777216)
plan() {  # plan LOG ARGUMENT…: a plan that does not fit is printed, too
    local log=$work/$1
    shift
    echo "\$ $program plan llama3-70b ${model[*]} $*"
    "$program" plan llama3-70b "${model[@]}" "$@" > "$log" 2>&1 || true
}
number() { sed -n "s/$2/\1/p" "$work/$1" | head -n 1 | tr -d ,; }

plan plan-flat.log --cluster h100-dgx --world 16384 --set parallel.zero=1
measured "weights" "$(number plan-flat.log '^parameters *\([0-9,]*\).*')"
measured "FLOPs of a token" "$(number plan-flat.log '^FLOPs *\([-+.0-9e]*\) per token.*')"
memory='.*recompute = [^:]*: \([0-9.]*\) GiB of.*'
measured "memory of a rank without a pipeline, GiB" "$(number plan-flat.log "$memory")"

pipeline=(--cluster h100-dgx --world 16384 --set parallel.zero=1 --set parallel.pipeline=16)
plan plan-1f1b.log "${pipeline[@]}"
measured "memory of a rank with a pipeline of 16, GiB" "$(number plan-1f1b.log "$memory")"
measured "bubble, percent of a step" "$(number plan-1f1b.log ' *pipeline bubble *\([0-9.]*\) %.*')"
measured "share of the peak (MFU), percent" "$(number plan-1f1b.log '.*MFU \([0-9.]*\) %.*')"

cat <<'END'

It fits, and two fifths of each step are a bubble: ranks wait until the first micro-batches have
come through the pipeline and the last ones have left it. With four smaller stages on each rank
(interleaved; Narayanan et al. 2021, arXiv 2104.04473) a micro-batch reaches all ranks sooner.

END
plan plan-interleaved.log "${pipeline[@]}" --set parallel.schedule=interleaved \
    --set parallel.stages_per_rank=4
sed -n '/^predicted/,$p' "$work/plan-interleaved.log"
log=plan-interleaved.log
measured "memory of a rank, interleaved, GiB" "$(number $log "$memory")"
measured "bubble, interleaved, percent" "$(number $log ' *pipeline bubble *\([0-9.]*\) %.*')"
measured "MFU, interleaved, percent" "$(number $log '.*MFU \([0-9.]*\) %.*')"
measured "days for 15 trillion tokens" "$(number $log '.*, \([0-9.]*\) days.*')"

cat <<'END'

Meta reports 38 to 43 % of the peak for its own mesh. `--search` tries thousands of others.
docs/planning.md says how well such predictions agree with published runs.
END
