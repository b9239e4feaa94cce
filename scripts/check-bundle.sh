#!/usr/bin/env bash
# Tries a bundle (scripts/bundle.sh) as on a node without packages: in a root folder with nothing
# but glibc, the bundle and CUDA's libraries, with an empty environment and no loader cache.
#   usage: scripts/check-bundle.sh BUNDLE [CUDA_LIBRARIES]
# Root may make such a root folder; others only leave out the cache.
set -eu
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
[ $# -ge 1 ] || { echo "usage: scripts/check-bundle.sh BUNDLE [CUDA_LIBRARIES]" >&2; exit 2; }

bundle=$(realpath "$1")
cuda=${2:-/usr/local/cuda/lib64}
program=$bundle/train_gpt
loader=$(ldd "$program" | awk '/ld-linux/ { print $1 }')
root=$(mktemp -d "${TMPDIR:-/tmp}/train_gpt-bundle-XXXXXX")
trap 'rm -rf "$root"' EXIT

# glibc, and what of CUDA the program is linked with or loads on GPUs, where nodes have it
mkdir -p "$root$(dirname "$loader")" "$root/usr/local/cuda/lib64" "$root/tmp"
cp -L "$loader" "$root$loader"
ldd "$program" | while read -r name _ path _; do
    case $name in
        libc.* | libm.* | libpthread.* | libdl.* | librt.*)
            mkdir -p "$root$(dirname "$path")"
            cp -L "$path" "$root$path" ;;
        libcudart.*) cp -L "$cuda/$name" "$root/usr/local/cuda/lib64/$name" ;;
    esac
done
for path in "$cuda"/libcublasLt.so.??; do  # hundreds of MB, so a link if possible
    cp -Ll "$path" "$root/usr/local/cuda/lib64" 2> /dev/null ||
        cp -L "$path" "$root/usr/local/cuda/lib64"
done

if [ "$(id -u)" = 0 ] && chroot "$root" "$loader" --version > /dev/null 2>&1; then
    cp -r "$bundle" "$root/bundle"
    # For the loader to find the folder of the program ($ORIGIN), and for the program to start
    # itself again
    mkdir -p "$root/proc/self"
    ln -s /bundle/train_gpt "$root/proc/self/exe"
    cp /proc/meminfo /proc/cpuinfo "$root/proc"
    try() { env -i "$(command -v chroot)" "$root" /bundle/train_gpt "$@"; }
    run=/tmp/run presets=/bundle/configs
else
    echo "note: this user cannot have a root folder of its own, so that the system's libraries" \
        "are found, too"
    # Through the loader, /proc/self/exe is the loader: the program cannot restart itself.
    try() {
        env -i OMP_WAIT_POLICY=passive "$loader" --inhibit-cache \
            --library-path "$bundle:$root/usr/local/cuda/lib64" "$program" "$@"
    }
    run=$root/tmp/run presets=$bundle/configs
fi

try --version | tee "$root/version"
grep -q 'cuBLASLt [0-9]' "$root/version" || {
    echo "error: the program does not load cuBLASLt" >&2
    exit 1
}
tiny=(--set device=cpu --set model.vocab_size=256 --set model.n_layer=1 --set model.n_embd=32
    --set model.n_head=2 --set model.n_ctx=16 --set batch.sequence_length=16
    --set batch.micro_batch=2 --set batch.tokens_per_step=32 --set data.train=synthetic
    --set data.val= --set tokenizer.path= --set schedule.steps=1 --set schedule.tokens=0
    --set schedule.warmup_steps=0 --set run_dir="$run")
try plan "$presets/gpt2-124m.json" "${tiny[@]}"
try train "$presets/gpt2-124m.json" "${tiny[@]}"
try verify "$run/step-00000001"
echo "$1: the program starts, plans and trains with what the bundle, glibc and CUDA have"
