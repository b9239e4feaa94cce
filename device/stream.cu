// The CUDA side of stream.h: queues and events.
#include <functional>
#include <memory>

#include "device/cuda.h"
#include "device/cuda_queue.h"

namespace train_gpt::cuda {

Queue::Queue(const Device& device, bool high_priority) {
    CUDA_CHECK(cudaSetDevice(device.index));
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
    limits_ = {.multiprocessors = properties.multiProcessorCount,
               .architecture = architecture_of(properties),
               .shared_bytes_per_block = properties.sharedMemPerBlockOptin,
               .l2_bytes = static_cast<size_t>(properties.l2CacheSize)};
    int lowest = 0, highest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                            high_priority ? highest : lowest));
}

// Ignores errors: earlier calls have reported them, and a destructor cannot.
Queue::~Queue() {
    while (!kept_.empty()) kept_.pop_back();  // before the stream that the library handles use
    if (stream_) cudaStreamDestroy(stream_);
}

void run_captured(Stream& stream, const std::function<void()>& submit) {
    CUDA_CHECK(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
        submit();
    } catch (...) {
        cudaStreamEndCapture(stream_of(stream), &graph);
        if (graph) cudaGraphDestroy(graph);
        throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(stream_of(stream), &graph));
    const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> graph_owner(graph,
                                                                               cudaGraphDestroy);
    cudaGraphExec_t executable = nullptr;
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    const std::unique_ptr<CUgraphExec_st, decltype(&cudaGraphExecDestroy)> executable_owner(
        executable, cudaGraphExecDestroy);
    CUDA_CHECK(cudaGraphLaunch(executable, stream_of(stream)));
    CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
}

std::shared_ptr<Queue> open_queue(const Device& device, bool high_priority) {
    return std::make_shared<Queue>(device, high_priority);
}

void synchronize(Stream& stream) {
    StepSubmission::require_none("waiting for the GPU");
    CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
}

std::shared_ptr<void> create_event(const Device& device, bool timing) {
    CUDA_CHECK(cudaSetDevice(device.index));
    cudaEvent_t event = nullptr;
    CUDA_CHECK(
        cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming));
    return {event, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); }};
}

void record(void* event, Stream& stream) {
    CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(stream)));
}

void wait(void* event) {
    StepSubmission::require_none("waiting for an event");
    CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
}

void hold(void* event, Stream& stream) {
    CUDA_CHECK(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event), 0));
}

double seconds_between(void* first, void* last) {
    wait(last);
    float milliseconds = 0;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(first),
                                    static_cast<cudaEvent_t>(last)));
    return 1e-3 * milliseconds;
}

}  // namespace train_gpt::cuda
