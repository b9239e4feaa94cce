// cuBLASLt, which multiplies matrices on a GPU. It is loaded when a GPU is first used: relocating
// it takes more than a tenth of a second and 200 MB of memory, more than all else that a start of
// the program needs.
#pragma once
#include <string>

#include <cublasLt.h>

namespace train_gpt::cuda {

struct CublasLt {
    decltype(&cublasLtCreate) create = nullptr;
    decltype(&cublasLtDestroy) destroy = nullptr;
    decltype(&cublasLtGetVersion) version = nullptr;
    decltype(&cublasLtGetStatusString) status_string = nullptr;
    decltype(&cublasLtMatmul) matmul = nullptr;
    decltype(&cublasLtMatmulAlgoCheck) algo_check = nullptr;
    decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_attribute = nullptr;
    decltype(&cublasLtMatmulAlgoGetHeuristic) algo_heuristic = nullptr;
    decltype(&cublasLtMatmulDescSetAttribute) set_desc = nullptr;
    decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
    decltype(&cublasLtMatrixLayoutSetAttribute) set_layout = nullptr;
    // The functions that cublasLt.h's X_Init() call with the size of the object
    decltype(&cublasLtMatmulDescInit_internal) init_desc = nullptr;
    decltype(&cublasLtMatrixLayoutInit_internal) init_layout = nullptr;
    decltype(&cublasLtMatmulPreferenceInit_internal) init_preference = nullptr;
};

/// The library's functions, before which tests put their own. The first call loads the library, for
/// the rest of the process. Throws Error, which says how to install it, if it is not found.
CublasLt& cublas_lt();

}  // namespace train_gpt::cuda
