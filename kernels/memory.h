// Planned memory. Everything a run needs is taken from one arena before step 1, so that a run whose
// first step fits cannot run out of memory later. A plan is the same code run over an arena that
// only counts.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/device.h"
#include "kernels/tensor.h"

namespace train_gpt {

enum class Purpose : uint8_t {
    parameters,   // weights in the compute dtype
    gradients,    // fp32 sums
    masters,      // fp32 weights
    moments,      // AdamW's m and v
    activations,  // kept from forward to backward
    buffers,      // gradients of activations, logits
    kv_cache,     // sampling
    workspaces,   // scratch of kernels and libraries
    staging,      // host memory: token batches, checkpoint staging
    count
};
const char* name_of(Purpose purpose);

class Arena {
  public:
    /// Counts; take() returns addresses that must not be touched.
    static Arena counting(Device device);
    /// Allocates what `plan` counted, once. The same sequence of take() calls succeeds on it; more
    /// is an Error.
    Arena(Device device, const Arena& plan);
    ~Arena();
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&&) = delete;

    /// 64-byte aligned memory. On the CPU it is not touched: pages come with the first write.
    void* take(size_t bytes, Purpose purpose);
    Tensor tensor(DType dtype, std::initializer_list<int64_t> shape, Purpose purpose);

    bool is_counting() const { return base_ == nullptr; }
    Device device() const { return device_; }
    size_t bytes(Purpose purpose) const { return by_purpose_[static_cast<size_t>(purpose)]; }
    size_t total_bytes() const { return used_; }

  private:
    explicit Arena(Device device) : device_(device) {}

    Device device_;
    std::byte* base_ = nullptr;
    size_t capacity_ = 0, used_ = 0;
    std::array<size_t, static_cast<size_t>(Purpose::count)> by_purpose_{};
};

/// "1.25 GiB"
std::string format_bytes(uint64_t bytes);

}  // namespace train_gpt
