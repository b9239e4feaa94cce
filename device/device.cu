// The CUDA side of device.h and memory.h: checks for a usable GPU, queues, events and memory.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include <unistd.h>

#include "base/error.h"
#include "device/cublas_lt.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"

namespace train_gpt::cuda {

namespace {

constexpr int oldest_architecture = 80;  // bf16 tensor cores, cp.async

__global__ void probe() {}

std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

int architecture_of(const cudaDeviceProp& properties) {
    return 10 * properties.major + properties.minor;
}

}  // namespace

void fail(cudaError_t status, const char* call, const char* file, int line) {
    throw Error(
        cudaGetErrorString(status), " (", cudaGetErrorName(status), "), reported by ", call, " at ",
        file, ":", line,
        status == cudaErrorMemoryAllocation || status == cudaErrorInvalidValue
            ? ""
            : "; this process can no longer use the GPU: look in dmesg for Xid messages, and "
              "resume from the last checkpoint");
}

namespace {

GpuSearch search_gpus() {
    namespace fs = std::filesystem;
    GpuSearch found;
    found.status = cudaGetDeviceCount(&found.count);
    cudaDriverGetVersion(&found.driver);
    cudaGetLastError();  // clears the error, which is handled here
    found.is_hidden = std::getenv("CUDA_VISIBLE_DEVICES") != nullptr;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator("/dev", ignored)) {
        const std::string name = entry.path().filename().string();
        if (name.rfind("nvidia", 0) != 0 || name.size() == 6 || name[6] < '0' || name[6] > '9')
            continue;
        found.has_hardware = true;
        found.is_forbidden |= ::access(entry.path().c_str(), R_OK | W_OK) != 0;
    }
    return found;
}

}  // namespace

Obstacle obstacle_of(const GpuSearch& search) {
    const auto because = [&](std::string reason) { return Obstacle{reason, search.has_hardware}; };
    const auto status = static_cast<cudaError_t>(search.status);
    if (status == cudaSuccess && search.count > 0) return {};
    if (search.is_hidden && (status == cudaErrorNoDevice || status == cudaSuccess))
        return {"CUDA_VISIBLE_DEVICES leaves no GPU to this process"};
    if (search.is_forbidden)
        return because("this user may not open /dev/nvidia*; ask for access to these files");
    switch (status) {
        case cudaErrorInsufficientDriver:
            if (search.driver == 0)
                return because(search.has_hardware
                                   ? "the driver's library libcuda.so.1 is not found, though its "
                                     "kernel module is loaded; in a container, pass the GPUs on"
                                   : "there is no NVIDIA driver here");
            return because(concat("the NVIDIA driver is too old: it supports CUDA ",
                                  version_text(search.driver), ", but this build needs ",
                                  version_text(CUDART_VERSION), "; install a newer driver"));
        case cudaErrorSystemNotReady:
            return because(
                "the GPUs are not ready (error 802); on machines with NVSwitch, start "
                "nvidia-fabricmanager");
        case cudaErrorSystemDriverMismatch:
            return because(
                "the NVIDIA driver's library and its kernel module differ (error 803); reboot, or "
                "load the module that belongs to the library");
        case cudaErrorNoDevice:
        case cudaSuccess:
            return because(search.has_hardware
                               ? "CUDA finds none of the GPUs in /dev; see nvidia-smi"
                               : "there is no NVIDIA GPU here");
        default:
            return because(concat("CUDA reports: ", cudaGetErrorString(status)));
    }
}

Obstacle obstacle(int index) {
    const GpuSearch search = search_gpus();
    if (Obstacle none = obstacle_of(search); !none.reason.empty()) return none;
    if (index >= search.count)
        return {concat("GPU ", index, " was requested, but there are only ", search.count)};

    cudaDeviceProp properties{};
    if (const cudaError_t failure = cudaGetDeviceProperties(&properties, index);
        failure != cudaSuccess)
        return {concat("CUDA reports: ", cudaGetErrorString(failure)), true};
    const int architecture = architecture_of(properties);
    if (architecture < oldest_architecture)
        return {concat("GPU ", index, " (", properties.name, ", sm_", architecture,
                       ") is too old; sm_", oldest_architecture, " (Ampere) or newer is needed")};
    cudaFuncAttributes attributes{};
    const cudaError_t image = [&] {
        if (const cudaError_t failure = cudaSetDevice(index); failure != cudaSuccess)
            return failure;
        return cudaFuncGetAttributes(&attributes, probe);
    }();
    cudaGetLastError();
    if (image == cudaErrorNoKernelImageForDevice || image == cudaErrorInvalidDeviceFunction ||
        image == cudaErrorUnsupportedPtxVersion)
        return {concat("this build has no kernels for GPU ", index, " (", properties.name, ", sm_",
                       architecture, "); rebuild with make GPU_ARCHS=", architecture)};
    if (image != cudaSuccess)
        return {concat("GPU ", index, " (", properties.name,
                       ") does not start: ", cudaGetErrorString(image)),
                true};
    try {
        cublas_lt();
    } catch (const Error& error) {
        return {error.what(), true};
    }
    return {};
}

std::vector<std::string> identities() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    cudaGetLastError();
    std::vector<std::string> names;
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp properties{};
        CUDA_CHECK(cudaGetDeviceProperties(&properties, i));
        std::ostringstream name;
        name << std::hex << properties.pciDomainID << ':' << properties.pciBusID << '.'
             << properties.pciDeviceID;
        names.push_back(name.str());
    }
    return names;
}

std::string device_name(const Device& device) {
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
    return properties.name;
}

int multiprocessors(const Device& device) {
    int count = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index));
    return count;
}

std::string driver_version() {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return driver ? version_text(driver) : "none";
}

static std::string cublas_lt_version() {
    try {
        return std::to_string(cublas_lt().version());
    } catch (const Error& error) {
        return concat("not found (", error.what(), ")");
    }
}

std::string describe_devices() {
    std::string text = concat("CUDA    ", version_text(CUDART_VERSION), ", cuBLASLt ",
                              cublas_lt_version(), ", driver ", driver_version(), "\n");
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    cudaGetLastError();
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp p{};
        if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
        const std::string trouble = obstacle(i).reason;
        text += concat("GPU ", i, "   ", p.name, ", sm_", architecture_of(p), ", ",
                       p.multiProcessorCount, " multiprocessors, ", p.totalGlobalMem >> 20, " MiB",
                       trouble.empty() ? "" : ": " + trouble, "\n");
    }
    if (count == 0) text += "        no GPU: " + obstacle(0).reason + "\n";
    return text;
}

uint64_t memory_available(const Device& device) {
    CUDA_CHECK(cudaSetDevice(device.index));
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    // Our kernels and those of libraries are loaded into the same memory when they first run.
    constexpr size_t for_kernels = size_t{512} << 20;
    return free - std::min(free, for_kernels);
}

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

namespace {

/// The result of an allocation: null when out of memory. Any other failure throws Error.
void* or_null(cudaError_t status, void* memory) {
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return nullptr;
    }
    CUDA_CHECK(status);
    return memory;
}

}  // namespace

void* allocate(const Device& device, size_t bytes) {
    StepSubmission::require_none("allocating memory");
    CUDA_CHECK(cudaSetDevice(device.index));
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, bytes);
    return or_null(status, memory);
}

void release(const Device& device, void* memory) {
    cudaSetDevice(device.index);
    cudaFree(memory);
}

void* allocate_pinned(const Device& device, size_t bytes) {
    StepSubmission::require_none("allocating host memory");
    CUDA_CHECK(cudaSetDevice(device.index));
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
    return or_null(status, memory);
}

void release_pinned(void* memory) { cudaFreeHost(memory); }

}  // namespace train_gpt::cuda
