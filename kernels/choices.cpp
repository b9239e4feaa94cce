#include "kernels/choices.h"

#include <sstream>

#ifdef TRAIN_GPT_CUDA
#include "base/error.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"
#include "kernels/attention/cudnn.h"
#include "kernels/attention/engine.h"
#include "kernels/linear/gemm_cublas.h"
#endif

namespace train_gpt {

std::string kernel_platform([[maybe_unused]] const Stream& stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.device.is_cuda()) {
        const size_t cudnn = cuda::cudnn_version();
        return concat(device_name(stream.device), ", ", multiprocessors(stream.device),
                      " multiprocessors, driver ", cuda::driver_version(), ", cuBLASLt ",
                      cublasLtGetVersion(), cudnn ? concat(", cuDNN ", cudnn) : "");
    }
#endif
    return "";
}

std::string kernel_choices([[maybe_unused]] const Stream& stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue)
        return stream.queue->kept<cuda::GemmPlans>().choices() +
               stream.queue->kept<cuda::AttentionEngines>().choices();
#endif
    return "";
}

void set_kernel_choices([[maybe_unused]] Stream& stream,
                        [[maybe_unused]] const std::string& choices) {
#ifdef TRAIN_GPT_CUDA
    if (!stream.queue) return;
    if (!choices.empty() && !choices.ends_with('\n'))
        throw Error(
            "The choices of kernels end in the middle of a line; remove them to choose again.");
    std::string attention, products;
    std::istringstream lines(choices);
    for (std::string line; std::getline(lines, line);)
        (line.starts_with("attention ") ? attention : products) += line + "\n";
    stream.queue->kept<cuda::AttentionEngines>().set_choices(attention);
    stream.queue->kept<cuda::GemmPlans>().set_choices(products);
#endif
}

}  // namespace train_gpt
