#!/usr/bin/env bash
# Downloads data sets and prepares them for training, in data/NAME. Called again, it continues where
# it stopped.
#   usage: scripts/data.sh NAME…
#
#   gpt2              GPT-2's vocabulary: encoder.json, vocab.bpe (1.5 MB)
#   tinyshakespeare   Tiny Shakespeare, with a vocabulary of 1,024 tokens trained on it (1 MB)
#   tinystories       TinyStories V2 (GPT-4), with one of 8,192; valid/ has the published validation
#                     stories (2.2 GB)
#   fineweb-edu-10b   FineWeb-Edu, 10 billion GPT-2 tokens: the first 100 of the shards made by
#                     llm.c (20 GB)
#   fineweb-10b       FineWeb's sample of 10 billion tokens, tokenized by llm.c (20 GB)
#   fineweb-edu-text  FineWeb-Edu's sample of 10 billion tokens as published, in Parquet, tokenized
#                     here (29 GB)
#   fineweb-edu-32k   the same texts, with a vocabulary of 32,000 tokens trained on a part of them
#   llama3            the vocabulary of Llama 3, after its licence was accepted on Hugging Face
#                     (HF_TOKEN) (9 MB)
#   qwen3             that of Qwen 2 and 3 (11 MB)
#   smollm2           that of SmolLM2 (2 MB)
#   fineweb-edu-llama3, fineweb-edu-qwen3, fineweb-edu-smollm2
#                     the texts of fineweb-edu-text in these vocabularies
#   hellaswag         HellaSwag's validation set (12 MB), for evaluation.hellaswag and train_gpt
#                     eval --hellaswag: data/hellaswag/published/hellaswag_val.jsonl
#
# and tasks for evaluation.tasks and train_gpt eval --tasks (docs/evaluations.md), from where they
# were first published. The tasks are data/NAME/*.jsonl; what was published is kept in
# data/NAME/published.
#   core              the 22 tasks of CORE, from nanochat's evaluation bundle (162 MB)
#   arc, piqa, hellaswag, openbookqa, winogrande, sciq, boolq, commonsenseqa, mmlu, lambada
#                     as lm-evaluation-harness asks them (< 1 GB in all)
# Each data set has a licence of its own, which you should read.
#
# Environment: DATA_DIR (data), SHARDS (fineweb*: the number of training files), HF_ENDPOINT (a
# mirror of https://huggingface.co), HF_TOKEN (an access token of Hugging Face, for files that need
# one), TRAIN_GPT (build/train_gpt), TOKENIZER (fineweb-edu-text: a vocabulary to use instead of
# GPT-2's). Needs curl.
# Downloads continue after an interruption. Each file is checked with a SHA-256 from this script or,
# for large files on Hugging Face, from its server. The hash of a correct file is kept in
# FILE.sha256 (for sha256sum -c).
# This script knows no hash of the tasks but HellaSwag's. It prints that, and keeps the hash of the
# first download in FILE.first: a later download, also one into a folder to which FILE.first was
# copied, must have the same.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# Installed, it works where it is called.
[ ! -e "$(dirname "$0")/../Makefile" ] || cd "$(dirname "$0")/.."

data=${DATA_DIR:-data}
hub=${HF_ENDPOINT:-https://huggingface.co}
program=${TRAIN_GPT:-build/train_gpt}
[ -x "$program" ] || program=$(command -v train_gpt || echo "$program")

usage() { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; }
stop() { echo "error: $*" >&2; exit 1; }

sha256_of() { sha256sum "$1" | cut -d ' ' -f 1; }

# The SHA-256 of a large file from Hugging Face's server; empty for other files.
published_sha256() {
    curl -sSI "${token[@]}" --connect-timeout 20 --retry 3 "$1" |
        tr -d '\r"' | tr '[:upper:]' '[:lower:]' |
        sed -n 's/^x-linked-etag: *\([0-9a-f]\{64\}\)$/\1/p' | head -n 1
}

fetch() {  # fetch URL FILE [SHA256]
    local token=()
    # It is not sent on to other hosts.
    [[ $1 != "$hub"/* || -z "${HF_TOKEN:-}" ]] || token=(--oauth2-bearer "$HF_TOKEN")
    local url=$1 file=$2 wanted=${3:-} status=0
    local part=$file.part host=${1#*://}
    host=${host%%/*}
    # A file that was found correct is not read again, since there are many shards.
    [ -s "$file" ] && [ "$file.sha256" -nt "$file" ] && return
    mkdir -p "$(dirname "$file")"
    [ -n "$wanted" ] || wanted=$(published_sha256 "$url" || true)
    [ -n "$wanted" ] || ! [ -s "$file.first" ] || wanted=$(cut -d ' ' -f 1 "$file.first")
    if [ ! -s "$file" ]; then
        echo "downloading $url"
        curl -fL "${token[@]}" --connect-timeout 20 --retry 3 -C - -o "$part" "$url" || status=$?
        # If the file was already whole, curl fails with 22 or 33, because the server has nothing to
        # add.
        if [ $status != 0 ] && ! { [ -s "$part" ] && [ -n "$wanted" ] &&
            [ "$(sha256_of "$part")" = "$wanted" ]; }; then
            case $status in
                5 | 6 | 7 | 28 | 35)
                    stop "$host cannot be reached (curl: $status); check the connection and run" \
                        "the same command again, or put
       $url
       into $file by hand" ;;
                22)
                    stop "$host does not serve $url; it may have moved, or need a licence to be" \
                        "accepted there and HF_TOKEN" ;;
                23)
                    stop "$part cannot be written; free some space or set DATA_DIR to another" \
                        "disk, and run the same command again" ;;
                *)
                    stop "the download of $url broke off (curl: $status); run the same command" \
                        "again to continue it" ;;
            esac
        fi
        mv "$part" "$file"
    fi
    local found
    found=$(sha256_of "$file")
    if [ -n "$wanted" ] && [ "$found" != "$wanted" ]; then
        mv "$file" "$file.wrong"
        stop "$file is not what was published: its SHA-256 is $found, not $wanted;" \
            "it was renamed to $file.wrong; run the same command again"
    fi
    if [ -z "$wanted" ]; then
        echo "note: no SHA-256 is known for $file, so it was not checked; its hash $found is kept" \
            "in $file.first, and later downloads must have it"
        printf '%s  %s\n' "$found" "$(basename "$file")" > "$file.first"
    fi
    printf '%s  %s\n' "$found" "$(basename "$file")" > "$file.sha256"
}

gpt2() {
    local from=https://openaipublic.blob.core.windows.net/gpt-2/encodings/main
    # The hashes are those in tiktoken's definition of this encoding.
    fetch $from/encoder.json "$data/gpt2/encoder.json" \
        196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
    fetch $from/vocab.bpe "$data/gpt2/vocab.bpe" \
        1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
}

# tokenize FOLDER ARGUMENTS…, unless the folder is complete and newer than the text, the last
# argument
tokenize() {
    local folder=$1
    shift
    [ "$folder/data.json" -nt "${!#}" ] && grep -q '"complete": true' "$folder/data.json" && return
    [ -x "$program" ] || stop "$program is not built; run make first, or set TRAIN_GPT"
    "$program" tokenize --out "$folder" "$@"
}

tinyshakespeare() {
    local from=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare
    local to=$data/tinyshakespeare
    fetch $from/input.txt "$to/input.txt" \
        86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
    tokenize "$to" --train-vocab 1024 --val-fraction 0.05 "$to/input.txt"
    globs="data.train=$to/train_*.bin data.val=$to/val_*.bin"
}

tinystories() {
    local from=$hub/datasets/roneneldan/TinyStories/resolve/main text=TinyStoriesV2-GPT4
    local to=$data/tinystories
    fetch "$from/$text-train.txt" "$to/$text-train.txt"
    fetch "$from/$text-valid.txt" "$to/$text-valid.txt"
    tokenize "$to" --train-vocab 8192 --val-fraction 0 "$to/$text-train.txt"
    tokenize "$to/valid" --tokenizer "$to" --val-fraction 1 "$to/$text-valid.txt"
    globs="data.train=$to/train_*.bin data.val=$to/valid/val_*.bin"
}

set_number() {  # set_number MOST: n, of files for training
    n=${SHARDS:-$1}
    [[ "$n" =~ ^[0-9]+$ ]] && [ "$n" -ge 1 ] && [ "$n" -le "$1" ] ||
        stop "SHARDS=$n is not a number from 1 to $1"
}

shards() {  # shards DATASET PREFIX NUMBER FOLDER
    local n i
    set_number "$3"
    gpt2
    for i in val_000000 $(seq -f 'train_%06g' 1 "$n"); do
        fetch "$hub/datasets/$1/resolve/main/$2_$i.bin" "$data/$4/$2_$i.bin"
    done
    globs="data.train=$data/$4/$2_train_*.bin data.val=$data/$4/$2_val_*.bin"
}

tasks() {  # tasks NAME URL [SHA256]: downloads a data set and turns it into tasks
    # Beside the tasks, a published file of JSON Lines would be taken for one of them.
    local file=$data/$1/published/${2##*/} end
    mkdir -p "$data/$1/published"
    for end in "" .sha256 .first .part; do  # an earlier version put them there
        [ -e "$data/$1/${2##*/}$end" ] || continue
        mv "$data/$1/${2##*/}$end" "$file$end"
        echo "moved $data/$1/${2##*/}$end to $file$end"
    done
    fetch "$2" "$file" "${3:-}"
    command -v python3 > /dev/null ||
        stop "python3 is missing, which turns $file into tasks;" \
            "install it (sudo apt-get install python3)"
    if ! [ "$data/$1/converted" -nt "$file" ] ||
        ! [ "$data/$1/converted" -nt "$here/tasks.py" ]; then
        "$here/tasks.py" "$1" "$file" "$data/$1"
        touch "$data/$1/converted"  # after all of them have been written
    fi
    echo "evaluate them with train_gpt eval CHECKPOINT --tasks $data/$1/*.jsonl"
    [ "$1" != hellaswag ] || echo "the file for evaluation.hellaswag and eval --hellaswag is $file"
}

published_tasks() {  # published_tasks NAME
    local ai2=https://ai2-public-datasets.s3.amazonaws.com
    local mosaic=https://storage.googleapis.com/ai2-mosaic/public
    case $1 in
        core) tasks core https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip ;;
        arc) tasks arc $ai2/arc/ARC-V1-Feb2018.zip ;;
        piqa) tasks piqa $mosaic/physicaliqa/physicaliqa-train-dev.zip ;;
        hellaswag)
            tasks hellaswag \
                https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl \
                0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588 ;;
        openbookqa) tasks openbookqa $ai2/open-book-qa/OpenBookQA-V1-Sep2018.zip ;;
        winogrande) tasks winogrande $mosaic/winogrande/winogrande_1.1.zip ;;
        sciq) tasks sciq $ai2/sciq/SciQ.zip ;;
        boolq) tasks boolq https://dl.fbaipublicfiles.com/glue/superglue/data/v2/BoolQ.zip ;;
        commonsenseqa)
            tasks commonsenseqa https://s3.amazonaws.com/commensenseqa/dev_rand_split.jsonl ;;
        mmlu) tasks mmlu https://people.eecs.berkeley.edu/~hendrycks/data.tar ;;
        lambada)
            tasks lambada \
                https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl ;;
    esac
}

vocabulary() {  # vocabulary NAME: of a published model
    local model
    case $1 in
        llama3) model=meta-llama/Meta-Llama-3-8B ;;
        qwen3) model=Qwen/Qwen3-0.6B-Base ;;
        smollm2) model=HuggingFaceTB/SmolLM2-135M ;;
    esac
    fetch "$hub/$model/resolve/main/tokenizer.json" "$data/$1/tokenizer.json"
}

# fineweb_edu_texts FOLDER OPTIONS…: tokenizes them with these options into the folder
fineweb_edu_texts() {
    local n i name=$1 to=$data/$1 files=() fresh=1
    local from=$hub/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT
    shift
    set_number 14
    for ((i = 0; i < n; ++i)); do
        files+=("$data/fineweb-edu-text/$(printf %03d "$i")_00000.parquet")
        fetch "$from/${files[i]##*/}" "${files[i]}"
        [ "$to/tokenized" -nt "${files[i]}" ] || fresh=0
    done
    globs="data.train=$to/train_*.bin data.val=$to/val_*.bin"
    [ $fresh = 0 ] || return 0
    [ -x "$program" ] || stop "$program is not built; run make first, or set TRAIN_GPT"
    if [ "$name" = fineweb-edu-32k ] && ! [ -e "$to/vocabulary/tokenizer.json" ]; then
        # The vocabulary is trained on the first file. The shards (1.5 GB) are made again below.
        tokenize "$to/vocabulary" --train-vocab 32000 "${files[0]}"
        rm -f "$to"/vocabulary/{train,val}_*.bin "$to/vocabulary/data.json"
    fi
    "$program" tokenize "${files[@]}" "$@" --out "$to" --val-fraction 0.005
    touch "$to/tokenized"  # after it has ended well
}

[ $# -gt 0 ] || { usage >&2; exit 2; }
case $1 in --help | -h) usage; exit ;; esac
command -v curl > /dev/null || stop "curl is missing; install it (sudo apt-get install curl)"
for name in "$@"; do
    globs=
    case $name in
        gpt2 | tinyshakespeare | tinystories) $name ;;
        shakespeare) name=tinyshakespeare && tinyshakespeare ;;
        llama3 | qwen3 | smollm2) vocabulary "$name" ;;
        fineweb-edu-text)
            [ -n "${TOKENIZER:-}" ] || gpt2
            fineweb_edu_texts "$name" --tokenizer "${TOKENIZER:-$data/gpt2}" ;;
        fineweb-edu-32k) fineweb_edu_texts "$name" --tokenizer "$data/$name/vocabulary" ;;
        fineweb-edu-llama3 | fineweb-edu-qwen3 | fineweb-edu-smollm2)
            vocabulary "${name##*-}"
            fineweb_edu_texts "$name" --tokenizer "$data/${name##*-}" ;;
        fineweb-edu-10b)
            shards karpathy/fineweb-edu-100B-gpt2-token-shards edu_fineweb 100 fineweb-edu-10b ;;
        fineweb-10b) shards kjj0/fineweb10B-gpt2 fineweb 103 fineweb-10b ;;
        core | arc | piqa | hellaswag | openbookqa | winogrande | sciq | boolq | commonsenseqa | \
            mmlu | lambada)
            published_tasks "$name" ;;
        *) echo "error: there is no data set called $name" >&2; usage >&2; exit 2 ;;
    esac
    echo "$data/$name is ready${globs:+; its shards are $globs}"
done
