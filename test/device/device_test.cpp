#include "device/device.h"

#include "base/error.h"
#include "device/processor.h"
#include "test/kernels/kernel_test.h"
#include "test/text.h"
#ifdef TRAIN_GPT_CUDA
#include <cuda_runtime.h>

#include "device/cuda.h"
#endif

namespace train_gpt {

TEST_CASE("open_device takes auto and cpu, and says why others cannot be used") {
    const int threads_before = omp_get_max_threads();
    CHECK(open_device("cpu").kind == Device::Kind::cpu);
    CHECK(omp_get_max_threads() == cpu_info().threads);
    CHECK_NOTHROW(open_device("auto"));
    omp_set_num_threads(threads_before);
    CHECK(error_of([] { open_device("tpu"); }).find("\"tpu\"") != std::string::npos);
    CHECK(error_of([] { open_device(""); }).find("must be") != std::string::npos);
    CHECK(describe_devices().find("CPU") == 0);
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("a GPU whose driver fails is a fault, and a machine without a GPU is not", "[cuda]") {
    using cuda::GpuSearch;
    struct Case {
        GpuSearch search;
        const char* says;
        bool is_fault;
    };
    const GpuSearch none{.status = cudaErrorNoDevice, .driver = 13000};
    const auto with = [](GpuSearch search, auto&& change) {
        change(search);
        return search;
    };
    const GpuSearch broken{.status = cudaErrorUnknown, .driver = 13000, .has_hardware = true};
    const Case cases[] = {
        {{.count = 1, .driver = 13000, .has_hardware = true}, "", false},
        {none, "there is no NVIDIA GPU here", false},
        {{.status = cudaErrorInsufficientDriver}, "there is no NVIDIA driver here", false},
        {with(none, [](GpuSearch& s) { s.has_hardware = s.is_hidden = true; }),
         "CUDA_VISIBLE_DEVICES leaves no GPU", false},
        {with(none, [](GpuSearch& s) { s.has_hardware = true; }), "none of the GPUs in /dev", true},
        {with(none, [](GpuSearch& s) { s.has_hardware = s.is_forbidden = true; }),
         "may not open /dev/nvidia*", true},
        {with(broken, [](GpuSearch& s) { s.status = cudaErrorSystemNotReady; }),
         "nvidia-fabricmanager", true},
        {with(broken, [](GpuSearch& s) { s.status = cudaErrorSystemDriverMismatch; }), "reboot",
         true},
        {with(broken,
              [](GpuSearch& s) { s.status = cudaErrorInsufficientDriver, s.driver = 12040; }),
         "supports CUDA 12.4, but this build needs 13", true},
        {with(broken, [](GpuSearch& s) { s.status = cudaErrorInsufficientDriver, s.driver = 0; }),
         "libcuda.so.1 is not found", true},
        // The device files are those of the host if a container passes /dev on.
        {with(broken, [](GpuSearch& s) { s.is_hidden = true; }), "CUDA reports: ", true},
    };
    for (const Case& c : cases) {
        const cuda::Obstacle obstacle = cuda::obstacle_of(c.search);
        CAPTURE(obstacle.reason, c.says);
        CHECK(obstacle.reason.empty() == (*c.says == 0));
        CHECK(contains(obstacle.reason, c.says));
        CHECK(obstacle.is_fault == c.is_fault);
    }
}

#endif

}  // namespace train_gpt
