// The CUDA functions that device.cpp and memory.cpp call. cuda_queue.h has what every X.cu needs.
#pragma once
#ifdef TRAIN_GPT_CUDA
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"

namespace train_gpt::cuda {

/// Why GPU `index` cannot be used, as the end of a sentence; empty when it can.
std::string obstacle(int index);
/// A name for each GPU that this process can see, by index. A GPU has the same name in all
/// processes of a host, whichever GPUs they can see.
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
