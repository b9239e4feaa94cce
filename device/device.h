// Devices and streams. A stream is an ordered queue of work on one device, with scratch memory that
// this work shares. On a CPU, an OpenMP team runs work when it is submitted; on a GPU, work runs
// later, while the host continues.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
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

    bool is_cuda() const { return kind == Kind::cuda; }
    bool operator==(const Device&) const = default;
};

class Profiler;  // profile.h
struct Cost;     // profile.h

namespace cuda {
class Queue;  // a cudaStream_t and the library handles that work on it needs; cuda_queue.h
}

/// Which implementation the kernels of a stream use if there are several. Set this before the
/// stream's scratch memory is planned.
struct KernelSettings {
    enum class Gemm : uint8_t { automatic, onednn, own };
    enum class Attention : uint8_t { automatic, own, cudnn };
    enum class Epilogues : uint8_t { automatic, fused, separate };

    // Matrix products on the CPU; automatic: oneDNN, if the build found it, where it is faster.
    Gemm gemm = Gemm::automatic;
    // Attention on a GPU; automatic: the faster, as timed when a training shape is first seen.
    Attention attention = Attention::automatic;
    // GELU, its derivative and bias gradients on a GPU: as part of a product, where cuBLASLt can do
    // that, or by kernels; automatic: as kernels/linear/gemm_cublas.h says.
    Epilogues epilogues = Epilogues::automatic;
    // Time the alternatives when a product is first seen.
    bool autotune = false;
    // Multiply fp32 matrices on tensor cores, with elements rounded to 10 bits of mantissa.
    bool tf32 = false;
    // Multiprocessors of a GPU that a matrix product leaves to kernels of other streams.
    int reserved_sms = 0;
};

struct Stream {
    Device device;
    KernelSettings settings = {};
    void* scratch = nullptr;   // aligned by Arena::take(); undefined between kernels
    size_t scratch_bytes = 0;  // the largest X_scratch_bytes() of the kernels that run on it

    /// Priority among a GPU's streams that have work at the same time.
    enum class Priority : uint8_t { normal, high };

    /// Opens a queue on a CUDA device, unless the stream is used only for planning: for calls of
    /// X_scratch_bytes(stream, …), which depend on its device and settings.
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
    Profiler* profiler = nullptr;        // times the kernels; null: not timed

  private:
    void require_scratch(size_t bytes) const;
};

/// A point in the work of a stream. On the CPU it has always been reached.
class Event {
  public:
    enum class Kind : uint8_t { order, timing };

    explicit Event(Device device = {}, Kind kind = Kind::order);
    /// Records the point after all work submitted to the stream so far.
    void record(Stream& stream);
    /// Blocks the host until the recorded point is reached; returns immediately if none was
    /// recorded.
    void wait() const;
    /// Makes later work of the stream wait for the recorded point.
    void hold(Stream& stream) const;
    /// Seconds from the recorded point of `earlier` to this one; waits for both. Both events must
    /// be for timing.
    double seconds_since(const Event& earlier) const;

  private:
    Device device_;
    double at_ = 0;                // on the CPU: monotonic_seconds()
    std::shared_ptr<void> event_;  // a cudaEvent_t
};

/// While an object of this class lives, its thread is submitting a step and may neither wait for a
/// GPU nor allocate: an attempt throws Error.
class StepSubmission {
  public:
    StepSubmission();
    ~StepSubmission();
    StepSubmission(const StepSubmission&) = delete;
    StepSubmission& operator=(const StepSubmission&) = delete;

    /// Throws Error that names `what` (the attempt) when this thread has such an object.
    static void require_none(const char* what);
};

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

/// Must be called first in main(). Makes waiting OpenMP threads sleep after a few microseconds;
/// libgomp's spin for milliseconds by default. When other programs also use the cores, a spinning
/// thread occupies the core that another thread of its team needs, and steps take several times as
/// long. libgomp reads its settings from the environment when it is loaded, so the program restarts
/// itself with GOMP_SPINCOUNT set, under the same name. Does nothing when the user has set
/// GOMP_SPINCOUNT or OMP_WAIT_POLICY.
void limit_openmp_spinning(char** argv);

/// Throws Error when this build's kernels use instructions that this CPU does not have.
void require_cpu_features();

/// Opens the device named "auto", "cpu" or "cuda". Throws Error with the reason when it cannot be
/// used. "auto" takes GPU `gpu` if it can be used and otherwise the CPU; a build with CUDA then
/// prints the reason to stderr. Where the machine has a GPU whose driver does not work, "auto" is
/// an Error, too: training on the CPU would only look like success.
Device open_device(const std::string& wanted, int gpu = 0);

/// Bytes that can still be allocated, of the GPU's memory or of this process's share of the
/// machine's memory.
uint64_t memory_available(const Device& device);

/// "AMD EPYC 9B14, 2 threads"
std::string device_name(const Device& device);

/// How many multiprocessors a GPU has; 0 for the CPU.
int multiprocessors(const Device& device);

/// One line per device found and per library used, for --version.
std::string describe_devices();

}  // namespace train_gpt
