// Stands in for the driver library (libcuda.so.1) on a machine without a GPU, so that cuDNN can
// finish plans for GPUs that are not there: it loads each kernel that it has compiled. Loading
// succeeds here and does nothing; every other function says truthfully that there is no device
// (scripts/check-cudnn.sh generates these).
#include <cuda.h>

namespace {

int loaded;  // its address stands for every library and kernel

}  // namespace

extern "C" {

CUresult cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
    *library = reinterpret_cast<CUlibrary>(&loaded);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char*) {
    *kernel = reinterpret_cast<CUkernel>(&loaded);
    return CUDA_SUCCESS;
}

CUresult cuLibraryUnload(CUlibrary) { return CUDA_SUCCESS; }

}  // extern "C"
