#include "device/processor.h"

#include <cstdlib>
#include <string>

#include <omp.h>

#include "base/error.h"
#include "device/instruction_set.h"
#include "test/catch.h"
#include "test/text.h"

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

}  // namespace train_gpt
