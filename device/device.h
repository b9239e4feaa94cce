// Devices and streams. A stream is an ordered queue of work on one device, with scratch memory that the work on it
// shares. On the CPU work runs when it is submitted, by an OpenMP team; on CUDA later, while the host goes on.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// X.cpp holds the CPU implementation of a contract and X.cu the CUDA one, in namespace cuda. The public function begins
// with this macro, which hands the call on where the device is a GPU.
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

    bool is_cuda() const { return kind == Kind::cuda; }
    bool operator==(const Device&) const = default;
};

class Profiler;  // profile.h
struct Cost;     // profile.h

namespace cuda {
class Queue;  // a cudaStream_t and the library handles that work on it needs; cuda.h
}

struct Stream {
    Device device;
    void* scratch = nullptr;   // 256-byte aligned; contents are undefined between kernels
    size_t scratch_bytes = 0;  // the largest X_scratch_bytes() of the kernels that run on it

    enum class Priority : uint8_t { normal, high };  // of a GPU's streams, when several have work

    /// On CUDA opens a queue on the device, unless the stream is only to be planned with.
    explicit Stream(Device device = {}, bool planning = false,
                    Priority priority = Priority::normal);

    /// The scratch memory, after a check that it is large enough.
    template <class T>
    T* scratch_for(size_t bytes) const {
        require_scratch(bytes);
        return static_cast<T*>(scratch);
    }
    /// Returns when all work submitted so far is done. Throws Error when some of it failed.
    void synchronize();

    std::shared_ptr<cuda::Queue> queue;  // null on the CPU
    Profiler* profiler = nullptr;        // who times the kernels; null: nobody

  private:
    void require_scratch(size_t bytes) const;
};

/// A point in the work of a stream. On the CPU it has always been reached.
class Event {
  public:
    enum class Kind : uint8_t { order, timing };

    explicit Event(Device device = {}, Kind kind = Kind::order);
    /// The point behind all work submitted to the stream so far.
    void record(Stream& stream);
    /// The host waits until the recorded point is reached; at once when none was recorded.
    void wait() const;
    /// Later work of the stream waits for the recorded point.
    void hold(Stream& stream) const;
    /// From one recorded point to this one, both of events for timing; waits for them.
    double seconds_since(const Event& earlier) const;

  private:
    Device device_;
    std::chrono::steady_clock::time_point at_;  // on the CPU
    std::shared_ptr<void> event_;               // a cudaEvent_t
};

/// While it lives this thread submits a step, in which it may neither wait for a GPU nor allocate: what tries to is an Error.
class StepSubmission {
  public:
    StepSubmission();
    ~StepSubmission();
    StepSubmission(const StepSubmission&) = delete;
    StepSubmission& operator=(const StepSubmission&) = delete;

    /// Throws Error, which names what was tried, where such an object lives.
    static void require_none(const char* what);
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
/// again with GOMP_SPINCOUNT set, under the same name; does nothing where the user has set GOMP_SPINCOUNT or OMP_WAIT_POLICY.
void limit_openmp_spinning(char** argv);

/// Throws Error when the kernels of this build use instructions that this CPU lacks.
void require_cpu_features();

/// "auto", "cpu" or "cuda" to a device; throws Error with the reason when it cannot be used. "auto" takes GPU `gpu` where it
/// can be used, else the CPU, and then says why on stderr where the build has CUDA.
Device open_device(const std::string& wanted, int gpu = 0);

/// Bytes that can still be allocated: of the GPU's memory, or of this process's share of the machine's.
uint64_t memory_available(const Device& device);

/// "AMD EPYC 9B14, 2 threads"
std::string device_name(const Device& device);

/// One line per device found and per library used, for --version.
std::string describe_devices();

}  // namespace train_gpt
