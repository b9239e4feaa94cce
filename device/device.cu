// The CUDA side of device.h: checks for a usable GPU.
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include <unistd.h>

#include "base/error.h"
#include "device/architecture.h"
#include "device/cublas_lt.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"

namespace train_gpt::cuda {

namespace {

constexpr int oldest_architecture = 80;  // bf16 tensor cores, cp.async

__global__ void probe() {}

std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

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

int architecture(const Device& device) {
    int major = 0, minor = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index));
    return 10 * major + minor;
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

}  // namespace train_gpt::cuda
