#include "kernels/cuda.h"
#include "kernels/cuda_kernels.h"

namespace train_gpt::cuda {

void layernorm_forward(Stream& stream, const LayerNormForward& args) { throw Error("layernorm_forward: there is no CUDA kernel yet"); }
void layernorm_backward(Stream& stream, const LayerNormBackward& args) { throw Error("layernorm_backward: there is no CUDA kernel yet"); }
size_t layernorm_scratch_bytes(int64_t M, int64_t C) { return 0; }

}  // namespace train_gpt::cuda
