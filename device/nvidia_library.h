// Libraries of NVIDIA's that are loaded when they are wanted, so that the same program starts
// without them.
#pragma once
#include <string>
#include <vector>

namespace train_gpt::cuda {

struct NvidiaLibrary {
    const char* name;         // as the loader knows it: "libnccl.so.2"
    const char* package;      // its folder in NVIDIA's Python packages: "nccl"
    const char* folder = "";  // a variable that names the library's folder: "CUDNN_PATH"
};

/// Paths to try, best first: in the folder that the variable names, or its lib or lib64; the name
/// alone, so that the loader looks, also in LD_LIBRARY_PATH; beside the CUDA runtime of this
/// program; and in the active Python environment (VIRTUAL_ENV, CONDA_PREFIX), in lib and where
/// NVIDIA's packages install libraries. All but the name are files that exist.
std::vector<std::string> places_of(const NvidiaLibrary& library);

/// Opens the first of places_of() that the loader accepts, with dlopen's flags. If there is none,
/// returns null, and `reason` is the loader's: about a file that exists, if there is one.
void* open_library(const NvidiaLibrary& library, int flags, std::string& reason);

/// Opens the compiler that cuDNN and others look for by its name alone, which finds it only once it
/// is loaded if CUDA is not in a folder of the loader's. Does nothing if there is none.
void preload_nvrtc();

}  // namespace train_gpt::cuda
