// Devices: the CPU, or one GPU.
#pragma once
#include <cstdint>
#include <string>

// X.cpp holds the CPU implementation of a contract, and X.cu the CUDA one, in namespace cuda. The
// public function begins with this macro, which forwards the call when the device is a GPU.
#ifdef TRAIN_GPT_CUDA
#define TRAIN_GPT_ON_CUDA(device_, call) \
    if ((device_).is_cuda()) return cuda::call
#else
#define TRAIN_GPT_ON_CUDA(device_, call) static_cast<void>(device_)
#endif

namespace train_gpt {

struct Device {
    enum class Kind : uint8_t { cpu, cuda };
    Kind kind = Kind::cpu;
    int index = 0;
    // The architecture (80 for sm_80) of a GPU that is not here, and for which memory is only
    // counted. 0: the GPU is here. A build without CUDA kernels counts with a CPU in its place.
    int planned_architecture = 0;

    bool is_cuda() const { return kind == Kind::cuda; }
    /// Whether its memory is apart from the host's.
    bool has_own_memory() const { return is_cuda() || planned_architecture > 0; }
    bool operator==(const Device&) const = default;
};

/// Opens the device named "auto", "cpu" or "cuda". Throws Error with the reason when it cannot be
/// used. "auto" takes GPU `gpu` if it can be used and otherwise the CPU; a build with CUDA then
/// prints the reason to stderr. Where the machine has a GPU whose driver does not work, "auto" is
/// an Error, too: training on the CPU would only look like success.
Device open_device(const std::string& wanted, int gpu = 0);

/// "AMD EPYC 9B14, 2 threads"
std::string device_name(const Device& device);

/// How many multiprocessors a GPU has; 0 for the CPU.
int multiprocessors(const Device& device);

/// One line per device found and per library used, for --version.
std::string describe_devices();

}  // namespace train_gpt
