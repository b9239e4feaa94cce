// Devices and streams. A stream is an ordered queue of work on one device, with scratch memory that
// the work on it shares. On the CPU work runs when it is submitted, by an OpenMP team.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace train_gpt {

struct Device {
    enum class Kind : uint8_t { cpu, cuda };
    Kind kind = Kind::cpu;
    int index = 0;
};

struct Stream {
    Device device;
    void* native = nullptr;    // cudaStream_t on CUDA, unused on the CPU
    void* scratch = nullptr;   // 64-byte aligned; contents are undefined between kernels
    size_t scratch_bytes = 0;  // the largest X_scratch_bytes() of the kernels that run on it

    /// The scratch memory, after a check that it is large enough.
    template <class T>
    T* scratch_for(size_t bytes) const {
        require_scratch(bytes);
        return static_cast<T*>(scratch);
    }

  private:
    void require_scratch(size_t bytes) const;
};

/// What the CPU can do, by feature bits, and what of it this process may use.
struct CpuInfo {
    std::string model;  // as the system names it, for display only
    int threads = 1;    // OpenMP team size: OMP_NUM_THREADS, else the cores this process may run on
    bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;
    uint64_t memory_total = 0,
             memory_available = 0;  // bytes; the smaller of the machine's and the cgroup's

    bool native_bf16() const { return avx512_bf16 || amx_bf16; }
};
CpuInfo cpu_info();

/// First thing in main(): OpenMP threads that wait for work shall sleep after a few microseconds. By default libgomp's spin for
/// milliseconds; where other programs want the cores too, a thread that spins takes the one its fellow waits for, and steps take
/// several times as long. libgomp reads its settings from the environment when it is loaded, so the program starts itself
/// again with GOMP_SPINCOUNT set; does nothing where the user has set GOMP_SPINCOUNT or OMP_WAIT_POLICY.
void limit_openmp_spinning(char** argv);

/// Throws Error when the kernels of this build use instructions that this CPU lacks.
void require_cpu_features();

/// "auto", "cpu" or "cuda" to a device; throws Error with the reason when it cannot be used.
Device open_device(const std::string& wanted);

/// "AMD EPYC 9B14, 2 threads"
std::string device_name(const Device& device);

/// One line per device found and per library used, for --version.
std::string describe_devices();

}  // namespace train_gpt
