#include "training/plan/plan_target.h"

#include <algorithm>

#include <omp.h>

#include "base/error.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda.h"
#endif
#include "training/plan/datasheet.h"

namespace train_gpt {

PlanTarget::PlanTarget(const Device& here) : device(here) {}

PlanTarget gpu_elsewhere(const std::string& name, uint64_t memory) {
#ifndef TRAIN_GPT_CUDA
    throw Error(
        "this build has no CUDA kernels, so it does not know what memory they need on a "
        "GPU; build with nvcc (the CUDA toolkit), which needs no GPU");
#endif
    Device device{Device::Kind::cuda, 0};
    device.planned_architecture = 80;
    PlanTarget target(device);
    target.gpu = "GPU";
    target.memory = memory;
    if (name.empty()) return target;
    const Gpu& gpu = gpu_named(name);
    target.device.planned_architecture = gpu.architecture;
    target.gpu = gpu.name;
    if (memory == 0) target.memory = uint64_t{static_cast<unsigned>(gpu.memory_gib)} << 30;
    target.multiprocessors = gpu.multiprocessors;
    target.flops = 1e12 * gpu.teraflops;
    // About four fifths of PCIe 5.0 or 4.0 with 16 lanes.
    target.host = gpu.has_pcie5 ? 50e9 : 25e9;
    return target;
}

int local_ranks(const PlanTarget& target, int world) {
    if (!target.is_here()) return 1;
    if (target.ranks_here > 0) return std::min(target.ranks_here, world);
    int most = omp_get_num_procs();
#ifdef TRAIN_GPT_CUDA
    if (target.device.is_cuda()) most = static_cast<int>(cuda::identities().size());
#endif
    return std::clamp(most, 1, world);
}

DeviceAndHost memory_on(const PlanTarget& target, const MeshLayout& mesh) {
    if (target.is_here())
        return memory_for_a_rank(target.device, mesh, local_ranks(target, mesh.world()));
    return {.device = memory_of_a_gpu(target.memory / 40 * 39, mesh), .host = unlimited_memory};
}

Speeds planned_speeds(const PlanTarget& target, const DeviceAndHost& available,
                      const RunShape& shape) {
    Speeds speeds;
    if (!target.is_here() && target.flops == 0) return speeds;
    if (weighs_link(shape))
        speeds.link = target.link > 0 ? target.link : assumed_link(shape, target.device);
    if (target.is_here()) return measured_here(speeds, available, shape, target.device);
    speeds.flops = target.flops;
    speeds.host = target.host;
    return deciding_speeds(speeds, available, shape, target.device);
}

}  // namespace train_gpt
