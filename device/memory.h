// Planned memory. Everything a run needs is taken from one arena before step 1, so a run whose
// first step fits cannot run out of memory later. Planning runs the same code on an arena that only
// counts.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/tensor.h"
#include "device/device.h"

namespace train_gpt {

enum class Purpose : uint8_t {
    parameters,   // weights in the compute dtype, and rounded to fp8
    gradients,    // fp32 sums
    masters,      // fp32 weights
    moments,      // the optimizer's slots
    activations,  // kept from forward to backward
    buffers,      // gradients of activations, logits
    kv_cache,     // sampling
    workspaces,   // scratch of kernels and libraries
    staging,      // host memory, pinned for a GPU: token batches, results read back
    saving,       // the same: the state of which a checkpoint is written
    offloaded,    // the same: state and activations that the GPU's memory does not keep
    count
};
const char* name_of(Purpose purpose);
/// Whether memory for it is the host's, whatever the device.
constexpr bool is_on_host(Purpose purpose) {
    return purpose == Purpose::staging || purpose == Purpose::saving ||
           purpose == Purpose::offloaded;
}

class Arena {
  public:
    /// An arena that only counts: the addresses from take() must not be accessed.
    static Arena counting(Device device);
    /// Allocates what `plan` counted, once. The same sequence of take() calls then succeeds; taking
    /// more throws Error.
    Arena(Device device, const Arena& plan);
    ~Arena();
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&&) = delete;

    /// Memory aligned to 64 bytes on a CPU and 256 bytes on a GPU: host memory for the purposes of
    /// which is_on_host() says so, otherwise device memory. It is not touched: on a CPU, pages are
    /// allocated at the first write.
    void* take(size_t bytes, Purpose purpose);
    Tensor tensor(DType dtype, std::initializer_list<int64_t> shape, Purpose purpose);

    bool is_counting() const { return device_memory_.base == nullptr; }
    Device device() const { return device_; }
    size_t bytes(Purpose purpose) const { return by_purpose_[static_cast<size_t>(purpose)]; }
    /// Bytes of device memory taken so far.
    size_t total_bytes() const { return device_memory_.used; }
    /// Bytes of the host's memory taken so far for a GPU.
    size_t host_bytes() const { return pinned_.used; }

  private:
    struct Region {
        std::byte* base = nullptr;
        size_t capacity = 0, used = 0;
    };

    explicit Arena(Device device) : device_(device) {}
    Region& region_of(Purpose purpose) {
        return device_.has_own_memory() && is_on_host(purpose) ? pinned_ : device_memory_;
    }

    Device device_;
    Region device_memory_, pinned_;  // a CPU uses only the first
    std::array<size_t, static_cast<size_t>(Purpose::count)> by_purpose_{};
};

/// Bytes that can still be allocated, of the GPU's memory or of this process's share of the
/// machine's memory.
uint64_t memory_available(const Device& device);

/// "1.25 GiB"
std::string format_bytes(uint64_t bytes);

}  // namespace train_gpt
