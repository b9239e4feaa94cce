#!/usr/bin/env bash
# Installs missing packages, and downloads cuDNN's headers if a build for GPUs can use them.
#   usage: scripts/setup.sh [-y] [build] [quickstart] [test] [mpi]
#   build       compiler and libraries              quickstart  its text, and what draws loss.png
#   test        Catch2                              mpi         for many ranks under mpirun
#   Without a part: all four; -y: do not ask.
# Installs through apt (Debian, Ubuntu), asking first unless it runs as root, with -y or with
# CI=true; on other systems it prints what to install. Exits with 0 if everything that is needed is
# installed.
set -u

unattended=0
parts=()
for argument in "$@"; do
    case $argument in
        -y) unattended=1 ;;
        build | quickstart | test | mpi) parts+=("$argument") ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
        *)
            echo "error: there is no part \"$argument\"; usage: scripts/setup.sh [-y] [build]" \
                "[quickstart] [test] [mpi]" >&2
            exit 2 ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=(build quickstart test mpi)
[ "${CI:-}" = true ] && unattended=1
[ "$(id -u)" = 0 ] && unattended=1

# shellcheck source=scripts/visibly.sh
. "$(dirname "$0")/visibly.sh"

compiles() {  # compiles HEADER: whether the compiler finds it
    command -v "${CXX:-g++}" > /dev/null &&
        printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" |
        ${CXX:-g++} -E -x c++ - > /dev/null 2>&1
}

# With the headers of cuDNN's frontend, attention on GPUs can use cuDNN. Debian does not package
# them; NVIDIA's Python package has them, the same in each of its builds. If they cannot be
# downloaded, the build goes without them.
# shellcheck source=scripts/find-cuda.sh
. "$(dirname "$0")/find-cuda.sh"
frontend=1.32.0
frontend_sha256=c6006556017a4d1c914c52a556c71b1267f2d6a0500f742e7b4edef539878df0
fetch_cudnn_frontend() {
    local folder work what
    folder=$(dirname "$0")/../third_party
    find_cuda || return
    [ -e "$cuda_home/include/cudnn.h" ] || compiles cudnn.h || [ -n "$(cudnn_folders)" ] || {
        echo "cuDNN was not found, which makes attention on GPUs faster: $get_cudnn, and make again"
        return
    }
    [ ! -e "$folder/cudnn-frontend-$frontend" ] || return
    printf '%s\n' '#include <cudnn_frontend_version.h>' \
        '#if CUDNN_FRONTEND_VERSION < 11300' '#error' '#endif' |
        ${CXX:-g++} -I "$cuda_home/include" -E -x c++ - > /dev/null 2>&1 && return

    work=$(mktemp -d)
    echo "nvidia-cudnn-frontend==$frontend --hash=sha256:$frontend_sha256" > "$work/wanted"
    download() {
        python3 -m pip download --disable-pip-version-check --retries 1 --no-deps \
            --only-binary=:all: --python-version 3.11 --platform manylinux_2_28_x86_64 \
            --require-hashes -r "$work/wanted" -d "$work" > "$work/log" 2>&1
    }
    what="downloading cuDNN's frontend headers (nvidia-cudnn-frontend $frontend) into third_party/"
    if visibly "$what" download &&
        python3 -m zipfile -e "$work"/*.whl "$work/unpacked" 2>> "$work/log"; then
        rm -rf "$folder"/cudnn-frontend-*
        mkdir -p "$folder/cudnn-frontend-$frontend"
        mv "$work/unpacked/include" "$folder/cudnn-frontend-$frontend/"
    else
        echo "they could not be downloaded, so attention on GPUs will not use cuDNN:" \
            "$(tail -n 1 "$work/log")"
    fi
    rm -rf "$work"
}
# Ends the script: all that is needed is installed, so that the headers can be looked for.
ready() {
    case " ${parts[*]} " in *" build "*) fetch_cudnn_frontend ;; esac
    exit 0
}

# Collects the missing packages, by Debian's names.
needed=()
optional=()
want() { needed+=("$@"); }
for part in "${parts[@]}"; do
    case $part in
        build)
            command -v make > /dev/null || want make
            command -v "${CXX:-g++}" > /dev/null || want g++
            compiles nlohmann/json.hpp || want nlohmann-json3-dev
            compiles CLI/CLI.hpp || want libcli11-dev
            compiles xxhash.h || want libxxhash-dev
            compiles pcre2.h || want libpcre2-dev
            compiles utf8proc.h || want libutf8proc-dev
            compiles openssl/ssl.h || want libssl-dev  # TLS between ranks that start without MPI
            compiles zlib.h || optional+=(zlib1g-dev)
            compiles zstd.h || optional+=(libzstd-dev)
            compiles snappy-c.h || optional+=(libsnappy-dev)
            compiles lz4.h || optional+=(liblz4-dev)
            compiles dnnl.hpp || optional+=(libdnnl-dev) ;;
        quickstart)
            [ -n "${DATA:-}" ] || command -v bible > /dev/null || want bible-kjv
            command -v rsvg-convert > /dev/null || optional+=(librsvg2-bin) ;;  # draws the loss
        test)
            compiles catch2/catch_all.hpp || compiles catch2/catch.hpp || want catch2
            # The simulator reads compressed kernels.
            [ -z "${GPUSIM:-}" ] || compiles zstd.h || want libzstd-dev ;;
        mpi)  # training with many ranks under mpirun
            { command -v mpicxx && command -v mpirun; } > /dev/null ||
                want libopenmpi-dev openmpi-bin ;;
    esac
done
[ $((${#needed[@]} + ${#optional[@]})) -gt 0 ] || ready

if ! command -v apt-get > /dev/null; then
    [ ${#needed[@]} -gt 0 ] || ready
    cat >&2 << TXT
error: this system is not Debian or Ubuntu, so install the missing packages yourself: ${needed[*]}
       (these are Debian's names; oneDNN makes training on the CPU faster; zlib, zstd, snappy and \
lz4 are for compressed texts and Parquet)
  Fedora      dnf install gcc-c++ make json-devel cli11-devel xxhash-devel pcre2-devel \
utf8proc-devel openssl-devel zlib-devel libzstd-devel snappy-devel lz4-devel onednn-devel \
catch-devel librsvg2-tools openmpi-devel
  Arch        pacman -S gcc make nlohmann-json cli11 xxhash pcre2 libutf8proc openssl zlib zstd \
snappy lz4 onednn catch2 librsvg openmpi
  Homebrew    brew install gcc make nlohmann-json cli11 xxhash pcre2 utf8proc openssl zlib zstd \
snappy lz4 onednn catch2 librsvg open-mpi     (then make CXX=g++-14)
The package bible-kjv is only the quickstart's text; DATA=my.txt make quickstart uses your own \
text instead.
TXT
    exit 1
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
    if ! command -v sudo > /dev/null; then
        [ ${#needed[@]} -gt 0 ] || ready
        echo "error: packages are missing, and only root may install them; as root, run:" >&2
        echo "  apt-get install --no-install-recommends ${needed[*]} ${optional[*]-}" >&2
        exit 1
    fi
fi

if [ $unattended = 0 ]; then
    echo "These packages are missing: ${needed[*]-} ${optional[*]-}"
    if [ ! -t 0 ]; then
        [ ${#needed[@]} -gt 0 ] || ready
        echo "error: there is no terminal to ask whether to install them;" \
            "run: scripts/setup.sh -y ${parts[*]}" >&2
        exit 1
    fi
    read -r -p "Install them with apt-get${as_root:+ through sudo}? [Y/n] " answer
    case $answer in
        "" | [yY]*) ;;
        *)
            echo "nothing installed"
            [ ${#needed[@]} -gt 0 ] || ready
            exit 1 ;;
    esac
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt_get() {  # apt_get ARGUMENTS…: as root, quietly
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" > "$log" 2>&1
}
install_packages() {
    visibly "installing ${chosen[*]}" apt_get install -y --no-install-recommends "${chosen[@]}"
}
available() { apt-cache policy "$1" 2> /dev/null | grep -q 'Candidate: [^(]'; }

# The lists of packages may be absent (a fresh container) or older than the archive.
update() {
    visibly "reading the lists of packages (apt-get update)" apt_get update || {
        tail -n 3 "$log" >&2
        return 1
    }
}
updated=0
for package in "${needed[@]}" "${optional[@]}"; do
    if ! available "$package"; then
        update || exit 1
        updated=1
        break
    fi
done

chosen=("${needed[@]}")
for package in "${optional[@]}"; do
    if available "$package"; then
        chosen+=("$package")
    else
        case $package in
            libdnnl-dev)
                what="matrix products on the CPU will use the project's own kernel,"
                what+=" which is slower" ;;
            librsvg2-bin) what="the quickstart will draw no loss.png" ;;
            *) what="tokenize will refuse files in its compressed format" ;;
        esac
        echo "$package is not available here: $what"
    fi
done
[ ${#chosen[@]} -gt 0 ] || ready

if ! install_packages && ! { [ $updated = 0 ] && update && install_packages; }; then
    tail -n 5 "$log" >&2
    echo "error: apt could not install ${chosen[*]}; fix the problem above and try again" >&2
    grep -q '^ID=ubuntu' /etc/os-release &&
        echo "       (on Ubuntu they are in universe: sudo add-apt-repository universe)" >&2
    exit 1
fi
ready
