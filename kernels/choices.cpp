#include "kernels/choices.h"

#include <sstream>

#ifdef TRAIN_GPT_CUDA
#include "base/error.h"
#include "device/cublas_lt.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"
#include "kernels/attention/cudnn.h"
#include "kernels/attention/engine.h"
#include "kernels/experts/grouped_tile.h"
#include "kernels/experts/grouped_ways.h"
#include "kernels/linear/gemm_cublas.h"
#endif

namespace train_gpt {

std::string kernel_platform([[maybe_unused]] const Stream& stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.device.is_cuda()) {
        const size_t cudnn = cuda::cudnn_version();
        return concat(device_name(stream.device), ", ", multiprocessors(stream.device),
                      " multiprocessors, driver ", cuda::driver_version(), ", cuBLASLt ",
                      cuda::cublas_lt().version(), cudnn ? concat(", cuDNN ", cudnn) : "",
                      cudnn && !stream.settings.deterministic ? ", unordered sums allowed" : "",
                      cuda::limits_of(stream).architecture == 90 && cuda::wgmma_is_built()
                          ? ", kernels for sm_90a"
                          : "");
    }
#endif
    return "";
}

std::string kernel_choices([[maybe_unused]] const Stream& stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue)
        return stream.queue->kept<cuda::GemmPlans>().choices() +
               stream.queue->kept<cuda::AttentionEngines>().choices() +
               stream.queue->kept<cuda::GroupedWays>().choices();
#endif
    return "";
}

#ifdef TRAIN_GPT_CUDA
namespace {

struct OfOperations {
    std::string attention, products, grouped;
};

OfOperations apart(const std::string& choices) {
    if (!choices.empty() && !choices.ends_with('\n'))
        throw Error(
            "The choices of kernels end in the middle of a line; remove them to choose again.");
    OfOperations found;
    std::istringstream lines(choices);
    for (std::string line; std::getline(lines, line);)
        (line.starts_with("attention ") ? found.attention
         : line.starts_with("grouped ") ? found.grouped
                                        : found.products) += line + "\n";
    return found;
}

}  // namespace
#endif

void set_kernel_choices([[maybe_unused]] Stream& stream,
                        [[maybe_unused]] const std::string& choices) {
#ifdef TRAIN_GPT_CUDA
    if (!stream.queue) return;
    const OfOperations chosen = apart(choices);
    stream.queue->kept<cuda::AttentionEngines>().set_choices(chosen.attention);
    stream.queue->kept<cuda::GemmPlans>().set_choices(chosen.products);
    stream.queue->kept<cuda::GroupedWays>().set_choices(chosen.grouped);
#endif
}

bool unite_kernel_choices([[maybe_unused]] Stream& stream,
                          [[maybe_unused]] const std::vector<std::string>& choices) {
#ifdef TRAIN_GPT_CUDA
    if (!stream.queue) return false;
    std::vector<std::string> attention, products, grouped;
    for (const std::string& text : choices) {
        OfOperations of_rank = apart(text);
        attention.push_back(std::move(of_rank.attention));
        products.push_back(std::move(of_rank.products));
        grouped.push_back(std::move(of_rank.grouped));
    }
    const bool engine = stream.queue->kept<cuda::AttentionEngines>().unite_choices(attention);
    const bool algorithm = stream.queue->kept<cuda::GemmPlans>().unite_choices(products);
    const bool way = stream.queue->kept<cuda::GroupedWays>().unite_choices(grouped);
    return engine || algorithm || way;
#else
    return false;
#endif
}

}  // namespace train_gpt
