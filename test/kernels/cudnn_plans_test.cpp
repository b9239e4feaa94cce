// Whether cuDNN makes a plan for the attention of every preset on GPUs that are not here, and needs
// no more scratch memory than it is granted. scripts/check-cudnn.sh runs this.
#ifdef TRAIN_GPT_CUDA
#include <cmath>
#include <set>
#include <string>
#include <tuple>

#include "base/file.h"
#include "base/json_text.h"
#include "kernels/attention/cudnn.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config.h"
#include "training/config/load_config.h"

namespace train_gpt {
namespace {

using cuda::AttentionWay;

/// From NVIDIA's specifications, in the units of cuDNN's device properties.
struct Gpu {
    const char* name;
    int architecture, multiprocessors;
    int64_t memory_gib;
    int l2_mib, shared_kib, threads, blocks;  // the last two per multiprocessor
    int clock_mhz, memory_mhz, bus_bits;
};
constexpr Gpu gpus[] = {
    {"NVIDIA A100-SXM4-80GB", 80, 108, 79, 40, 163, 2048, 32, 1410, 1593, 5120},
    {"NVIDIA GeForce RTX 4090", 89, 128, 23, 72, 99, 1536, 24, 2520, 10501, 384},
    {"NVIDIA H100 80GB HBM3", 90, 132, 79, 50, 227, 2048, 32, 1980, 2619, 5120},
    {"NVIDIA H200", 90, 132, 139, 60, 227, 2048, 32, 1980, 3201, 6144},
    {"NVIDIA B200", 100, 148, 178, 126, 227, 2048, 32, 1965, 3996, 8192},
    {"NVIDIA GeForce RTX 5090", 120, 170, 31, 96, 99, 1536, 24, 2407, 14001, 512}};

std::string properties_of(const Gpu& gpu) {
    const Json properties = {{"deviceName", gpu.name},
                             {"deviceVer", gpu.architecture * 10},
                             {"driverVer", 13000},
                             {"multiProcessorCount", gpu.multiprocessors},
                             {"totalGlobalMem", gpu.memory_gib << 30},
                             {"l2CacheSize", gpu.l2_mib << 20},
                             {"maxSharedMemoryPerBlock", 48 << 10},
                             {"maxSharedMemoryPerBlockOptin", gpu.shared_kib << 10},
                             {"reservedSharedMemoryPerBlock", 1 << 10},
                             {"maxRegistersPerSM", 65536},
                             {"regsPerBlock", 65536},
                             {"maxCtasPerSM", gpu.blocks},
                             {"maxThreadsPerSM", gpu.threads},
                             {"maxThreadsPerBlock", 1024},
                             {"warpSize", 32},
                             {"maxBlockSize", {1024, 1024, 64}},
                             {"maxGridSize", {2147483647, 65535, 65535}},
                             {"smClockRateKHz", gpu.clock_mhz * 1000},
                             {"memClockRateKHz", gpu.memory_mhz * 1000},
                             {"memoryBusWidth", gpu.bus_bits},
                             {"supportCoopLaunch", 1},
                             {"pciDeviceId", 0},
                             {"isTccDriver", 0},
                             {"cudaDeviceId", 0}};
    return properties.dump();
}

/// A pass of a model: a packed matrix of queries, keys and values, outputs on their own, and sinks.
struct Passes {
    AttentionForward forward;
    AttentionBackward backward;

    explicit Passes(const AttentionShape& s, bool with_sinks = false) {
        alignas(16) static char memory[16];
        static float lse;
        const int64_t columns = int64_t{s.H + 2 * s.H_kv} * s.D, width = int64_t{s.H} * s.D;
        const HeadsView packed{memory, s.S * columns, columns, s.D},
            plain{memory, s.T * width, width, s.D};
        forward = {s, packed, packed, packed, plain, &lse};
        if (with_sinks) forward.sinks = Tensor(memory, DType::fp32, {s.H});
        backward = {s, packed, packed, packed, plain, plain, &lse, packed, packed, packed};
    }
};

AttentionShape shape_of(int B, int T, int S, int H, int H_kv, int D) {
    return {.dtype = DType::bf16,
            .B = B,
            .T = T,
            .S = S,
            .H = H,
            .H_kv = H_kv,
            .D = D,
            .scale = 1 / std::sqrt(static_cast<float>(D))};
}

/// Those of the presets and, for each mask and kind of heads, others.
std::set<std::tuple<int, int, int, int, int>> shapes() {  // T, S, H, H_kv, D
    std::set<std::tuple<int, int, int, int, int>> all{
        {2048, 2048, 16, 4, 128}, {8192, 8192, 32, 8, 128}, {1024, 4096, 16, 16, 64},
        {1024, 4096, 16, 2, 128}, {65536, 65536, 8, 1, 64}, {1024, 1024, 6, 2, 40}};
    for (const auto& file : glob_files("configs/*.json")) {
        if (file.filename() == "schema.json") continue;
        const Config config = load_config(file, {});
        const DecoderSpec spec = spec_of(config, 128);
        const int T = static_cast<int>(config.sequence_length());
        all.insert({T, T, spec.n_head, spec.n_kv_head, spec.head_size});
    }
    return all;
}

}  // namespace

TEST_CASE("cuDNN plans the attention of every preset within what it is granted", "[.][plans]") {
    REQUIRE(cuda::cudnn_obstacle("libcudnn.so.9", false) == "");
    const auto [T, S, H, H_kv, D] = GENERATE(from_range(shapes()));
    for (const Gpu& gpu : gpus) {
        const std::string properties = properties_of(gpu);
        const auto B = static_cast<int>(random_int(1, 48));
        const AttentionShape shape = shape_of(B, T, S, H, H_kv, D);
        CAPTURE(gpu.name, B, T, S, H, H_kv, D);
        const Passes passes(shape);
        REQUIRE(cuda::cudnn_supports(passes.forward));
        REQUIRE(cuda::cudnn_supports(passes.backward));
        CHECK(cuda::ask_cudnn(passes.forward, gpu.architecture, properties) <=
              cuda::cudnn_forward_bytes);
        for (const auto way :
             {AttentionWay::cudnn, AttentionWay::cudnn_ordered, AttentionWay::cudnn_unordered}) {
            if (!cuda::cudnn_has(way, gpu.architecture, cuda::cudnn_version())) continue;
            CAPTURE(static_cast<int>(way));
            const size_t granted = cuda::cudnn_backward_bytes(shape, way, gpu.architecture);
            const auto calls = cuda::cudnn_calls(passes.backward, way, gpu.architecture);
            if (calls.empty()) {
                CHECK(T == 65536);
                CHECK(way == AttentionWay::cudnn);
                continue;
            }
            const auto asks = [&](const AttentionBackward& call) {
                return cuda::ask_cudnn(call, way, gpu.architecture, properties);
            };
            // The first call is the largest; the last one may be smaller.
            const size_t wanted = asks(calls.front());
            CHECK(wanted <= granted);
            if (calls.back().shape.B * calls.back().shape.H <
                calls.front().shape.B * calls.front().shape.H)
                CHECK(asks(calls.back()) <= granted);
            // Neither way is another one under its name: what dq is added up through differs.
            if (gpu.architecture == 90)
                CHECK(wanted + 8192 >=
                      cuda::cudnn_backward_bytes(calls.front().shape, way, gpu.architecture));
        }
    }
}

TEST_CASE("cuDNN plans attention with windows and sinks within what it is granted", "[.][plans]") {
    REQUIRE(cuda::cudnn_obstacle("libcudnn.so.9", false) == "");
    const auto [T, S, H, H_kv, D] =
        GENERATE(table<int, int, int, int, int>({{2048, 2048, 64, 8, 64},
                                                 {1024, 1024, 16, 16, 128},
                                                 {1024, 4096, 16, 2, 128},
                                                 {384, 384, 6, 2, 40}}));
    const int window = GENERATE(0, 1, 127, 128, -1);  // −1: any
    const bool with_sinks = window == 0 || random_int(0, 1) == 1;
    for (const Gpu& gpu : gpus) {
        const std::string properties = properties_of(gpu);
        AttentionShape shape = shape_of(static_cast<int>(random_int(1, 8)), T, S, H, H_kv, D);
        shape.window = window < 0 ? static_cast<int>(random_int(2, S - 1)) : window;
        CAPTURE(gpu.name, shape.B, T, S, H, H_kv, D, shape.window, with_sinks);
        const Passes passes(shape, with_sinks);
        REQUIRE(cuda::cudnn_supports(passes.forward));
        REQUIRE(cuda::cudnn_supports(passes.backward));
        if (cuda::cudnn_version() < cuda::cudnn_oldest_version(shape, with_sinks)) continue;
        CHECK(cuda::ask_cudnn(passes.forward, gpu.architecture, properties) <=
              cuda::cudnn_forward_bytes);
        if (window == 0) continue;  // the backward pass does not see sinks
        for (const auto way :
             {AttentionWay::cudnn, AttentionWay::cudnn_ordered, AttentionWay::cudnn_unordered}) {
            if (!cuda::cudnn_has(way, gpu.architecture, cuda::cudnn_version()) ||
                !cuda::cudnn_heeds_window(shape, way, gpu.architecture))
                continue;
            CAPTURE(static_cast<int>(way));
            CHECK(cuda::ask_cudnn(passes.backward, way, gpu.architecture, properties) <=
                  cuda::cudnn_backward_bytes(shape, way, gpu.architecture));
        }
    }
}

}  // namespace train_gpt
#endif
