#include "kernels/cuda.h"
#include "kernels/cuda_kernels.h"

namespace train_gpt::cuda {

void norm_partials(Stream& stream, std::span<const NormSegment> segments) { throw Error("norm_partials: there is no CUDA kernel yet"); }
void finish_norm(Stream& stream, StepState* state, const double* partials, std::span<const int64_t> counts, float scale,
                 float clip) { throw Error("finish_norm: there is no CUDA kernel yet"); }
void adamw(Stream& stream, std::span<const AdamWSegment> segments, const AdamWStep& args) { throw Error("adamw: there is no CUDA kernel yet"); }

}  // namespace train_gpt::cuda
