// Streams and events. A stream is an ordered queue of work on one device, with scratch memory that
// this work shares. On a CPU, an OpenMP team runs work when it is submitted; on a GPU, work runs
// later, while the host continues.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/device.h"

namespace train_gpt {

class Profiler;  // profile.h
struct Cost;     // profile.h

namespace cuda {
class Queue;  // a cudaStream_t and the library handles that work on it needs; cuda_queue.h
}

/// Which implementation the kernels of a stream use if there are several. Set this before the
/// stream's scratch memory is planned.
struct KernelSettings {
    enum class Gemm : uint8_t { automatic, onednn, own };
    enum class Attention : uint8_t { automatic, own, cudnn, wgmma };
    enum class Epilogues : uint8_t { automatic, fused, separate };
    enum class Grouped : uint8_t { automatic, own, wgmma };

    // Matrix products on the CPU; automatic: oneDNN, if the build found it, where it is faster.
    Gemm gemm = Gemm::automatic;
    // Attention on a GPU; automatic: the fastest, as timed when a training shape is first seen;
    // wgmma: our own kernels for sm_90a, or else our own for any GPU.
    Attention attention = Attention::automatic;
    // Not to use what gives other bits from run to run: one of cuDNN's ways to compute attention.
    bool deterministic = true;
    // GELU, its derivative and bias gradients on a GPU: as part of a product, where cuBLASLt can do
    // that, or by kernels; automatic: as kernels/linear/gemm_cublas.h says.
    Epilogues epilogues = Epilogues::automatic;
    // Time the alternatives when a product, or a shape of cuDNN's attention, is first seen.
    bool autotune = false;
    // Multiply fp32 matrices on tensor cores, with elements rounded to 10 bits of mantissa.
    bool tf32 = false;
    // Some products are in fp8, which need scratch memory for rounded operands.
    bool fp8 = false;
    // Products of experts in bf16 or fp8 on a GPU; own: our kernels for any GPU; wgmma: those for
    // sm_90a, where they can run; automatic: with autotune the fastest, else as own.
    Grouped grouped = Grouped::automatic;
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
    bool is_part = false;  // of a call that is timed and traced as a whole, on several threads

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

}  // namespace train_gpt
