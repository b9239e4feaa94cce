# shellcheck shell=bash disable=SC2034  # the script that sources this one uses the variables
# Sourced by others: finds the CUDA toolkit for a build, and cuDNN. The toolkit is CUDA_HOME if that
# is set and usable, else the newest of the nvcc in PATH and those in CUDA_FOLDERS (/usr/local/cuda,
# /opt/cuda).

get_cudnn="pip install nvidia-cudnn-cu13 in an active Python environment, or set CUDNN_PATH to"
get_cudnn+=" cuDNN's folder"

# cudnn_folders: the folders of cuDNN besides the toolkit's and the system's: CUDNN_PATH, and that
# of NVIDIA's package in the active Python environment. Each may have include/ and lib/. The program
# looks in the same places (kernels/attention/cudnn.h).
cudnn_folders() {
    local folder
    for folder in "${CUDNN_PATH-}" "${VIRTUAL_ENV-}"/lib/python3*/site-packages/nvidia/cudnn \
        "${CONDA_PREFIX-}" "${CONDA_PREFIX-}"/lib/python3*/site-packages/nvidia/cudnn; do
        [ -z "$folder" ] || [ ! -d "$folder" ] || echo "$folder"
    done
}

# all_archs NVCC: those that together run on every GPU from sm_80 on without being compiled at the
# start, as far as this nvcc knows them. Code for 80 runs on all of 8.x, code for 100 on 10.x and
# code for 120 on 12.x.
all_archs() {
    local known arch
    known=$("$1" --list-gpu-arch 2> /dev/null)
    printf '80 90'
    for arch in 100 120; do
        ! grep -qx "compute_$arch" <<< "$known" || printf ' %s' "$arch"
    done
}

# find_cuda: sets cuda_home and cuda_release. If no toolkit is usable, it fails and sets
# cuda_obstacle.
find_cuda() {
    local nvcc home release
    cuda_home='' cuda_release=''
    : "${CUDA_FOLDERS:=/usr/local/cuda /opt/cuda}"
    cuda_obstacle="there is no nvcc in PATH, CUDA_HOME or $CUDA_FOLDERS"
    # shellcheck disable=SC2086  # the folders are words
    for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc)" \
        $(printf '%s/bin/nvcc\n' $CUDA_FOLDERS); do
        [ -n "$nvcc" ] && [ -x "$nvcc" ] || continue
        release=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
        home=$(cd "$(dirname "$nvcc")/.." && pwd)
        if ! [ "${release%%.*}" -ge 13 ] 2> /dev/null; then
            release=${release:-(unknown)}
            cuda_obstacle="nvcc in $home is of CUDA $release, and 13 or newer is needed"
        elif ! [ -e "$home/include/cublasLt.h" ] && ! [ -e /usr/include/cublasLt.h ]; then
            cuda_obstacle="nvcc is in $home, but cuBLASLt's header is missing (libcublas-dev)"
        elif [ "$(printf '%s\n' "$cuda_release" "$release" | sort -V | tail -n 1)" \
            != "$cuda_release" ]; then
            cuda_home=$home
            cuda_release=$release
        fi
        # The one that was asked for is taken, whichever are newer.
        [ -z "$cuda_home" ] || [ "$nvcc" != "${CUDA_HOME-}/bin/nvcc" ] || break
    done
    [ -n "$cuda_home" ]
}
