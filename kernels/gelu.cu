#include "kernels/cuda.h"
#include "kernels/cuda_kernels.h"

namespace train_gpt::cuda {

void gelu_forward(Stream& stream, Tensor out, Tensor x) { throw Error("gelu_forward: there is no CUDA kernel yet"); }

}  // namespace train_gpt::cuda
