// The kernels for sm_90a: when they run. What they compute is tested with the operations' other
// kernels (attention_test.cpp, attention_window_test.cpp, grouped_linear_test.cpp).
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/profile.h"
#include "kernels/attention/engine.h"
#include "kernels/choices.h"
#include "kernels/experts/grouped_linear.h"
#include "test/catch.h"
#include "test/kernels/attention_problem.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/test_device.h"
#include "test/random.h"
#include "test/text.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_queue.h"
#include "kernels/experts/grouped_ways.h"
#include "kernels/tensor_map.h"
#endif

namespace train_gpt {
#ifdef TRAIN_GPT_CUDA
namespace {

using cuda::AttentionWay;
using Wanted = KernelSettings::Attention;

/// Which kernels computed a case's passes, as attention_use() says.
AttentionUse use_of(const AttentionShape& shape, const HeadsView& view, Wanted wanted) {
    Stream stream(test_device());
    stream.settings.attention = wanted;
    const TestMemory scratch(attention_scratch_bytes(stream, shape)), other(view.batch * 2 * 2),
        lse(static_cast<size_t>(shape.H * shape.T) * sizeof(float));
    stream.scratch = scratch.data();
    stream.scratch_bytes = attention_scratch_bytes(stream, shape);
    HeadsView out = view;
    out.data = other.data();
    auto* const sums = static_cast<float*>(lse.data());
    attention_forward(stream, {shape, view, view, view, out, sums});
    attention_backward(stream, {shape, view, view, view, view, view, sums, out, out, out});
    stream.synchronize();
    return attention_use(stream);
}

/// The engines of a queue without a library, whose passes only take time.
struct Scripted {
    inline static int clock = 0;  // milliseconds
    static double time(Stream&, const cuda::AttentionEngines::Work& work) {
        const int before = clock;
        work();
        return 1e-3 * (clock - before);
    }
    static std::unique_ptr<cuda::AttentionLibrary> none(CUstream_st*) {
        throw Error("there is none in this test");
    }

    cuda::AttentionEngines engines{nullptr, 90, none, time};
    Stream stream{test_device()};
    alignas(16) char bytes[16] = {};
    float lse = 0;
    int32_t document = 0;
    int own = 0, wgmma = 0, own_milliseconds = 2, wgmma_milliseconds = 1;
    bool possible = true;

    explicit Scripted(bool autotune = true) { stream.settings.autotune = autotune; }
    bool attempt() {
        if (!possible) return false;
        ++wgmma, clock += wgmma_milliseconds;
        return true;
    }
    AttentionShape shape(bool documents, int keys = 128) const {
        return {.dtype = DType::bf16,
                .B = 1,
                .T = 128,
                .S = keys,
                .H = 2,
                .H_kv = 2,
                .D = 64,
                .scale = 0.125f,
                .doc_start = documents ? &document : nullptr};
    }
    void forward(bool documents = false) {
        const HeadsView view{bytes, 128 * 128, 128, 64};
        engines.forward(
            stream, {shape(documents), view, view, view, view, &lse},
            [&] { ++own, clock += own_milliseconds; }, [&] { return attempt(); });
    }
    void backward(int keys, KeyGradients key_gradients) {
        const HeadsView view{bytes, 128 * 128, 128, 64};
        engines.backward(
            stream,
            {shape(false, keys), view, view, view, view, view, &lse, view, view, view,
             key_gradients},
            [&] { ++own, clock += own_milliseconds; }, [&] { return attempt(); });
    }
};
const std::string shape_words = "B=1,T=128,S=128,H=2,H_kv=2,D=64";

}  // namespace

TEST_CASE("tensor maps are made of what the copy engine can read, and of nothing else", "[cuda]") {
    ON_EACH_DEVICE();
    if (!has_wgmma(test_device())) return;
    const TestMemory memory(1 << 16);
    const auto made = [&](size_t offset, int64_t columns, int64_t stride) {
        return cuda::tensor_map({.data = static_cast<char*>(memory.data()) + offset,
                                 .extents = {columns, 8, 2},
                                 .strides = {stride, 8 * stride},
                                 .box_rows = 64})
            .has_value();
    };
    CHECK(made(0, 64, 64));
    CHECK(made(16, 40, 72));
    CHECK_FALSE(made(8, 64, 64));  // the address
    CHECK_FALSE(made(0, 64, 68));  // a stride of no multiple of 16 bytes
    CHECK_FALSE(made(0, 64, int64_t{1} << 39));
    CHECK_FALSE(made(0, 64, -64));
    CHECK_FALSE(made(0, 64, 0));
    CHECK_FALSE(made(0, 0, 64));
    CHECK_FALSE(made(0, int64_t{1} << 31, 64));  // coordinates have 32 bits
    // A stride that is never used may be anything.
    CHECK(cuda::tensor_map({memory.data(), {64, 8, 1}, {64, 5}, 64}));
    CHECK(cuda::tensor_map(HeadsView{memory.data(), 3, 64, 7}, 1, 16, 1, 64, 128));
    CHECK_FALSE(cuda::tensor_map(HeadsView{memory.data(), 3, 64, 7}, 1, 16, 2, 64, 128));
}

TEST_CASE("attention for sm_90a runs where it is wanted, and other kernels where it cannot",
          "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const TestMemory memory(size_t{1} << 16);
    std::memset(memory.data(), 0, size_t{1} << 16);
    const AttentionShape shape{.dtype = DType::bf16,
                               .B = 1,
                               .T = 32,
                               .S = 32,
                               .H = 2,
                               .H_kv = 2,
                               .D = 64,
                               .scale = 0.125f};
    const HeadsView aligned{memory.data(), 32 * 128, 128, 64};
    const std::string ours = has_wgmma(test_device()) ? "own (wgmma)" : "own";
    CHECK(use_of(shape, aligned, Wanted::wgmma).engines() == ours);
    CHECK(use_of(shape, aligned, Wanted::own).engines() == "own");
    // A stride that the copy engine cannot use. The view is 16-byte aligned throughout, so that the
    // older kernels take it on tensor cores, and only the tensor map rules it out.
    const auto has_map = [&](const HeadsView& view) {
        return cuda::tensor_map(view, shape.B, shape.T, shape.H, shape.D, 128).has_value();
    };
    HeadsView together = aligned;
    together.head = 0;  // both heads are one
    if (has_wgmma(test_device())) CHECK(has_map(aligned));
    CHECK_FALSE(has_map(together));
    const AttentionUse use = use_of(shape, together, Wanted::wgmma);
    CHECK(use.engines() == "own");
    CHECK(use.explained() ==
          "own kernels, since those for sm_90a cannot compute this shape on this GPU");
    // An address of no multiple of 16 bytes: no kernel on tensor cores takes it.
    HeadsView shifted = aligned;
    shifted.data = static_cast<char*>(memory.data()) + 2;
    CHECK(use_of(shape, shifted, Wanted::wgmma).engines() == "own");
}

TEST_CASE("our own two kinds of attention are timed, and the choice is kept", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const bool documents : {false, true}) {
        Scripted e;
        e.forward(documents);
        const std::string line =
            concat("attention forward ", shape_words, documents ? ",own" : "", " wgmma\n");
        CHECK(e.engines.choices() == line);
        CHECK(e.engines.use().explained() == "own (wgmma) kernels, which are faster here");
        const int before = e.own;
        e.forward(documents);
        CHECK(e.own == before);

        Scripted slower;
        slower.wgmma_milliseconds = 3;
        slower.forward(documents);
        CHECK(contains(slower.engines.choices(), " own\n"));

        Scripted resumed;
        resumed.engines.set_choices(line);
        resumed.forward(documents);
        CHECK(std::pair(resumed.own, resumed.wgmma) == std::pair(0, 1));
        CHECK(resumed.engines.use().explained() ==
              "own (wgmma) kernels, as chosen at an earlier start");
        resumed.possible = false;  // another call of the shape, with views that rule a map out
        resumed.forward(documents);
        CHECK(resumed.own == 1);
    }
    Scripted untimed(false);
    untimed.forward();
    CHECK(std::pair(untimed.own, untimed.wgmma) == std::pair(1, 0));
    CHECK_FALSE(contains(untimed.engines.choices(), "wgmma"));
}

TEST_CASE("a backward pass that adds to gradients runs once, the way of one with other keys",
          "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    Scripted e;
    e.backward(128, KeyGradients::add_fp32);
    CHECK(std::pair(e.own, e.wgmma) == std::pair(1, 0));
    CHECK(e.engines.choices().empty());
    e.backward(256, KeyGradients::write_fp32);
    CHECK(contains(e.engines.choices(), "backward B=1,T=128,S=256,H=2,H_kv=2,D=64,own wgmma\n"));
    e.own = e.wgmma = 0;
    e.backward(128, KeyGradients::add_fp32);
    CHECK(std::pair(e.own, e.wgmma) == std::pair(0, 1));
    e.possible = false;
    e.backward(128, KeyGradients::add_fp32);
    CHECK(std::pair(e.own, e.wgmma) == std::pair(1, 1));

    Scripted slower;
    slower.wgmma_milliseconds = 3;
    slower.backward(256, KeyGradients::write_fp32);
    slower.own = slower.wgmma = 0;
    slower.backward(128, KeyGradients::add_fp32);
    CHECK(std::pair(slower.own, slower.wgmma) == std::pair(1, 0));
}

TEST_CASE("a grouped product's kernels are timed once, and the choice is kept", "[cuda]") {
    ON_EACH_DEVICE();
    if (!has_wgmma(test_device())) return;
    using cuda::GroupedWay;
    std::map<GroupedWay, int> ran;
    bool possible = true;
    const auto submit = [&](GroupedWay way) {
        if (way != GroupedWay::mma && !possible) return false;
        ++ran[way];
        return true;
    };
    Stream stream(test_device());
    auto& ways = stream.queue->kept<cuda::GroupedWays>();
    const std::string name = "forward E=4,R=64,N=128,K=64";
    ways.run(stream, name, true, 128, submit);
    CHECK((ran == std::map<GroupedWay, int>{{GroupedWay::mma, 1}}));  // without autotune
    const auto untimed = [&] { ways.run(stream, name, true, 128, submit, GroupedWay::wgmma_128); };
    untimed();
    possible = false;
    untimed();
    CHECK((ran == std::map<GroupedWay, int>{{GroupedWay::mma, 2}, {GroupedWay::wgmma_128, 1}}));
    possible = true;
    ran = {{GroupedWay::mma, 1}};
    stream.settings.autotune = true;
    ways.run(stream, name, false, 128, submit);  // adds to its outputs: cannot be timed
    CHECK((ran == std::map<GroupedWay, int>{{GroupedWay::mma, 2}}));
    CHECK(kernel_choices(stream).empty());
    ways.run(stream, name, true, 128, submit);
    CHECK(ran.size() == 3);
    const std::string choices = kernel_choices(stream);
    CHECK(choices.starts_with("grouped " + name + " "));

    Stream other(test_device());
    other.settings.autotune = true;
    set_kernel_choices(other, "grouped " + name + " wgmma_256\n");
    ran.clear();
    other.queue->kept<cuda::GroupedWays>().run(other, name, false, 128, submit);
    CHECK((ran == std::map<GroupedWay, int>{{GroupedWay::wgmma_256, 1}}));
    possible = false;
    other.queue->kept<cuda::GroupedWays>().run(other, name, true, 128, submit);
    CHECK(ran[GroupedWay::mma] == 1);
    CHECK(unite_kernel_choices(other, {"grouped " + name + " mma\n", choices}));
    CHECK(kernel_choices(other) == "grouped " + name + " mma\n");
    for (const char* damaged :
         {"grouped forward\n", "grouped forward E=1 flash\n", "grouped forward E=1 mma mma\n"})
        CHECK(contains(error_of([&] { set_kernel_choices(other, damaged); }), "damaged"));
}

#endif
}  // namespace train_gpt
