#include "device/device.h"

#include <cstdlib>

#include "base/error.h"
#include "device/instruction_set.h"
#include "test/kernels/kernel_test.h"
#include "test/text.h"
#ifdef TRAIN_GPT_CUDA
#include <cuda_runtime.h>

#include "device/cuda.h"
#endif

namespace train_gpt {

TEST_CASE("cpu_info describes a machine that can exist") {
    const CpuInfo info = cpu_info();
    CHECK_FALSE(info.model.empty());
    CHECK(info.threads >= 1);
    CHECK(info.memory_total > 0);
    CHECK(info.memory_available > 0);
    CHECK(info.memory_available <= info.memory_total);
    CHECK((info.avx512 || !info.avx512_bf16));
#ifdef __x86_64__
    CHECK(info.avx2 == (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")));
    CHECK(info.avx512 ==
          (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd")));
#endif
}

TEST_CASE("the thread count follows OMP_NUM_THREADS, or else the cores this process may use") {
    const char* before = std::getenv("OMP_NUM_THREADS");
    const std::string saved = before ? before : "";
    ::setenv("OMP_NUM_THREADS", "3", 1);
    CHECK(cpu_info().threads == 3);
    ::setenv("OMP_NUM_THREADS", "5,2", 1);
    CHECK(cpu_info().threads == 5);
    ::unsetenv("OMP_NUM_THREADS");
    const int cores = cpu_info().threads;
    CHECK(cores <= omp_get_num_procs());
    for (const char* nonsense : {"", "many", "-1", "0"}) {
        ::setenv("OMP_NUM_THREADS", nonsense, 1);
        CHECK(cpu_info().threads == cores);
    }
    if (before) {
        ::setenv("OMP_NUM_THREADS", saved.c_str(), 1);
    } else {
        ::unsetenv("OMP_NUM_THREADS");
    }
}

TEST_CASE("kernels that the CPU cannot run are refused by name, others are not") {
    CHECK_NOTHROW(require_cpu_features());
    CHECK_NOTHROW(require_instruction_sets(isa_avx2 | isa_fma, isa_avx2 | isa_fma | isa_avx512));
    const std::string message = error_of(
        [] { require_instruction_sets(isa_avx2 | isa_avx512 | isa_avx512_bf16, isa_avx2); });
    CHECK(message.find("AVX-512, AVX512_BF16, which this CPU does not have") != std::string::npos);
    CHECK(message.find("MARCH=native") != std::string::npos);
}

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

TEST_CASE("a stream with too little scratch memory is an error that says how much is missing") {
    TestStream owner(100);
    Stream& stream = owner;
    CHECK(stream.scratch_for<float>(100) == stream.scratch);
    CHECK(error_of([&] { stream.scratch_for<float>(2048); }).find("2.00 KiB") != std::string::npos);
}

}  // namespace train_gpt
