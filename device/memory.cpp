#include "device/memory.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include <sys/mman.h>

#include "base/error.h"
#include "device/cuda.h"
#include "device/processor.h"

namespace train_gpt {

namespace {

constexpr size_t cpu_alignment = 64;  // a cache line
constexpr size_t cuda_alignment =
    256;  // what cudaMalloc gives, and the most that libraries require

// Tensors whose sizes are multiples of 4 KiB would all start at the same page offset, and a load
// would wait for an earlier store to the same offset of another tensor (4K aliasing). 13 extra
// cache lines after each of them shift the next start. 13 and 64 have no common divisor, so 64
// tensors in a row start at 64 different offsets.
constexpr size_t stagger = 13 * cpu_alignment;
constexpr size_t stagger_from = 4096;

// Where the addresses of a counting arena start: not null, and outside the user address space.
constexpr uintptr_t counting_base = uintptr_t{1} << 62;

[[noreturn]] void fail_overflow(Purpose purpose) {
    throw Error("the ", name_of(purpose),
                " of this configuration exceed what a 64-bit machine can address; make the ",
                "model or the batch smaller");
}

}  // namespace

const char* name_of(Purpose purpose) {
    switch (purpose) {
        case Purpose::parameters:
            return "parameters";
        case Purpose::gradients:
            return "gradients";
        case Purpose::masters:
            return "masters";
        case Purpose::moments:
            return "moments";
        case Purpose::activations:
            return "activations";
        case Purpose::buffers:
            return "buffers";
        case Purpose::kv_cache:
            return "kv_cache";
        case Purpose::workspaces:
            return "workspaces";
        case Purpose::staging:
            return "staging";
        case Purpose::saving:
            return "saving";
        case Purpose::offloaded:
            return "offloaded";
        case Purpose::count:
            break;
    }
    return "memory";
}

Arena Arena::counting(Device device) { return Arena(device); }

namespace {

std::byte* map_host_memory(size_t bytes) {
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        throw Error("the system refused ", format_bytes(bytes), " of memory (",
                    std::strerror(errno),
                    "); check ulimit -v, or make batch.micro_batch or the model smaller");
    }
    // Where Linux gives large pages to those who ask, strides and streams miss the TLB less often.
    ::madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<std::byte*>(memory);
}

}  // namespace

Arena::Arena(Device device, const Arena& plan) : device_(device) {
    const size_t wanted = std::max(plan.device_memory_.used, cuda_alignment);
    const uint64_t available = memory_available(device);
    // 0: a GPU has none left; of the host it means that nobody knows.
    if ((available > 0 || device.is_cuda()) && wanted > available) {
        throw Error("this run needs ", format_bytes(wanted),
                    device.is_cuda() ? " of GPU memory" : " of memory", ", but only ",
                    format_bytes(available), " are available");
    }
    device_memory_.capacity = wanted;
    pinned_.capacity = plan.pinned_.used;
#ifdef TRAIN_GPT_CUDA
    if (device.is_cuda()) {
        device_memory_.base = static_cast<std::byte*>(cuda::allocate(device, wanted));
        if (!device_memory_.base)
            throw Error("the GPU refused ", format_bytes(wanted),
                        " of memory in one piece, though ", format_bytes(available),
                        " are free; look in nvidia-smi for other programs that use it, or make "
                        "batch.micro_batch smaller");
        if (pinned_.capacity > 0) {
            pinned_.base = static_cast<std::byte*>(cuda::allocate_pinned(device, pinned_.capacity));
            if (!pinned_.base) {
                cuda::release(device, device_memory_.base);
                throw Error("the system refused ", format_bytes(pinned_.capacity),
                            " of pinned host memory; check ulimit -l, or close other programs");
            }
        }
        return;
    }
#endif
    device_memory_.base = map_host_memory(wanted);
}

Arena::~Arena() {
    if (!device_memory_.base) return;
#ifdef TRAIN_GPT_CUDA
    if (device_.is_cuda()) {
        cuda::release(device_, device_memory_.base);
        if (pinned_.base) cuda::release_pinned(pinned_.base);
        return;
    }
#endif
    ::munmap(device_memory_.base, device_memory_.capacity);
}

Arena::Arena(Arena&& other) noexcept
    : device_(other.device_),
      device_memory_(std::exchange(other.device_memory_, {})),
      pinned_(std::exchange(other.pinned_, {})),
      by_purpose_(std::exchange(other.by_purpose_, {})) {}

void* Arena::take(size_t bytes, Purpose purpose) {
    Region& region = region_of(purpose);
    constexpr size_t largest = std::numeric_limits<size_t>::max() / 4;
    if (bytes > largest || region.used > largest) fail_overflow(purpose);
    const size_t alignment = device_.is_cuda() ? cuda_alignment : cpu_alignment;
    size_t taken = (bytes + alignment - 1) / alignment * alignment;
    if (bytes >= stagger_from && !device_.is_cuda()) taken += stagger;
    if (!is_counting() && taken > region.capacity - region.used) {
        throw Error(
            "out of planned memory: ", format_bytes(bytes), " for ", name_of(purpose),
            " were asked for, but ", format_bytes(region.capacity - region.used),
            " of the planned ", format_bytes(region.capacity),
            " are left; this is a fault of the program, please report it with the configuration");
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a counting arena's addresses are never read
    void* start = is_counting() ? reinterpret_cast<std::byte*>(counting_base + region.used)
                                : region.base + region.used;
    region.used += taken;
    by_purpose_[static_cast<size_t>(purpose)] += taken;
    return start;
}

Tensor Arena::tensor(DType dtype, std::initializer_list<int64_t> shape, Purpose purpose) {
    int64_t bytes = static_cast<int64_t>(size_of(dtype));
    for (int64_t extent : shape) {
        if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) fail_overflow(purpose);
    }
    return Tensor(take(static_cast<size_t>(bytes), purpose), dtype, shape);
}

uint64_t memory_available(const Device& device) {
    TRAIN_GPT_ON_CUDA(device, memory_available(device));
    return cpu_info().memory_available;
}

std::string format_bytes(uint64_t bytes) {
    static constexpr const char* units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    char text[32];
    if (bytes < 1024) {
        std::snprintf(text, sizeof text, "%d B", static_cast<int>(bytes));
        return text;
    }
    double value = static_cast<double>(bytes) / 1024;
    size_t unit = 0;
    while (value >= 1023.995 && unit + 1 < std::size(units)) {  // would print as 1024.00
        value /= 1024;
        ++unit;
    }
    std::snprintf(text, sizeof text, "%.2f %s", value, units[unit]);
    return text;
}

}  // namespace train_gpt
