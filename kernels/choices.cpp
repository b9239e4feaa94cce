#include "kernels/choices.h"

#include "kernels/cuda.h"

namespace train_gpt {

void set_kernel_settings([[maybe_unused]] Stream& stream, [[maybe_unused]] const KernelSettings& settings) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue) cuda::set_gemm_settings(*stream.queue, {.autotune = settings.autotune, .tf32 = settings.tf32});
#endif
}

std::string kernel_choices([[maybe_unused]] const Stream& stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue) return cuda::gemm_choices(*stream.queue);
#endif
    return "";
}

void set_kernel_choices([[maybe_unused]] Stream& stream, [[maybe_unused]] const std::string& choices) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue) cuda::set_gemm_choices(*stream.queue, choices);
#endif
}

}  // namespace train_gpt
