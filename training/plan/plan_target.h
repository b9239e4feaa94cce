// The machine that a plan is for: this one, or a GPU that is not here.
#pragma once
#include <cstdint>
#include <string>

#include "device/device.h"
#include "training/config/layout.h"
#include "training/plan/fit.h"

namespace train_gpt {

struct PlanTarget {
    Device device;
    std::string gpu = {};  // the name of a GPU that is not here; empty: the device is here
    uint64_t memory = 0;   // of this GPU, and what follows; 0: unknown
    int multiprocessors = 0;
    double flops = 0;    // per second, of products
    double host = 0;     // Speeds::host, assumed
    double link = 0;     // Speeds::link; 0: assumed_link()
    int ranks_here = 0;  // how many of the ranks are on this machine; 0: unknown

    // NOLINTNEXTLINE(google-explicit-constructor): a device that is here is a target
    PlanTarget(const Device& here);

    bool is_here() const { return gpu.empty(); }
};

/// A GPU that is not here, from the table of datasheets. With `memory` bytes instead of the
/// table's, unless 0. Without a name, nothing but the memory is known, and kernels are planned for
/// sm_80. Throws Error if no such GPU is known (the message names the known GPUs), or if this build
/// has no CUDA kernels.
PlanTarget gpu_elsewhere(const std::string& name, uint64_t memory);

/// How many of a plan's `world` ranks share this machine's memory: target.ranks_here, or, where it
/// is unknown, as many as the machine has GPUs (cores for ranks on the CPU); no more than `world`.
/// 1 if the target is not here.
int local_ranks(const PlanTarget& target, int world);

/// The memory that a rank may take on the target. On this machine local_ranks() share it. A GPU
/// that is not here has 97.5 % of its memory free (an H100 of 80 GiB has 78.3 GiB: measured), and a
/// host with enough memory.
DeviceAndHost memory_on(const PlanTarget& target, const MeshLayout& mesh);

/// Speeds for fit_into(), as far as they decide. The link between ranks is the target's, else
/// assumed (assumed_link()). Products and the way to the host are measured if the device is here,
/// else taken from the datasheet; where they are unknown, no speeds decide.
Speeds planned_speeds(const PlanTarget& target, const DeviceAndHost& available,
                      const RunShape& shape);

}  // namespace train_gpt
