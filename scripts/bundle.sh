#!/usr/bin/env bash
# Puts a program and the libraries that it needs into one folder, which can be copied to nodes without packages.
#   usage: scripts/bundle.sh PROGRAM FOLDER        `make bundle` calls it
# The node must have glibc (as new as this machine's or newer) and, for GPUs, the NVIDIA driver and CUDA 13's libcudart and
# libcublasLt, in /usr/local/cuda/lib64, the system's folders or LD_LIBRARY_PATH.
set -eu
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
[ $# = 2 ] || { echo "usage: scripts/bundle.sh PROGRAM FOLDER" >&2; exit 2; }

program=$1
folder=$2
largest=60  # MiB

rm -rf "$folder"
mkdir -p "$folder/configs"
cp "$program" "$folder/train_gpt"
strip "$folder/train_gpt"
cp configs/*.json "$folder/configs"
cp LICENSE README.md "$folder"

left_out='^(linux-vdso|ld-linux|libc\.|libm\.|libpthread|libdl|librt|libcuda\.|libcudart|libcublas|libnvidia|libcudnn|libnccl)'
ldd "$folder/train_gpt" | while read -r name arrow path _; do
    [[ $(basename "$name") =~ $left_out ]] && continue
    [ "$arrow" = "=>" ] && [ -e "$path" ] || { echo "error: $program needs $name, which is not found" >&2; exit 1; }
    cp -L "$path" "$folder/$name"
done

# It must start with only the libraries in the folder.
version=$(env -i LD_LIBRARY_PATH="${CUDA_LIBRARIES:-}" "$folder/train_gpt" --version | head -n 1)
size=$(du -sm "$folder" | cut -f 1)
echo "$folder: $version, $size MiB"
if [ "$size" -gt $largest ]; then
    echo "error: the bundle is larger than $largest MiB; leave out architectures with GPU_ARCHS" >&2
    exit 1
fi
