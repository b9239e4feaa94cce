#include <dlfcn.h>

#include "base/error.h"
#include "device/cublas_lt.h"
#include "device/nvidia_library.h"

namespace train_gpt::cuda {

namespace {

CublasLt load() {
    static const std::string name = concat("libcublasLt.so.", CUBLAS_VER_MAJOR);
    std::string reason;
    void* const library =
        open_library({.name = name.c_str(), .package = "cublas"}, RTLD_LAZY | RTLD_LOCAL, reason);
    if (!library)
        throw Error("CUDA's library for matrix products cannot be loaded: ", reason,
                    "; install it (libcublas of CUDA ", CUBLAS_VER_MAJOR,
                    ", or pip install nvidia-cublas in an active Python environment) or set "
                    "LD_LIBRARY_PATH to its folder");
    const auto find = [&](auto*& function, const char* symbol) {
        function =
            reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, symbol));
        if (!function)
            throw Error("CUDA's library for matrix products, ", name, ", has no ", symbol,
                        "; install one of CUDA ", CUBLAS_VER_MAJOR);
    };
    CublasLt lt;
    find(lt.create, "cublasLtCreate");
    find(lt.destroy, "cublasLtDestroy");
    find(lt.version, "cublasLtGetVersion");
    find(lt.status_string, "cublasLtGetStatusString");
    find(lt.matmul, "cublasLtMatmul");
    find(lt.algo_check, "cublasLtMatmulAlgoCheck");
    find(lt.algo_attribute, "cublasLtMatmulAlgoConfigGetAttribute");
    find(lt.algo_heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(lt.set_desc, "cublasLtMatmulDescSetAttribute");
    find(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(lt.set_layout, "cublasLtMatrixLayoutSetAttribute");
    find(lt.init_desc, "cublasLtMatmulDescInit_internal");
    find(lt.init_layout, "cublasLtMatrixLayoutInit_internal");
    find(lt.init_preference, "cublasLtMatmulPreferenceInit_internal");
    return lt;
}

}  // namespace

CublasLt& cublas_lt() {
    static CublasLt loaded = load();
    return loaded;
}

}  // namespace train_gpt::cuda
