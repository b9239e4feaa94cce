// The CPU: what it can do, and how much of it this process may use.
#pragma once
#include <cstdint>
#include <string>

namespace train_gpt {

/// The CPU's features, and the threads and memory that this process may use.
struct CpuInfo {
    std::string model;  // as the system names it, for display only
    int threads = 1;    // OpenMP team size: OMP_NUM_THREADS, else the cores this process may use
    bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;
    uint64_t memory_total = 0,
             memory_available = 0;  // bytes; the smaller of the machine's and the cgroup's

    bool native_bf16() const { return avx512_bf16 || amx_bf16; }
};
CpuInfo cpu_info();

/// Throws Error when this build's kernels use instructions that this CPU does not have.
void require_cpu_features();

}  // namespace train_gpt
