#!/usr/bin/env bash
# Finds the compiler, libraries and toolkits that a build can use. Prints make variables on stdout,
# and on stderr what was found and what that means for the build. The Makefile calls it and keeps
# the variables in build/config.mk.
#   usage: scripts/configure.sh, with the environment that the Makefile sets
# Environment: CXX, CXXFLAGS, CPPFLAGS, LDFLAGS, MARCH, CUDA, MPI, ONEDNN, CUDA_HOME, CUDA_FOLDERS,
# GPU_ARCHS.
[ "${1:-}" != --help ] || { sed -n '1d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit; }
set -u

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Packages for the apt command in messages; libdnnl-dev is optional.
all_packages="g++ nlohmann-json3-dev libcli11-dev libxxhash-dev libpcre2-dev libutf8proc-dev"
all_packages+=" libssl-dev zlib1g-dev libzstd-dev libsnappy-dev liblz4-dev libdnnl-dev"

say() { printf '  %-9s %s\n' "$1" "${*:2}" >&2; }  # say WHAT TEXT…
stop() { printf 'error: %s\n' "$*" >&2; exit 1; }  # stop TEXT…

# --- The compiler ---------------------------------------------------------------------------------
command -v "${CXX%% *}" > /dev/null ||
    stop "there is no C++ compiler ($CXX); install what the build needs with: scripts/setup.sh
       (on Debian and Ubuntu: sudo apt-get install --no-install-recommends $all_packages)"
cat > "$work/compiler.cpp" <<'TXT'
#include <numbers>
#include <span>
#include <version>
#if defined(__clang__) ? __clang_major__ < 16 : __GNUC__ < 11
#error too old
#endif
int main() { return 0; }
TXT
$CXX ${CPPFLAGS-} ${CXXFLAGS-} -std=c++20 -fsyntax-only "$work/compiler.cpp" 2> "$work/log" || {
    head -3 "$work/log" >&2
    stop "$CXX does not compile C++20; use g++ 11 or clang 16 or newer (make CXX=g++-12)"
}
printf 'int main() { return 0; }\n' > "$work/openmp.cpp"
$CXX ${CXXFLAGS-} ${LDFLAGS-} -fopenmp "$work/openmp.cpp" -o "$work/openmp" 2> /dev/null ||
    stop "$CXX cannot build with OpenMP (-fopenmp); install its OpenMP library (libgomp comes" \
        "with g++, clang needs libomp-dev)"
$CXX ${CXXFLAGS-} -march="$MARCH" -dM -E -x c++ /dev/null > "$work/macros" 2> /dev/null ||
    stop "$CXX does not know -march=$MARCH; choose another MARCH, such as native, x86-64-v3" \
        "or armv8-a"
features=
for feature in AVX2:avx2 FMA:fma AVX512F:avx512f AVX512BW:avx512bw AVX512VL:avx512vl \
    AVX512BF16:avx512bf16 AMX_BF16:amx-bf16 ARM_NEON:neon ARM_FEATURE_SVE:sve; do
    grep -q "define __${feature%:*}__ " "$work/macros" && features="$features ${feature#*:}"
done
features=${features# }
# GCC and clang prefer half of AVX-512's width for most processors; kernels that are bound by memory
# are faster with all of it.
case " $features " in *" avx512f "*) vectors=-mprefer-vector-width=512 ;; *) vectors= ;; esac
compiler="$($CXX --version | head -n 1)"
printf 'building train_gpt with:\n' >&2
say compiler "$compiler; kernels for -march=$MARCH (${features:-no vector extensions known here})"

# --- Required headers ---------------------------------------------------------------------------
cat > "$work/headers.cpp" <<'TXT'
#if !__has_include(<nlohmann/json.hpp>)
missing nlohmann-json3-dev
#endif
#if !__has_include(<CLI/CLI.hpp>)
missing libcli11-dev
#endif
#if !__has_include(<xxhash.h>)
missing libxxhash-dev
#endif
#if !__has_include(<pcre2.h>)
missing libpcre2-dev
#endif
#if !__has_include(<utf8proc.h>)
missing libutf8proc-dev
#endif
#if __has_include(<catch2/catch_all.hpp>)
found catch2 3
#elif __has_include(<catch2/catch.hpp>)
found catch2 2
#endif
#if __has_include(<dnnl.hpp>)
found dnnl
#endif
TXT
$CXX ${CPPFLAGS-} ${CXXFLAGS-} -std=c++20 -E -P "$work/headers.cpp" > "$work/headers" 2> /dev/null
missing=$(sed -n 's/^missing //p' "$work/headers" | tr '\n' ' ')
[ -z "$missing" ] || stop "libraries are missing; install them with: scripts/setup.sh
       (on Debian and Ubuntu: sudo apt-get install --no-install-recommends ${missing% })"
catch2=$(sed -n 's/^found catch2 //p' "$work/headers")

# --- oneDNN ---------------------------------------------------------------------------------------
onednn=0
if [ "${ONEDNN:-}" = 0 ]; then
    say oneDNN "not wanted (ONEDNN=0): matrix products on the CPU use the project's own kernel"
elif grep -q '^found dnnl' "$work/headers"; then
    cat > "$work/dnnl.cpp" <<'TXT'
#include <dnnl.h>
#include <cstdio>
int main() {
    const dnnl_version_t* v = dnnl_version();
    const bool openmp = v->cpu_runtime == DNNL_RUNTIME_OMP;
    std::printf("%d.%d.%d%s", v->major, v->minor, v->patch,
                openmp ? "" : " without OpenMP, so its threads are its own");
    return 0;
}
TXT
    if $CXX ${CPPFLAGS-} ${CXXFLAGS-} "$work/dnnl.cpp" ${LDFLAGS-} -ldnnl \
        -o "$work/dnnl" 2> "$work/log"; then
        onednn=1
        say oneDNN "$("$work/dnnl" 2> /dev/null): matrix products on the CPU go through it"
    else
        say oneDNN "its headers are here, but it does not link: matrix products on the CPU use" \
            "the project's own kernel"
    fi
else
    say oneDNN "not found: matrix products on the CPU use the project's own kernel, which is" \
        "slower (apt-get install libdnnl-dev)"
fi

# --- OpenSSL --------------------------------------------------------------------------------------
cat > "$work/tls.cpp" <<'TXT'
#include <openssl/ssl.h>
#include <cstdio>
int main() {
    std::printf("%s", OpenSSL_version(OPENSSL_VERSION));
    SSL_CTX* context = SSL_CTX_new(TLS_method());
    return SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1 ? 0 : 1;
}
TXT
tls=0
if $CXX ${CPPFLAGS-} ${CXXFLAGS-} "$work/tls.cpp" ${LDFLAGS-} -lssl -lcrypto \
    -o "$work/tls" 2> "$work/log"; then
    tls=1
    version=$("$work/tls" 2> /dev/null)
    say libssl "${version:-OpenSSL}: ranks can meet over TCP, through TLS 1.3"
else
    say libssl "not found: many ranks start through MPI only (apt-get install libssl-dev)"
fi

# --- zlib, libzstd, snappy and liblz4 -------------------------------------------------------------
compressed() {  # compressed HEADER LIBRARY CALL: whether a program with it links
    printf '#include <%s>\nint main() { return (%s) == nullptr; }\n' "$1" "$3" \
        > "$work/compressed.cpp"
    $CXX ${CPPFLAGS-} ${CXXFLAGS-} "$work/compressed.cpp" ${LDFLAGS-} "-l$2" \
        -o "$work/compressed" 2> "$work/log"
}
zlib=0
zstd=0
if compressed zlib.h z 'zlibVersion()'; then
    zlib=1
    say zlib "tokenize reads .gz files, and Parquet with gzip"
else
    say zlib "not found: tokenize refuses .gz files, and Parquet with gzip" \
        "(apt-get install zlib1g-dev)"
fi
if compressed zstd.h zstd 'ZSTD_versionString()'; then
    zstd=1
    say libzstd "tokenize reads .zst files, and Parquet with zstd"
else
    say libzstd "not found: tokenize refuses .zst files, and Parquet with zstd" \
        "(apt-get install libzstd-dev)"
fi
snappy=0
lz4=0
if compressed snappy-c.h snappy 'snappy_max_compressed_length(1) == 0 ? nullptr : ""'; then
    snappy=1
    say snappy "tokenize reads Parquet with snappy"
else
    say snappy "not found: tokenize refuses Parquet with snappy, which most writers use" \
        "(apt-get install libsnappy-dev)"
fi
if compressed lz4.h lz4 'LZ4_versionString()'; then
    lz4=1
    say liblz4 "tokenize reads Parquet with LZ4"
else
    say liblz4 "not found: tokenize refuses Parquet with LZ4 (apt-get install liblz4-dev)"
fi

# --- CUDA, cuDNN, NCCL ----------------------------------------------------------------------------
cuda=0
obstacle=
cudnn_frontend=
cudnn_include=
nccl=
. scripts/find-cuda.sh
if [ "$CUDA" = 0 ]; then
    say CUDA "not wanted (CUDA=0)"
elif ! find_cuda; then
    obstacle=$cuda_obstacle
elif [ "$CUDA" = auto ]; then
    say CUDA "nvcc $cuda_release ($cuda_home) is here, but no GPU is seen:" \
        "this build trains on the CPU (CUDA=1 builds for GPUs as well)"
else
    cuda=1
fi
if [ -n "$obstacle" ]; then
    [ "$CUDA" = 1 ] &&
        stop "CUDA=1, but $obstacle; install the CUDA toolkit, set CUDA_HOME, or build with CUDA=0"
    say CUDA "$obstacle: this build trains on the CPU"
fi
if [ "$cuda" = 1 ]; then
    # If nvidia-smi fails, its output has no architectures.
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null |
        grep -xE '[0-9]+\.[0-9]+' | tr -d . | sort -un)
    archs=${GPU_ARCHS:-$(echo "$found" | awk '$1 >= 80' | paste -sd ' ')}
    [ -n "$archs" ] && [ "$archs" != all ] || archs=$(all_archs "$cuda_home/bin/nvcc")
    if [ "$cuda_release" = 13.0 ] && [[ " $archs" =~ \ 12[01] ]]; then
        archs=$(printf '%s\n' $archs | sed 's/^12[01].*/90/' | sort -nu | paste -sd ' ')
        say CUDA "nvcc 13.0 makes wrong code for architectures 120 and 121 (13.1 does not):" \
            "there the driver compiles kernels for an older one"
    fi
    say CUDA "nvcc $cuda_release ($cuda_home): this build trains on GPUs of architecture $archs" \
        "(GPU_ARCHS=) and on the CPU"
    # header NAME [FOLDER…]: its path in the toolkit, among the system's headers or in the folders
    header() {
        local folder name=$1
        shift
        for folder in "$cuda_home/include" /usr/include /usr/include/x86_64-linux-gnu \
            /usr/include/aarch64-linux-gnu "$@"; do
            [ -e "$folder/$name" ] && { echo "$folder/$name"; return; }
        done
    }
    value() { sed -n "s/^#define $2 *\([0-9]*\).*/\1/p" "$1" | head -n 1; }
    mapfile -t folders < <(cudnn_folders)
    path=$(header cudnn_version.h "${folders[@]/%//include}")
    if [ -z "$path" ]; then
        say cuDNN "its headers were not found: attention on GPUs uses the project's own kernels" \
            "($get_cudnn)"
    else
        cudnn_include=$(dirname "$path")
        version=$(value "$path" CUDNN_MAJOR).$(value "$path" CUDNN_MINOR)
        version+=.$(value "$path" CUDNN_PATCHLEVEL)
        # Older frontends lack options that attention needs.
        printf '%s\n' '#include <cudnn_frontend_version.h>' \
            '#if CUDNN_FRONTEND_VERSION < 11300' '#error' '#endif' > "$work/frontend.cpp"
        for folder in third_party/cudnn-frontend-*/include "$cuda_home/include" /usr/include; do
            [ -e "$folder/cudnn_frontend.h" ] &&
                $CXX -I "$folder" -E "$work/frontend.cpp" > /dev/null 2>&1 &&
                { cudnn_frontend=$folder; break; }
        done
        if [ -n "$cudnn_frontend" ]; then
            say cuDNN "$version: attention on GPUs can use it where it is found at run time" \
                "(frontend in $cudnn_frontend)"
        else
            say cuDNN "$version: not used, since its frontend headers are missing" \
                "(scripts/setup.sh build fetches them)"
        fi
    fi
    path=$(header nccl.h)
    if [ -z "$path" ]; then
        say NCCL "its header was not found: this build trains on one GPU at a time" \
            "(apt-get install libnccl-dev)"
    else
        version=$(value "$path" NCCL_MAJOR).$(value "$path" NCCL_MINOR)
        version+=.$(value "$path" NCCL_PATCH)
        if [ "$(value "$path" NCCL_MAJOR)" = 2 ] &&
            [ "$(value "$path" NCCL_MINOR)" -ge 18 ]; then  # ncclCommSplit
            nccl=$(dirname "$path")
            say NCCL "$version: several GPUs can train together where it is found at run time"
        else
            say NCCL "$version: too old (2.18 is needed): this build trains on one GPU at a time"
        fi
    fi
fi

# --- MPI ------------------------------------------------------------------------------------------
# The compiler wrapper knows where the library is. Only the C interface is used, so the C++ library
# is not linked.
mpi_packages="libopenmpi-dev openmpi-bin"
others=": srun, torchrun or ssh can start many ranks"
[ "$tls" = 1 ] || others=": without libssl nor MPI, this build trains on one rank"
mpi=0
mpi_includes=
mpi_libraries=
# try_mpi COMPILE-OPTIONS LINK-OPTIONS, as the wrapper prints them; whether a program builds with
# them
try_mpi() {
    mpi_includes=$(printf '%s\n' $1 | sed -n 's/^-I/-isystem /p' |
        grep -vx -- '-isystem /usr/include' | tr '\n' ' ')
    mpi_libraries=$(printf '%s\n' $2 | grep -E '^-(L|l|Wl,|pthread)' |
        grep -vxE -- '-l(mpi_cxx|mpicxx|mpichcxx|mpi\+\+)' | tr '\n' ' ')
    $CXX ${CPPFLAGS-} ${CXXFLAGS-} $mpi_includes "$work/mpi.cpp" ${LDFLAGS-} $mpi_libraries \
        -o "$work/mpi" 2> "$work/log"
}
if [ "$MPI" = 0 ]; then
    say MPI "not wanted (MPI=0)$others"
elif ! mpicxx=$(command -v mpicxx); then
    [ "$MPI" = 1 ] &&
        stop "MPI=1, but there is no mpicxx in PATH; install an MPI library" \
            "(apt-get install $mpi_packages)"
    say MPI "not found$others (scripts/setup.sh mpi installs it for mpirun)"
else
    cat > "$work/mpi.cpp" <<'TXT'
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <cstdio>
#if MPI_VERSION < 3
#error too old
#endif
int main() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(text, &length);  // allowed before MPI_Init
    for (int i = 0; i < length && text[i] != ',' && text[i] != '\n'; ++i)
        std::putchar(text[i] == '\t' ? ' ' : text[i]);
}
TXT
    if try_mpi "$("$mpicxx" -showme:compile 2> /dev/null)" \
        "$("$mpicxx" -showme:link 2> /dev/null)" ||
        try_mpi "$("$mpicxx" -compile_info 2> /dev/null)" "$("$mpicxx" -link_info 2> /dev/null)" ||
        try_mpi "$("$mpicxx" -show 2> /dev/null)" "$("$mpicxx" -show 2> /dev/null)"; then
        mpi=1
        version=$("$work/mpi" 2> /dev/null || echo "$mpicxx")
        starters=mpirun$([ "$tls" = 0 ] || echo ", srun, torchrun or ssh")
        say MPI "$version: $starters can start many ranks"
    else
        [ "$MPI" = 1 ] && {
            head -3 "$work/log" >&2
            stop "MPI=1, but no program builds with the flags that $mpicxx gives"
        }
        say MPI "$mpicxx is here, but no program builds with its flags$others"
    fi
fi

case $catch2 in
    2) say Catch2 "2: the tests can be built" ;;
    3) say Catch2 "3: the tests can be built" ;;
    *) say Catch2 "not found: make test needs it (scripts/setup.sh test)" ;;
esac

cat <<TXT
VECTORS := $vectors
HAVE_ONEDNN := $onednn
HAVE_TLS := $tls
HAVE_ZLIB := $zlib
HAVE_ZSTD := $zstd
HAVE_SNAPPY := $snappy
HAVE_LZ4 := $lz4
CATCH2 := $catch2
HAVE_CUDA := $cuda
NVCC := ${cuda_home:+$cuda_home/bin/nvcc}
CUDA_PATH := ${cuda_home-}
CUDA_ARCHS := ${archs-}
CUDNN_FRONTEND := $cudnn_frontend
CUDNN_INCLUDE := $cudnn_include
NCCL := $nccl
HAVE_MPI := $mpi
MPI_INCLUDES := $mpi_includes
MPI_LIBRARIES := $mpi_libraries
TXT
