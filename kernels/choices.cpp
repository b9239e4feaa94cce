#include "kernels/choices.h"

#include <sstream>

#include "kernels/cuda.h"

namespace train_gpt {

void set_kernel_settings([[maybe_unused]] Stream& stream,
                         [[maybe_unused]] const KernelSettings& settings) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue)
        cuda::set_gemm_settings(*stream.queue,
                                {.autotune = settings.autotune, .tf32 = settings.tf32});
#endif
}

std::string kernel_choices([[maybe_unused]] const Stream& stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue)
        return cuda::gemm_choices(*stream.queue) + cuda::attention_choices(*stream.queue);
#endif
    return "";
}

void set_kernel_choices([[maybe_unused]] Stream& stream,
                        [[maybe_unused]] const std::string& choices) {
#ifdef TRAIN_GPT_CUDA
    if (!stream.queue) return;
    std::string attention, products;
    std::istringstream lines(choices);
    for (std::string line; std::getline(lines, line);)
        (line.starts_with("attention ") ? attention : products) += line + "\n";
    cuda::set_attention_choices(*stream.queue, attention);
    cuda::set_gemm_choices(*stream.queue, products);
#endif
}

}  // namespace train_gpt
