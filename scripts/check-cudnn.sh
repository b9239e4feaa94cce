#!/usr/bin/env bash
# Asks cuDNN whether it makes plans for the attention of all presets on GPUs that need not be here,
# and whether they fit into the scratch memory that they are granted
# (test/kernels/cudnn_plans_test.cpp). Nothing is computed. `make test-full` calls it.
#   usage: scripts/check-cudnn.sh
#   TEST=program     default: build/test
# Without CUDA, or with a cuDNN before 9.8 or none, prints that and skips. The last line that it
# prints is "N passed, M failed".
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
set -u
cd "$(dirname "$0")/.." || exit
. scripts/find-cuda.sh
skip() { echo "skipped: cuDNN's plans: $1"; echo "0 passed, 0 failed"; exit; }

find_cuda || skip "there is no CUDA toolkit here"
stub=$cuda_home/lib64/stubs/libcuda.so
[ -e "$stub" ] || skip "the CUDA toolkit in $cuda_home has no stub of the driver library"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT


cat > "$folder/version.cpp" <<'EOF'
#include <cstdio>
#include <dlfcn.h>
int main() {
    void* library = dlopen("libcudnn.so.9", RTLD_NOW);
    void* version = library ? dlsym(library, "cudnnGetVersion") : nullptr;
    std::printf("%zu\n", version ? reinterpret_cast<size_t (*)()>(version)() : 0);
}
EOF
# A driver library that knows every function: those of driver.cpp, and for the others the answer
# that there is no device (100).
nm -D --defined-only "$stub" | sed -n 's/.* [TW] \(cu[A-Z][A-Za-z0-9_]*\)$/\1/p' | sort -u |
    sed 's/.*/extern "C" __attribute__((weak)) int &() { return 100; }/' > "$folder/no_device.cpp"
c=${CXX:-g++}
if ! "$c" -std=c++20 "$folder/version.cpp" -o "$folder/version" -ldl ||
    ! "$c" -std=c++20 -O1 -fPIC -shared -Wl,-soname,libcuda.so.1 -I"$cuda_home/include" \
        test/kernels/cudnn_plans/driver.cpp "$folder/no_device.cpp" -o "$folder/libcuda.so.1"; then
    echo "0 passed, 1 failed"
    exit 1
fi

cudnn=$(cudnn_folders | sed 's|.*|:&/lib|' | tr -d '\n')
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}:$cuda_home/lib64$cudnn
version=$("$folder/version")
[ "$version" -ge 90800 ] || {
    [ "$version" != 0 ] || version=none
    skip "they need cuDNN 9.8 or newer, and here is $version"
}
echo "asking cuDNN $version"
"${TEST:-build/test}" '[plans]'
