// What every X.cu needs: checked calls of the CUDA runtime, and the queue of a Stream. The compiler
// parses a file with kernels once per architecture and twice more, so this header includes little.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include <cuda_runtime.h>

#include "device/stream.h"

/// A call of the CUDA runtime; throws Error with the call's text, CUDA's reason and the place.
#define CUDA_CHECK(call) ::train_gpt::cuda::check(call, #call, __FILE__, __LINE__)
/// After every kernel launch.
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())

namespace train_gpt::cuda {

[[noreturn]] void fail(cudaError_t status, const char* call, const char* file, int line);
inline void check(cudaError_t status, const char* call, const char* file, int line) {
    if (status != cudaSuccess) fail(status, call, file, line);
}

/// 80, 90, …
inline int architecture_of(const cudaDeviceProp& properties) {
    return 10 * properties.major + properties.minor;
}

/// Properties of a device by which kernels choose how to run.
struct DeviceLimits {
    int multiprocessors = 0;
    int architecture = 0;               // architecture_of()
    size_t shared_bytes_per_block = 0;  // with opt-in
    size_t l2_bytes = 0;
};

class Queue {
  public:
    explicit Queue(const Device& device, bool high_priority = false);
    ~Queue();
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    cudaStream_t stream() const { return stream_; }
    const DeviceLimits& limits() const { return limits_; }

    /// An object that an operation keeps for this queue, such as a library handle and its plans: a
    /// T, constructed from the queue on first use. Not thread-safe.
    template <class T>
    T& kept() {
        static char key;  // its address stands for T
        for (const Kept& kept : kept_)
            if (kept.key == &key) return *static_cast<T*>(kept.object.get());
        kept_.push_back({&key, std::make_shared<T>(*this)});
        return *static_cast<T*>(kept_.back().object.get());
    }

  private:
    struct Kept {
        const char* key;
        std::shared_ptr<void> object;
    };

    cudaStream_t stream_ = nullptr;
    DeviceLimits limits_;
    std::vector<Kept> kept_;
};

inline cudaStream_t stream_of(const Stream& stream) { return stream.queue->stream(); }
inline const DeviceLimits& limits_of(const Stream& stream) { return stream.queue->limits(); }

}  // namespace train_gpt::cuda
