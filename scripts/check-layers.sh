#!/usr/bin/env bash
# Checks that no source file includes a header of a higher layer. `make lint` calls it.
#   usage: scripts/check-layers.sh
# Prints the includes that go up, and exits with 1 if there are any.
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
cd "$(dirname "$0")/.." || exit

# Each directory, and those whose headers it may include besides its own.
layers='
base
device      base
tokenizer   base
dataloader  base tokenizer
kernels     base device
parallel    base device kernels
model       base device kernels parallel
training    base device kernels parallel model tokenizer dataloader'

known=$(awk 'NF { print $1 }' <<< "$layers" | tr '\n' ' ')
code=0
while read -r directory below; do
    for file in "$directory"/*.{h,cpp,cu,cuh} "$directory"/*/*.{h,cpp,cu,cuh}; do
        [ -e "$file" ] || continue
        while IFS=: read -r line header; do
            other=${header%%/*}
            case " $directory $below " in *" $other "*) continue ;; esac
            case " $known test " in *" $other "*) ;; *) continue ;; esac
            echo "$file:$line includes $header, but $directory/ may only include ${below:-nothing else}"
            code=1
        done < <(awk -F'"' '/^ *# *include "/ { print FNR ":" $2 }' "$file")
    done
done < <(grep . <<< "$layers")
exit $code
