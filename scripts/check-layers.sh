#!/usr/bin/env bash
# Checks that no source file includes a header of a higher layer, that no headers include each other
# in a circle, and that no parts of training/, parallel/ and model/ do (a header with its sources is
# a part; a few named includes are excepted). That no type's name is defined twice in a namespace:
# the linker would merge their functions. That tests include Catch2 through test/catch.h alone,
# which knows the headers of both of its versions. That no line has more than 100 columns: of the
# sources, the scripts in shell and Python, the pages in training/ (HTML, CSS and JavaScript),
# Makefile, Containerfile and scripts/cluster/*.yaml. In training/ and parallel/ also that no folder
# has more than 25 headers and no source, nor a file of JavaScript, more than 450 lines. `make lint`
# calls it.
#   usage: scripts/check-layers.sh
# Prints the includes, lines, folders and files that are wrong, and exits with 1 if there are any.
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
model/families base device kernels parallel model
training/config base device kernels parallel model model/families tokenizer dataloader
training    base device kernels parallel model model/families training/config tokenizer dataloader'

sources=(-name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
known=$(awk 'NF { print $1 }' <<< "$layers" | tr '\n' ' ')
code=0
while read -r directory below; do
    while IFS= read -r file; do
        case $directory:$file in
            model:model/families/* | training:training/config/*) continue ;;
        esac
        while IFS=: read -r line header; do
            other=${header%%/*}
            case $header in model/families/* | training/config/*) other=${header%/*} ;; esac
            case " $directory $below " in *" $other "*) continue ;; esac
            case " $known test " in *" $other "*) ;; *) continue ;; esac
            echo "$file:$line includes $header, but $directory/ may only include" \
                "${below:-nothing else}"
            code=1
        done < <(awk -F'"' '/^ *# *include "/ { print FNR ":" $2 }' "$file")
    done < <(find "$directory" \( "${sources[@]}" \))
done < <(grep . <<< "$layers")

while IFS= read -r include; do
    echo "$include: tests include test/catch.h instead, which works with Catch2 2 and 3"
    code=1
done < <(grep -rn --include='*.cpp' --include='*.h' --exclude=catch.h '<catch2/' test)

includes() {  # includes FILE…: "FILE HEADER" for each include of the project's headers
    awk -F'"' '/^ *# *include "/ { print FILENAME, $2 }' "$@"
}
circle() {  # circle WHAT: reads pairs, of which the first includes the second, and prints circles
    loop=$(tsort 2>&1 > /dev/null | sed -n 's/^tsort: //p' | grep -v 'input contains' || true)
    [ -z "$loop" ] || { echo "$1 include each other in a circle: ${loop//$'\n'/ }"; code=1; }
}
read -ra directories <<< "$known"
mapfile -t headers < <(find "${directories[@]}" -name '*.h' -o -name '*.cuh')
circle headers < <(includes "${headers[@]}")
# "PART PART": a source of the first includes the second, which implements what the first's header
# declares.
exceptions='parallel/world parallel/launch/membership
parallel/communicator parallel/communicator_kinds
parallel/watchdog/watchdog parallel/watchdog/(hub|spoke)
model/families/family model/families/(decoder_settings|gpt2|gpt_oss|llama|mistral|mixtral|olmoe)
model/families/family model/families/(other|qwen.*)'
for directory in training parallel model; do
    mapfile -t files < <(find "$directory" -name '*.h' -o -name '*.cpp' -o -name '*.cu')
    circle "parts of $directory/" < <(includes "${files[@]}" |
        sed -E 's/\.(h|cpp|cu)( |$)/\2/g' | sort -u |
        awk -v within="$directory/" '$1 != $2 && index($2, within) == 1' | grep -vxE "$exceptions")
done

# Types begin a line, as clang-format has it, and so do namespaces.
while read -r type files; do
    echo "$type is defined in several files: $files"
    code=1
done < <(find "${directories[@]}" test "${sources[@]}" | sort | xargs awk '
    FNR == 1 { depth = hidden = 0 }
    /^namespace.*{/ { names[++depth] = NF == 2 ? "" : $2; if (NF == 2) ++hidden }
    /^}.*\/\/ namespace/ && depth { if (names[depth--] == "") --hidden }
    /^(struct|class|enum|enum class) [A-Za-z0-9_]+( final)?( :.*)?( {.*)?$/ && !hidden {
        type = ""
        for (i = 1; i <= depth; ++i) type = type names[i] "::"
        type = type ($2 == "class" ? $3 : $2)
        sub(/:$/, "", type)
        if (!seen[type, FILENAME]++) { files[type] = files[type] " " FILENAME; ++count[type] }
    }
    END { for (type in count) if (count[type] > 1) print type files[type] }')

while IFS= read -r line; do
    echo "$line has more than 100 columns"
    code=1
done < <({
    find "${directories[@]}" scripts test \
        \( "${sources[@]}" -o -name '*.sh' -o -name '*.py' -o -name '*.yaml' \) -print0
    find training \( -name '*.js' -o -name '*.css' -o -name '*.html' \) -print0
    printf '%s\0' train_gpt.cu Makefile Containerfile .ci/run
} | sort -z | xargs -0 env LC_ALL=C.UTF-8 grep -nE '^.{101,}$' /dev/null | cut -d : -f 1,2)

most_headers=25 most_lines=450
while read -r count folder; do
    [ "$count" -le $most_headers ] || {
        echo "$folder has $count headers, more than $most_headers; divide it by subjects"
        code=1
    }
done < <(find training parallel -name '*.h' -printf '%h\n' | sort | uniq -c)
while read -r count file; do
    [ "$count" -le $most_lines ] || {
        echo "$file has $count lines, more than $most_lines; divide it by subjects"
        code=1
    }
done < <(find training parallel \( "${sources[@]}" -o -name '*.js' \) \
    -exec grep -c '' /dev/null {} + |
    sed -E 's/^(.*):([0-9]+)$/\2 \1/')
exit $code
