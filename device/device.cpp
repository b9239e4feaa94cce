#include "device/device.h"

#include <cstdio>

#include <omp.h>
#ifdef TRAIN_GPT_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

#include "base/error.h"
#include "base/terminal_text.h"
#include "device/cuda.h"
#include "device/instruction_set.h"
#include "device/memory.h"
#include "device/processor.h"

namespace train_gpt {

Device open_device(const std::string& wanted, [[maybe_unused]] int gpu) {
    if (wanted != "auto" && wanted != "cpu" && wanted != "cuda") {
        throw Error("device is \"", wanted, "\", but must be \"auto\", \"cpu\" or \"cuda\"");
    }
    require_cpu_features();
    // libgomp respects OMP_NUM_THREADS and the affinity mask, but not a container's CPU quota.
    omp_set_num_threads(cpu_info().threads);
    if (wanted == "cpu") return {};
#ifdef TRAIN_GPT_CUDA
    const auto [obstacle, is_fault] = cuda::obstacle(gpu);
    if (obstacle.empty()) return {Device::Kind::cuda, gpu};
    if (wanted == "auto" && is_fault)
        throw Error("this machine has an NVIDIA GPU, but it cannot be used: ", obstacle,
                    "; or set device to \"cpu\"");
    if (wanted == "auto") print_line(stderr, "train_gpt: running on the CPU, since " + obstacle);
#else
    const std::string obstacle =
        "this build has no CUDA kernels; rebuild on a machine with nvcc (the CUDA toolkit)";
#endif
    if (wanted == "auto") return {};
    throw Error("device \"cuda\" cannot be used: ", obstacle,
                "; or set device to \"auto\" or \"cpu\"");
}

std::string device_name(const Device& device) {
    TRAIN_GPT_ON_CUDA(device, device_name(device));
    const CpuInfo info = cpu_info();
    return concat(info.model, ", ", info.threads, info.threads == 1 ? " thread" : " threads");
}

int multiprocessors(const Device& device) {
    TRAIN_GPT_ON_CUDA(device, multiprocessors(device));
    return 0;
}

std::string describe_devices() {
    const CpuInfo info = cpu_info();
    std::string text =
        concat("CPU     ", info.model, ", ", info.threads,
               info.threads == 1 ? " thread, " : " threads, ", format_bytes(info.memory_total),
               " of memory (", format_bytes(info.memory_available), " available)\n");
    const std::string has = names_of_instruction_sets(cpu_instruction_sets()),
                      uses = names_of_instruction_sets(compiled_instruction_sets);
    text += "        has " + (has.empty() ? "no x86 extensions" : has) + "\n";
    text += "        kernels compiled for " + (uses.empty() ? "the baseline" : uses) + "\n";
#ifdef TRAIN_GPT_ONEDNN
    const dnnl_version_t* version = dnnl_version();
    text += concat("oneDNN  ", version->major, ".", version->minor, ".", version->patch, "\n");
#else
    text += "oneDNN  not in this build; matrix products on the CPU use the project's own kernel\n";
#endif
#ifdef TRAIN_GPT_CUDA
    text += cuda::describe_devices();
#else
    text += "CUDA    not in this build\n";
#endif
    return text;
}

}  // namespace train_gpt
