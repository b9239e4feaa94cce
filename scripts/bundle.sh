#!/usr/bin/env bash
# Puts programs and the libraries that they need into one folder, which can be copied to nodes
# without packages.
#   usage: scripts/bundle.sh FOLDER TRAIN_GPT [PROGRAM…]        `make bundle` calls it
# The node must have glibc (as new as this machine's or newer) and, for GPUs, the NVIDIA driver and
# CUDA 13's libcudart and libcublasLt, in /usr/local/cuda/lib64, the system's folders or
# LD_LIBRARY_PATH. cuDNN also needs CUDA's libnvrtc.
set -eu
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
[ $# -ge 2 ] || { echo "usage: scripts/bundle.sh FOLDER TRAIN_GPT [PROGRAM…]" >&2; exit 2; }

folder=$1
shift
largest=$((60 * $#))  # MiB

rm -rf "$folder"
mkdir -p "$folder/configs"
cp -r configs/*.json configs/clusters "$folder/configs"
cp LICENSE README.md "$folder"

of_glibc='linux-vdso|ld-linux|libc\.|libm\.|libpthread|libdl|librt'
of_nvidia='libcuda\.|libcudart|libcublas|libnvidia|libcudnn|libnccl'
left_out="^($of_glibc|$of_nvidia)"
for program; do
    cp "$program" "$folder"
    strip "$folder/$(basename "$program")"
    ldd "$program" | while read -r name arrow path _; do
        [[ $(basename "$name") =~ $left_out ]] && continue
        [ "$arrow" = "=>" ] && [ -e "$path" ] || {
            echo "error: $program needs $name, which is not found" >&2
            exit 1
        }
        cp -L "$path" "$folder/$name"
    done
done

# It must work with only the libraries in the folder.
output=$("$(dirname "$0")/check-bundle.sh" "$folder" "${CUDA_LIBRARIES:-}" 2>&1) || {
    printf '%s\nerror: the bundle lacks what it needs\n' "$output" >&2
    exit 1
}
version=$(grep -m 1 '^train_gpt ' <<< "$output")
size=$(du -sm "$folder" | cut -f 1)
echo "$folder: $version, $size MiB"
if [ "$size" -gt $largest ]; then
    echo "error: the bundle is larger than $largest MiB; leave out architectures with GPU_ARCHS" >&2
    exit 1
fi
