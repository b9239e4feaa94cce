# shellcheck shell=bash disable=SC2034  # the script that sources this one uses the variables
# Sourced by others: finds the CUDA toolkit for a build. It is CUDA_HOME if that is set and usable, else the newest of the nvcc in
# PATH and those in CUDA_FOLDERS (/usr/local/cuda, /opt/cuda).

# find_cuda: sets cuda_home and cuda_release. If no toolkit is usable, it fails and sets cuda_obstacle.
find_cuda() {
    local nvcc home release
    cuda_home='' cuda_release=''
    cuda_obstacle="there is no nvcc in PATH, CUDA_HOME or ${CUDA_FOLDERS:=/usr/local/cuda /opt/cuda}"
    # shellcheck disable=SC2086  # the folders are words
    for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc)" $(printf '%s/bin/nvcc\n' $CUDA_FOLDERS); do
        [ -n "$nvcc" ] && [ -x "$nvcc" ] || continue
        release=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
        home=$(cd "$(dirname "$nvcc")/.." && pwd)
        if ! [ "${release%%.*}" -ge 13 ] 2> /dev/null; then
            cuda_obstacle="nvcc in $home is of CUDA ${release:-(unknown)}, and 13 or newer is needed"
        elif ! [ -e "$home/include/cublasLt.h" ] && ! [ -e /usr/include/cublasLt.h ]; then
            cuda_obstacle="nvcc is in $home, but cuBLASLt's header is missing (libcublas-dev)"
        elif [ "$(printf '%s\n' "$cuda_release" "$release" | sort -V | tail -n 1)" != "$cuda_release" ]; then
            cuda_home=$home
            cuda_release=$release
        fi
        [ -z "$cuda_home" ] || [ "$nvcc" != "${CUDA_HOME-}/bin/nvcc" ] || break  # as it was asked for
    done
    [ -n "$cuda_home" ]
}
