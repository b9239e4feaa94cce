#include "training/plan/datasheet.h"

#include <cctype>

#include "base/error.h"

namespace train_gpt {

namespace {

// NVIDIA's datasheets and, for GeForce, its architecture whitepapers; figures with sparsity are
// halved. The first name that fits counts.
constexpr Gpu gpus[] = {
    {"A100", "a100-80", 108, 312, 80, 80, 2039},
    {"A100", "a100-40", 108, 312, 40, 80, 1555},
    {"A800", "a800", 108, 312, 80, 80, 2039},
    {"A30", "a30", 56, 165, 24, 80, 933},
    {"H100 NVL", "h100-nvl", 132, 835, 94, 90, 3938, true},
    {"H100 PCIe", "h100-pcie", 114, 756, 80, 90, 2000, true},
    {"H100", "h100", 132, 989.4, 80, 90, 3350, true},
    {"H800 PCIe", "h800-pcie", 114, 756, 80, 90, 2000, true},
    {"H800", "h800", 132, 989.4, 80, 90, 3350, true},
    {"H200 NVL", "h200-nvl", 132, 835, 141, 90, 4800, true},
    {"H200", "h200", 132, 989.4, 141, 90, 4800, true},
    {"GH200", "gh200", 132, 989.4, 96, 90, 4000, true},
    {"H20", "h20", 78, 148, 96, 90, 4000, true},
    {"B200", "b200", 148, 2250, 180, 100, 8000, true},
    {"L40S", "l40s", 142, 362, 48, 89, 864},
    {"L40", "l40", 142, 181, 48, 89, 864},
    {"L4", "l4", 58, 121, 24, 89, 300},
    {"A10", "a10", 72, 125, 24, 86, 600},
    {"RTX 3090", "rtx3090", 82, 71, 24, 86, 936},
    {"RTX 4090", "rtx4090", 128, 165.2, 24, 89, 1008},
    {"RTX 5090", "rtx5090", 170, 209.5, 32, 120, 1792, true},
};

std::string plain(std::string_view text) {
    std::string result;
    for (const char c : text)
        if (c != ' ' && c != '-' && c != '_')
            result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return result;
}

}  // namespace

const Gpu& gpu_named(std::string_view key) {
    std::string known;
    for (const Gpu& gpu : gpus) {
        if (plain(gpu.key) == plain(key)) return gpu;
        known += concat(known.empty() ? "" : ", ", gpu.key);
    }
    throw Error("no GPU \"", key, "\" is known; these are: ", known,
                "; for another one, give its memory, such as --memory 24GiB");
}

std::vector<std::string> gpu_keys() {
    std::vector<std::string> keys;
    for (const Gpu& gpu : gpus) keys.emplace_back(gpu.key);
    return keys;
}

const Gpu* gpu_called(std::string_view name, int multiprocessors) {
    for (const Gpu& gpu : gpus) {
        const size_t at = name.find(gpu.name);
        if (at != name.npos && (at == 0 || name[at - 1] == ' '))
            return multiprocessors == gpu.multiprocessors ? &gpu : nullptr;
    }
    return nullptr;
}

double datasheet_flops(std::string_view name, int multiprocessors) {
    const Gpu* gpu = gpu_called(name, multiprocessors);
    return gpu ? 1e12 * gpu->teraflops : 0;
}

double datasheet_flops(const Device& device, DType dtype) {
    if (!device.is_cuda() || dtype != DType::bf16) return 0;
    return datasheet_flops(device_name(device), multiprocessors(device));
}

}  // namespace train_gpt
