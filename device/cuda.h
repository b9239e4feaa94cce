// The CUDA functions that device.cpp, stream.cpp and memory.cpp call. cuda_queue.h has what every
// X.cu needs.
#pragma once
#ifdef TRAIN_GPT_CUDA
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/stream.h"

namespace train_gpt::cuda {

struct Obstacle {
    std::string reason;     // the end of a sentence; empty if there is no obstacle
    bool is_fault = false;  // a GPU is here, but its driver does not work
};
/// What CUDA and the system say of this machine's GPUs.
struct GpuSearch {
    int status = 0;             // cudaGetDeviceCount's
    int count = 0;              // GPUs that this process can see
    int driver = 0;             // the CUDA version that the driver supports; 0: none was found
    bool has_hardware = false;  // there are device files of NVIDIA GPUs
    bool is_forbidden = false;  // this process may not open one of them
    bool is_hidden = false;     // CUDA_VISIBLE_DEVICES is set
};
/// Why the search found no GPU.
Obstacle obstacle_of(const GpuSearch& search);
/// Why GPU `index` cannot be used.
Obstacle obstacle(int index);
/// A name for each GPU that this process can see, by index. A GPU has the same name in all
/// processes of a host, whichever GPUs they can see. The MIG instances of one GPU have one name,
/// since NCCL accepts only one of them.
std::vector<std::string> identities();
std::string device_name(const Device& device);
int multiprocessors(const Device& device);
/// The newest CUDA that the driver supports: "13.0".
std::string driver_version();
std::string describe_devices();
uint64_t memory_available(const Device& device);

/// Captures the work that `submit` submits to the stream as a graph, and runs the graph. Throws
/// Error when `submit` allocates or waits for the device, which a step must not do.
void run_captured(Stream& stream, const std::function<void()>& submit);

std::shared_ptr<Queue> open_queue(const Device& device, bool high_priority = false);
void synchronize(Stream& stream);
std::shared_ptr<void> create_event(const Device& device, bool timing = false);
void record(void* event, Stream& stream);
void wait(void* event);
void hold(void* event, Stream& stream);
/// Waits for both events. They must have been created with timing.
double seconds_between(void* first, void* last);

/// Null when there is not enough memory on the device or, for pinned memory, on the host.
void* allocate(const Device& device, size_t bytes);
void release(const Device& device, void* memory);
void* allocate_pinned(const Device& device, size_t bytes);
void release_pinned(void* memory);

}  // namespace train_gpt::cuda
#endif  // TRAIN_GPT_CUDA
