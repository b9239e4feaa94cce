// The device that a test runs on.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "device/device.h"
#include "device/stream.h"

namespace train_gpt {

/// The CPU, and the first GPU (real or simulated) if there is one.
const std::vector<Device>& test_devices();

/// The device under test; the CPU outside of ON_EACH_DEVICE.
const Device& test_device();

/// A stream that runs nothing, to ask how much scratch memory kernels need.
inline Stream planning(const KernelSettings& settings = {}, const Device& device = test_device()) {
    Stream stream(device, true);
    stream.settings = settings;
    return stream;
}

/// Makes a device the test_device() for its lifetime.
class DeviceUnderTest {
  public:
    explicit DeviceUnderTest(Device device);
    ~DeviceUnderTest();
    DeviceUnderTest(const DeviceUnderTest&) = delete;
    DeviceUnderTest& operator=(const DeviceUnderTest&) = delete;
};

/// First line of a test case: runs the rest of it once on each device. The tag [cuda] selects such
/// tests.
#define ON_EACH_DEVICE()                                                         \
    const ::train_gpt::DeviceUnderTest device_under_test(                        \
        GENERATE(::Catch::Generators::from_range(::train_gpt::test_devices()))); \
    INFO("on " << (::train_gpt::test_device().is_cuda() ? "CUDA" : "the CPU"))

/// True with the simulated CUDA device, where kernels run thousands of times slower: shapes must be
/// small.
bool device_is_simulated();

/// Whether it is a GPU of sm_90, which has wgmma, and the build has code for it.
bool has_wgmma(const Device& device);

/// Memory of the device under test that the host can use too, filled with 0xff bytes (NaN). On
/// CUDA it is managed memory of exactly this size, so that writes past its end are detected.
class TestMemory {
  public:
    explicit TestMemory(size_t bytes);
    ~TestMemory();
    TestMemory(const TestMemory&) = delete;
    TestMemory& operator=(const TestMemory&) = delete;

    void* data() const { return data_; }
    /// Waits until the device has done all work submitted to it.
    void settle() const;

  private:
    Device device_;
    void* data_ = nullptr;
    std::vector<unsigned char> host_;
};

/// n objects in memory that kernels and the host can use.
template <class T>
class SharedArray {
  public:
    explicit SharedArray(size_t n) : n_(n), memory_(std::make_unique<TestMemory>(n * sizeof(T))) {}

    T* data() const { return static_cast<T*>(memory_->data()); }
    std::span<T> values() const {
        memory_->settle();
        return {data(), n_};
    }

  private:
    size_t n_;
    std::unique_ptr<TestMemory> memory_;
};

}  // namespace train_gpt
