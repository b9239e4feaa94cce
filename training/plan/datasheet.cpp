#include "training/plan/datasheet.h"

namespace train_gpt {

namespace {

struct Gpu {
    std::string_view name;  // a part of it that begins a word
    int multiprocessors;
    double teraflops;
};

// NVIDIA's datasheets, whose figures with sparsity are halved. The first name that fits counts.
constexpr Gpu gpus[] = {{"A100", 108, 312},      {"A800", 108, 312},      {"A30", 56, 165},
                        {"H100 NVL", 132, 835},  {"H100 PCIe", 114, 756}, {"H100", 132, 989.4},
                        {"H800 PCIe", 114, 756}, {"H800", 132, 989.4},    {"H200 NVL", 132, 835},
                        {"H200", 132, 989.4},    {"GH200", 132, 989.4},   {"H20", 78, 148},
                        {"B200", 148, 2250},     {"L40S", 142, 362},      {"L40", 142, 181},
                        {"RTX 4090", 128, 165.2}};

}  // namespace

double datasheet_flops(std::string_view name, int multiprocessors) {
    for (const Gpu& gpu : gpus) {
        const size_t at = name.find(gpu.name);
        if (at != name.npos && (at == 0 || name[at - 1] == ' '))
            return multiprocessors == gpu.multiprocessors ? 1e12 * gpu.teraflops : 0;
    }
    return 0;
}

double datasheet_flops(const Device& device, DType dtype) {
    if (!device.is_cuda() || dtype != DType::bf16) return 0;
    return datasheet_flops(device_name(device), multiprocessors(device));
}

}  // namespace train_gpt
