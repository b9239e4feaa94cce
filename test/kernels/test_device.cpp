#include "test/kernels/test_device.h"

#include <cstdint>
#include <cstring>
#include <string>

#ifdef TRAIN_GPT_CUDA
#include <cuda_runtime_api.h>

#include "device/cuda.h"
#include "kernels/experts/grouped_tile.h"
#endif

#include "base/error.h"

namespace train_gpt {

namespace {

Device current;

#ifdef TRAIN_GPT_CUDA
void require(cudaError_t status) {
    if (status != cudaSuccess) throw Error("CUDA, while testing: ", cudaGetErrorString(status));
}
#endif

}  // namespace

const std::vector<Device>& test_devices() {
    static const std::vector<Device> devices = [] {
        std::vector<Device> found{Device{}};
#ifdef TRAIN_GPT_CUDA
        if (cuda::obstacle(0).reason.empty()) found.push_back({Device::Kind::cuda, 0});
#endif
        return found;
    }();
    return devices;
}

const Device& test_device() { return current; }

DeviceUnderTest::DeviceUnderTest(Device device) { current = device; }
DeviceUnderTest::~DeviceUnderTest() { current = Device{}; }

bool device_is_simulated() {
    static const bool simulated = [] {
        const Device gpu{Device::Kind::cuda, 0};
        return test_devices().size() > 1 && device_name(gpu).find("gpusim") != std::string::npos;
    }();
    return simulated && test_device().is_cuda();
}

bool has_wgmma([[maybe_unused]] const Device& device) {
#ifdef TRAIN_GPT_CUDA
    if (!device.is_cuda()) return false;
    int major = 0, minor = 0;
    require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index));
    require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index));
    return major == 9 && minor == 0 && cuda::wgmma_is_built();
#else
    return false;
#endif
}

TestMemory::TestMemory(size_t bytes) : device_(current) {
#ifdef TRAIN_GPT_CUDA
    if (device_.is_cuda()) {
        require(cudaMallocManaged(&data_, bytes ? bytes : 1));
        std::memset(data_, 0xff, bytes);
        return;
    }
#endif
    host_.assign(bytes + 64, 0xff);
    const auto address = reinterpret_cast<uintptr_t>(host_.data());
    data_ = host_.data() + (64 - address % 64) % 64;
}

TestMemory::~TestMemory() {
#ifdef TRAIN_GPT_CUDA
    if (device_.is_cuda()) cudaFree(data_);
#endif
}

void TestMemory::settle() const {
#ifdef TRAIN_GPT_CUDA
    if (device_.is_cuda()) require(cudaDeviceSynchronize());
#endif
}

}  // namespace train_gpt
