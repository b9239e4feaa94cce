#!/usr/bin/env bash
# From a fresh clone to a trained model: installs what is missing, builds, prepares a text, trains on it, draws the loss.
#   usage: make quickstart [DATA=my.txt]
# Environment: DATA (a text file of yours; default: the King James Bible from the Debian package bible-kjv), RUN_DIR (the
# run's folder), QUICKSTART_ARGS (more arguments for `train_gpt train`). Called again, it goes on where it was.
set -eu
cd "$(dirname "$0")/.."

say() { printf '\n== %3d s: %s\n' $SECONDS "$*"; }

name=quickstart
if [ -n "${DATA:-}" ]; then
    [ -f "$DATA" ] && [ -r "$DATA" ] || { echo "error: DATA=$DATA is not a readable file; check the path" >&2; exit 1; }
    # Another text is another run, and so is the same file with other content.
    name=quickstart-$(basename "${DATA%.*}" | tr -c 'A-Za-z0-9\n' -)-$(cksum < "$DATA" | cut -d ' ' -f 1)
fi
folder=data/$name
run_dir=${RUN_DIR:-runs/$name}

prepare_text() {
    mkdir -p "$folder"
    text=$DATA
    if [ -z "$DATA" ]; then
        text=$folder/bible.txt
        [ -s "$text" ] || command -v bible > /dev/null ||
            { echo "error: the package bible-kjv is not installed; make quickstart DATA=my.txt takes a text of yours" >&2; exit 1; }
        [ -s "$text" ] || { bible -f 'gen1:1-rev22:21' > "$text.tmp" && mv "$text.tmp" "$text"; }
    fi
}
DATA=${DATA:-}

say "packages"
if [ "$(id -u)" = 0 ] || [ "${CI:-}" = true ]; then
    scripts/setup.sh build
    scripts/setup.sh quickstart &  # the rest comes while the compiler is at work
    say "build"
    ${MAKE:-make} --no-print-directory
    wait $! || true  # without gnuplot there is no picture, but a model
else
    scripts/setup.sh build quickstart
    say "build"
    ${MAKE:-make} --no-print-directory
fi

say "data"
prepare_text
shards() { ls "$folder"/"$1"_*.bin > /dev/null 2>&1; }
if [ "$folder/tokenizer.json" -nt "$text" ] && shards train && shards val; then
    echo "$folder has been prepared before"
else
    # The end of a text serves for validation however few documents it has; JSON Lines and compressed files have many.
    split=(--val-split tail)
    case $text in *.json | *.jsonl | *.ndjson | *.gz | *.zst) split=() ;; esac
    build/train_gpt tokenize "$text" --train-vocab 4096 --out "$folder" --val-fraction 0.05 "${split[@]}"
fi

say "training"
settings=(--set "run_dir=$run_dir")
if [ -n "$DATA" ]; then
    settings+=(--set "tokenizer.path=$folder/tokenizer.json" --set "data.train=$folder/train_*.bin"
        --set "data.val=$folder/val_*.bin" --set sampling.prompt=
        --set evaluation.max_tokens=200000)  # of a large text, the end would take longer than the training
fi
# shellcheck disable=SC2086  # the arguments are words
build/train_gpt train configs/quickstart.json "${settings[@]}" ${QUICKSTART_ARGS:-}

say "done"
scripts/plot.sh "$run_dir" || true
checkpoint=$(ls -d "$run_dir"/step-*[0-9] 2> /dev/null | tail -n 1 || true)
cat << TXT

The run is in $run_dir: metrics.jsonl, loss.png, and the model in ${checkpoint:-step-*}.
  let it write           build/train_gpt sample ${checkpoint:-CHECKPOINT} --prompt "In the beginning"
  train on your text     make quickstart DATA=my.txt
  change what it does    configs/quickstart.json, or --set key=value (build/train_gpt train --help)
TXT
