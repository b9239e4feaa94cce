// cuDNN as a second implementation of attention: the choice between the two with a library that
// stands in for it, and cuDNN itself where it is found.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "base/error.h"
#include "device/cuda.h"
#include "kernels/attention/cuda.h"
#include "kernels/attention/cudnn.h"
#include "kernels/attention/engine.h"
#include "kernels/choices.h"
#include "test/catch.h"
#include "test/kernels/kernel_test.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

#ifdef TRAIN_GPT_CUDA
#include <cuda_runtime_api.h>
#endif

namespace train_gpt {
#ifdef TRAIN_GPT_CUDA
namespace {

using Wanted = KernelSettings::Attention;
using cuda::AttentionWay;

constexpr AttentionWay all_ways[] = {AttentionWay::own, AttentionWay::cudnn,
                                     AttentionWay::cudnn_ordered, AttentionWay::cudnn_unordered};
constexpr const char* words[] = {"own", "cudnn", "cudnn_ordered", "cudnn_unordered"};
const char* word_of(AttentionWay way) { return words[static_cast<int>(way)]; }

AttentionShape small_shape() {
    return {.dtype = DType::bf16,
            .B = 2,
            .T = 128,
            .S = 128,
            .H = 4,
            .H_kv = 2,
            .D = 16,
            .scale = 0.25f};
}

/// Views that no kernel touches.
struct Untouched {
    alignas(16) char bytes[16];
    float lse = 0;
    HeadsView view{bytes, 128 * 64, 64, 16};

    AttentionForward forward(const AttentionShape& shape = small_shape()) {
        return {shape, view, view, view, view, &lse};
    }
    AttentionBackward backward(const AttentionShape& shape = small_shape()) {
        return {shape, view, view, view, view, view, &lse, view, view, view};
    }
};

/// A library whose behaviour each test sets, and a count of what reached it.
struct Script {
    std::string open_failure, forward_failure, backward_failure;
    size_t version = 91900;
    Tensor sinks;          // of the latest forward pass
    int milliseconds = 0;  // that a pass takes, if its way has no time of its own
    std::map<AttentionWay, int> way_milliseconds;
    std::map<AttentionWay, std::string> way_failures;
    int clock = 0;  // milliseconds that all passes have taken
    int opened = 0, forwards = 0, backwards = 0;
    std::set<AttentionWay> asked;  // for a backward pass
};
Script script;

class ScriptedLibrary : public cuda::AttentionLibrary {
  public:
    std::string name() const override { return "a library 1.2"; }
    size_t version() const override { return script.version; }
    void forward(const AttentionForward& args, void*, size_t) override {
        script.sinks = args.sinks;
        if (!script.forward_failure.empty()) throw Error(script.forward_failure);
        ++script.forwards;
        script.clock += script.milliseconds;
    }
    void backward(AttentionWay way, const AttentionBackward&, void*, size_t) override {
        script.asked.insert(way);
        if (!script.backward_failure.empty()) throw Error(script.backward_failure);
        if (script.way_failures.contains(way)) throw Error(script.way_failures[way]);
        ++script.backwards;
        script.clock += script.way_milliseconds.contains(way) ? script.way_milliseconds[way]
                                                              : script.milliseconds;
    }
};

std::unique_ptr<cuda::AttentionLibrary> open_scripted(CUstream_st*) {
    ++script.opened;
    if (!script.open_failure.empty()) throw Error(script.open_failure);
    return std::make_unique<ScriptedLibrary>();
}

/// A reason that no line has named before.
std::string fresh_reason() {
    return "the test says so, number " + std::to_string(random_int(1, int64_t{1} << 60));
}

/// What is written to stderr while it lives.
class Stderr {
  public:
    Stderr() : file_(std::tmpfile()), kept_(::dup(2)) {
        std::fflush(stderr);
        ::dup2(::fileno(file_), 2);
    }
    ~Stderr() { restore(); }
    Stderr(const Stderr&) = delete;
    Stderr& operator=(const Stderr&) = delete;

    std::string text() {
        restore();
        std::rewind(file_);
        std::string all;
        for (int c = std::fgetc(file_); c != EOF; c = std::fgetc(file_))
            all += static_cast<char>(c);
        return all;
    }

  private:
    void restore() {
        if (kept_ < 0) return;
        std::fflush(stderr);
        ::dup2(kept_, 2);
        ::close(std::exchange(kept_, -1));
    }
    std::FILE* file_;
    int kept_;
};

/// Time as the script's clock tells it.
double scripted_time(Stream&, const cuda::AttentionEngines::Work& work) {
    const int before = script.clock;
    work();
    return 1e-3 * (script.clock - before);
}

/// A line of choices() for the shape of Untouched's calls.
std::string line_of(const std::string& direction, const std::string& engine,
                    const AttentionShape& s = small_shape()) {
    return concat("attention ", direction, " B=", s.B, ",T=", s.T, ",S=", s.S, ",H=", s.H,
                  ",H_kv=", s.H_kv, ",D=", s.D, s.window ? concat(",window=", s.window) : "", " ",
                  engine, "\n");
}

/// The engines of a queue, whose own kernels only count.
struct Engines {
    int architecture;
    cuda::AttentionEngines engines{nullptr, architecture, open_scripted, scripted_time};
    Stream stream{test_device()};
    Untouched memory;
    int own_forwards = 0, own_backwards = 0;
    int own_milliseconds = 0;

    explicit Engines(Wanted wanted = Wanted::automatic, int of_gpu = 90) : architecture(of_gpu) {
        stream.settings.attention = wanted;
    }
    void forward() { forward(memory.forward()); }
    void forward(const AttentionForward& args) {
        engines.forward(stream, args, [&] { ++own_forwards, script.clock += own_milliseconds; });
    }
    bool backward(const AttentionShape& shape = small_shape()) {
        return engines.backward(stream, memory.backward(shape),
                                [&] { ++own_backwards, script.clock += own_milliseconds; });
    }
    std::string used() const { return engines.use().explained(); }
};

}  // namespace

TEST_CASE(
    "cuDNN is asked for bf16 heads of whole tiles of tokens without documents, in aligned views",
    "[cuda]") {
    Untouched memory;
    const auto supported = [&](const AttentionShape& shape) {
        const bool forward = cuda::cudnn_supports(memory.forward(shape));
        CHECK(cuda::cudnn_supports(memory.backward(shape)) == forward);
        return forward;
    };
    CHECK(supported(small_shape()));
    const auto changed = [&](auto change) {
        AttentionShape shape = small_shape();
        change(shape);
        return supported(shape);
    };
    CHECK(changed([](AttentionShape& s) { s.D = 128; }));
    CHECK(changed([](AttentionShape& s) { s.H_kv = 1; }));
    CHECK(changed([](AttentionShape& s) { s.T = s.S = 1024; }));
    CHECK_FALSE(changed([](AttentionShape& s) { s.dtype = DType::fp32; }));
    CHECK_FALSE(changed([](AttentionShape& s) { s.D = 136; }));
    CHECK_FALSE(changed([](AttentionShape& s) { s.D = 12; }));
    CHECK_FALSE(changed([](AttentionShape& s) { s.H_kv = 3; }));
    CHECK(changed([](AttentionShape& s) { s.S = 256; }));
    CHECK_FALSE(changed([](AttentionShape& s) { s.S = 200; }));
    CHECK_FALSE(changed([](AttentionShape& s) { s.T = s.S = 1000; }));
    const int32_t documents[2 * 128] = {};
    CHECK_FALSE(changed([&](AttentionShape& s) { s.doc_start = documents; }));
    CHECK_FALSE(changed([](AttentionShape& s) { s.softcap = 30; }));
    CHECK(changed([](AttentionShape& s) { s.window = 127; }));
    AttentionForward with_sinks = memory.forward();
    with_sinks.sinks = Tensor(memory.bytes, DType::bf16, {4});
    CHECK(cuda::cudnn_supports(with_sinks));
    AttentionBackward to_sinks = memory.backward();
    to_sinks.sinks = with_sinks.sinks;
    CHECK(cuda::cudnn_supports(to_sinks));

    AttentionForward sampling = memory.forward();
    sampling.lse = nullptr;
    CHECK_FALSE(cuda::cudnn_supports(sampling));
    for (HeadsView AttentionForward::*view : {&AttentionForward::q, &AttentionForward::k,
                                              &AttentionForward::v, &AttentionForward::out}) {
        AttentionForward args = memory.forward();
        (args.*view).data = memory.bytes + 2;
        CHECK_FALSE(cuda::cudnn_supports(args));
        args = memory.forward();
        (args.*view).token = 68;
        CHECK_FALSE(cuda::cudnn_supports(args));
    }
    for (HeadsView AttentionBackward::*view :
         {&AttentionBackward::q, &AttentionBackward::k, &AttentionBackward::v,
          &AttentionBackward::out, &AttentionBackward::dout, &AttentionBackward::dq,
          &AttentionBackward::dk, &AttentionBackward::dv}) {
        AttentionBackward args = memory.backward();
        (args.*view).head = 20;
        CHECK_FALSE(cuda::cudnn_supports(args));
    }
    for (const KeyGradients in_fp32 : {KeyGradients::write_fp32, KeyGradients::add_fp32}) {
        AttentionBackward args = memory.backward();
        args.key_gradients = in_fp32;
        CHECK_FALSE(cuda::cudnn_supports(args));
    }
}

TEST_CASE("what keeps cuDNN from being used is said as the end of a sentence", "[cuda]") {
    const std::string missing = cuda::cudnn_obstacle("libcudnn-that-is-nowhere.so.9"),
                      other = cuda::cudnn_obstacle("libm.so.6");
    if (contains(missing, "scripts/setup.sh")) {  // a build without cuDNN says only that
        CHECK(other == missing);
        return;
    }
    CHECK(contains(missing, "cuDNN cannot be loaded (libcudnn-that-is-nowhere.so.9: "));
    CHECK(other == "libm.so.6 is not cuDNN");
    const DeviceUnderTest gpu(test_devices().back());
    if (device_is_simulated())
        CHECK(cuda::cudnn_obstacle() == "cuDNN does not start: CUDNN_STATUS_NOT_INITIALIZED");
}

TEST_CASE("cuDNN's left bound shows the keys of a window", "[cuda]") {
    for (int round = 0; round < 100; ++round) {
        AttentionShape s = small_shape();
        s.S = static_cast<int>(random_int(1, 60));
        s.window = static_cast<int>(random_int(0, s.S + 5));
        const int bound = cuda::cudnn_left_bound(s),
                  query = static_cast<int>(random_int(0, s.S - 1));
        CAPTURE(s.S, s.window, bound, query);
        for (int key = 0; key <= query; ++key) {
            const bool shown = bound == 0 || key + bound > query,  // as cuDNN's graphs compare
                seen = s.window == 0 || query - key <= s.window - 1;
            REQUIRE(shown == seen);
        }
    }
}

TEST_CASE("scratch is granted to cuDNN only where it can be used", "[cuda]") {
    AttentionShape shape = small_shape();
    const size_t forward = cuda::attention_library_forward_scratch_bytes({}, shape),
                 both = cuda::attention_library_scratch_bytes({}, shape, 90);
    if (cuda::cudnn_obstacle().empty()) {
        CHECK(forward == 256 + cuda::cudnn_forward_bytes);  // sinks first
        CHECK(both == cuda::cudnn_backward_bytes(shape, AttentionWay::cudnn, 90));
    } else {
        CHECK(forward + both == 0);
    }
    const KernelSettings own{.attention = Wanted::own};
    CHECK(cuda::attention_library_forward_scratch_bytes(own, shape) == 0);
    CHECK(cuda::attention_library_scratch_bytes(own, shape, 90) == 0);
    shape.dtype = DType::fp32;
    CHECK(cuda::attention_library_forward_scratch_bytes({}, shape) == 0);
    CHECK(cuda::attention_library_scratch_bytes({}, shape, 90) == 0);
}

TEST_CASE("cuDNN's backward pass gets what it asks for, and little more", "[cuda]") {
    struct Known {
        AttentionWay way;
        int architecture, B, T, S, H, H_kv, D;
        size_t bytes;
    };
    constexpr auto matrix = AttentionWay::cudnn, ordered = AttentionWay::cudnn_ordered,
                   unordered = AttentionWay::cudnn_unordered;
    // Answers of cuDNN 9.19 and 9.28 (scripts/check-cudnn.sh).
    const Known answers[] = {{matrix, 80, 8, 1024, 1024, 12, 12, 64, 201719936},
                             {matrix, 80, 8, 2048, 2048, 16, 4, 128, 1209008256},
                             {matrix, 80, 8, 2048, 2048, 32, 32, 64, 2149580928},
                             {matrix, 90, 8, 1024, 1024, 12, 12, 64, 201720064},
                             {matrix, 90, 8, 2048, 2048, 16, 4, 128, 1209008384},
                             {matrix, 90, 8, 2048, 2048, 32, 32, 64, 2149581056},
                             {matrix, 100, 8, 1024, 1024, 12, 12, 64, 393216},
                             {matrix, 100, 8, 2048, 2048, 16, 4, 128, 269484160},
                             {matrix, 100, 8, 2048, 2048, 32, 32, 64, 2097152},
                             {matrix, 100, 8, 8192, 8192, 16, 4, 128, 1077936256},
                             {matrix, 120, 8, 1024, 1024, 12, 12, 64, 201719936},
                             {matrix, 120, 8, 2048, 2048, 16, 4, 128, 1209008256},
                             {ordered, 90, 8, 1024, 1024, 12, 12, 64, 25571584},
                             {ordered, 90, 8, 2048, 2048, 16, 4, 128, 269517056},
                             {ordered, 90, 2, 1024, 4096, 16, 2, 128, 84021504},
                             {ordered, 90, 1, 65536, 65536, 8, 1, 64, 270598400},
                             {ordered, 90, 1, 131072, 131072, 32, 8, 128, 4312269056},
                             {unordered, 80, 8, 1024, 1024, 12, 12, 64, 50724992},
                             {unordered, 80, 2, 1024, 4096, 16, 2, 128, 100794496},
                             {unordered, 80, 2, 8192, 8192, 32, 8, 128, 807403648},
                             {unordered, 90, 8, 1024, 1024, 12, 12, 64, 25559296},
                             {unordered, 90, 2, 1024, 4096, 16, 2, 128, 84017408},
                             {unordered, 90, 1, 131072, 131072, 32, 8, 128, 4311744768},
                             {unordered, 100, 1, 128, 128, 4, 2, 16, 100480},
                             {unordered, 120, 2, 8192, 8192, 32, 8, 128, 807403648}};
    for (const Known& k : answers) {
        CAPTURE(word_of(k.way), k.architecture, k.T, k.H, k.H_kv);
        const AttentionShape shape{
            .dtype = DType::bf16, .B = k.B, .T = k.T, .S = k.S, .H = k.H, .H_kv = k.H_kv, .D = k.D};
        const size_t granted = cuda::cudnn_backward_bytes(shape, k.way, k.architecture);
        CHECK(granted >= k.bytes);
        CHECK(granted <= k.bytes + 8192);
    }
}

TEST_CASE("cuDNN's backward pass is cut into few even calls below the limit", "[cuda]") {
    Untouched memory;
    const int architecture = GENERATE(90, 100);
    const AttentionWay way =
        GENERATE(AttentionWay::cudnn, AttentionWay::cudnn_ordered, AttentionWay::cudnn_unordered);
    for (int round = 0; round < 200; ++round) {
        AttentionShape shape = small_shape();
        shape.B = static_cast<int>(random_int(1, 90));
        shape.H_kv = static_cast<int>(random_int(1, 40));
        shape.H = shape.H_kv * static_cast<int>(random_int(1, 4));
        shape.T = shape.S = static_cast<int>(1024 * random_int(1, 48));
        shape.D = static_cast<int>(8 * random_int(1, 16));
        CAPTURE(word_of(way), architecture, shape.B, shape.T, shape.H, shape.H_kv, shape.D);
        // The bytes of one key head's largest matrix.
        const auto group = static_cast<size_t>(shape.H / shape.H_kv),
                   T = static_cast<size_t>(shape.T), D = static_cast<size_t>(shape.D);
        const size_t shared = group > 1 ? group * 8 * T * D : 0,
                     scores = architecture == 100 ? 0 : group * T * T * 2,
                     head = way == AttentionWay::cudnn ? std::max(shared, scores)
                                                       : std::max(shared / 2, group * 4 * T * D);
        const auto calls = cuda::cudnn_calls(memory.backward(shape), way, architecture);
        if (head > size_t{2} << 30) {
            CHECK(calls.empty());
            CHECK(cuda::cudnn_backward_bytes(shape, way, architecture) == 0);
            continue;
        }
        // The fewest calls.
        const auto B = static_cast<size_t>(shape.B), H_kv = static_cast<size_t>(shape.H_kv);
        const auto calls_for = [&](size_t count, size_t bytes) {
            const size_t fitting = bytes == 0 ? count : (size_t{2} << 30) / bytes;
            return (count + fitting - 1) / fitting;
        };
        CHECK(calls.size() == (head * H_kv <= size_t{2} << 30 ? calls_for(B, head * H_kv)
                                                              : B * calls_for(H_kv, head)));
        size_t heads = 0;
        for (const AttentionBackward& call : calls) {
            const auto held =
                static_cast<size_t>(call.shape.B) * static_cast<size_t>(call.shape.H_kv);
            CHECK((call.shape.H_kv == shape.H_kv || call.shape.B == 1));
            CHECK(call.shape.H == call.shape.H_kv * static_cast<int>(group));
            CHECK(held * head <= size_t{2} << 30);
            heads += held;
        }
        CHECK(heads == B * H_kv);
        const size_t granted = cuda::cudnn_backward_bytes(shape, way, architecture);
        for (const AttentionBackward& call : calls)
            CHECK(cuda::cudnn_backward_bytes(call.shape, way, architecture) <= granted);
    }
}

TEST_CASE("own attention does not open the library, wanted cuDNN does not try our own", "[cuda]") {
    script = {};
    Engines e(Wanted::own);
    e.forward();
    e.backward();
    CHECK(std::pair(e.own_forwards, e.own_backwards) == std::pair(1, 1));
    CHECK(script.opened == 0);
    CHECK(e.used() == "own kernels, as configured");
    CHECK(e.engines.use().engines() == "own");
    e.stream.settings.attention = Wanted::cudnn;
    for (int i = 0; i < 3; ++i) {
        e.forward();
        e.backward();
    }
    CHECK(std::pair(e.own_forwards, e.own_backwards) == std::pair(1, 1));
    CHECK(std::pair(script.forwards, script.backwards) == std::pair(3, 3));
    CHECK(script.opened == 1);
    CHECK(e.engines.choices().empty());
    CHECK(e.used() == "a library 1.2");
    CHECK(e.engines.use().engines() == "a library 1.2");

    const int32_t documents[2 * 128] = {};
    AttentionShape masked = small_shape();
    masked.doc_start = documents;
    e.forward(e.memory.forward(masked));
    CHECK(e.own_forwards == 2);
    CHECK(e.used() ==
          "own kernels forward, since cuDNN is not used with a document mask; a library 1.2 "
          "backward");
    CHECK(e.engines.use().engines() == "own forward, a library 1.2 backward");
    AttentionForward sampling = e.memory.forward();
    sampling.lse = nullptr;
    e.forward();
    e.forward(sampling);  // which does not count
    CHECK(script.forwards == 4);
    CHECK(e.used() == "a library 1.2");
}

TEST_CASE("where the library cannot be opened our own attention computes, and one line says why",
          "[cuda]") {
    const Wanted wanted = GENERATE(Wanted::automatic, Wanted::cudnn);
    CAPTURE(static_cast<int>(wanted));
    script = {};
    script.open_failure = fresh_reason();
    Stderr captured;
    Engines first(wanted), second(wanted);
    for (Engines* e : {&first, &second}) {
        for (int i = 0; i < 2; ++i) {
            e->forward();
            e->backward();
        }
    }
    CHECK(captured.text() ==
          "train_gpt: attention runs on our own kernels, since " + script.open_failure + "\n");
    for (Engines* e : {&first, &second}) {
        CHECK(e->used() == "own kernels, since " + script.open_failure);
        CHECK(std::pair(e->own_forwards, e->own_backwards) == std::pair(2, 2));
        CHECK(e->engines.choices() == (wanted == Wanted::automatic
                                           ? line_of("forward", "own") + line_of("backward", "own")
                                           : ""));
    }
    CHECK(script.opened == 2);
}

TEST_CASE("a pass in which the library fails is done by our own kernels from then on", "[cuda]") {
    script = {};
    Engines e(Wanted::cudnn);
    e.forward();
    SECTION("backward") {
        script.backward_failure = fresh_reason();
        Stderr captured;
        e.backward();
        e.backward();
        e.forward();
        CHECK(captured.text() ==
              "train_gpt: the backward pass of attention runs on our own kernels, since " +
                  script.backward_failure + "\n");
        CHECK(std::pair(e.own_forwards, e.own_backwards) == std::pair(0, 2));
        CHECK(script.forwards == 2);
        CHECK(e.used() ==
              "a library 1.2 forward; own kernels backward, since " + script.backward_failure);
    }
    SECTION("forward, and then the backward pass with it") {
        script.forward_failure = fresh_reason();
        Stderr captured;
        e.forward();
        e.backward();
        CHECK(captured.text() == "train_gpt: attention runs on our own kernels, since " +
                                     script.forward_failure + "\n");
        CHECK(std::pair(e.own_forwards, e.own_backwards) == std::pair(1, 1));
        CHECK(script.backwards == 0);
    }
}

TEST_CASE("the faster engine of each pass is chosen once", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    script = {};
    Engines e;
    script.milliseconds = 5;
    e.forward();
    CHECK(e.engines.choices() == line_of("forward", "own"));
    script.milliseconds = 0;
    e.own_milliseconds = 5;
    e.backward();
    CHECK(e.engines.choices() == line_of("forward", "own") + line_of("backward", "cudnn"));
    CHECK(e.used() == "own kernels forward, which are faster here; a library 1.2 backward");

    const Script before = script;
    const int forwards = e.own_forwards, backwards = e.own_backwards;
    for (int i = 0; i < 3; ++i) {
        e.forward();
        e.backward();
    }
    CHECK(std::pair(e.own_forwards - forwards, e.own_backwards - backwards) == std::pair(3, 0));
    CHECK(std::pair(script.forwards - before.forwards, script.backwards - before.backwards) ==
          std::pair(0, 3));
    CHECK(script.opened == 1);

    // Another queue takes these choices without timing.
    Engines again;
    script = {};
    again.engines.set_choices(e.engines.choices());
    CHECK(again.engines.choices() == e.engines.choices());
    again.forward();
    again.backward();
    CHECK(std::pair(again.own_forwards, again.own_backwards) == std::pair(1, 0));
    CHECK(std::pair(script.forwards, script.backwards) == std::pair(0, 1));
    CHECK(again.used() ==
          "own kernels forward, as chosen at an earlier start; a library 1.2 backward");
}

TEST_CASE("each shape of attention has an engine of its own, which a whole run shares", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    script = {};
    AttentionShape longer = small_shape();
    longer.T = longer.S = 2 * small_shape().T;
    Engines first, second;
    first.own_milliseconds = second.own_milliseconds = 5;
    script.milliseconds = 9;
    first.forward();
    script.milliseconds = 1;
    first.forward(first.memory.forward(longer));
    const std::string lines = line_of("forward", "own") + line_of("forward", "cudnn", longer);
    CHECK(first.engines.choices() == lines);
    // A rank that has the shorter shape alone, which was faster with the library there
    second.forward();
    CHECK(second.engines.choices() == line_of("forward", "cudnn"));
    CHECK(second.engines.unite_choices({first.engines.choices(), second.engines.choices()}));
    CHECK_FALSE(first.engines.unite_choices({lines, line_of("forward", "cudnn")}));
    for (const Engines* e : {&first, &second}) CHECK(e->engines.choices() == lines);
    const int before = script.forwards, own = second.own_forwards;
    second.forward();
    second.forward(second.memory.forward(longer));
    CHECK(std::pair(second.own_forwards - own, script.forwards - before) == std::pair(1, 1));

    // An older version's line, for all shapes that have none of their own
    Engines resumed;
    resumed.engines.set_choices("attention forward own\n" + line_of("forward", "cudnn", longer));
    const int forwards = script.forwards;
    resumed.forward();
    CHECK(script.forwards == forwards);
    resumed.forward(resumed.memory.forward(longer));
    CHECK(script.forwards == forwards + 1);
}

TEST_CASE("windows and sinks have choices of their own", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    script = {};
    script.milliseconds = 5;
    AttentionShape windowed = small_shape();
    windowed.window = static_cast<int>(random_int(1, 127));
    AttentionShape of_all = small_shape();
    of_all.window = static_cast<int>(random_int(128, 1000));
    const Buffer sinks(DType::bf16, {4}, {1, -2, 0.5f, 3});
    Engines e;
    AttentionForward with_sinks = e.memory.forward(windowed);
    with_sinks.sinks = sinks;
    const TestMemory scratch(1024);
    e.stream.scratch = scratch.data();
    e.stream.scratch_bytes = 1024;
    e.own_milliseconds = 9;
    e.forward();
    e.own_milliseconds = 1;
    e.forward(e.memory.forward(windowed));
    e.own_milliseconds = 9;
    e.forward(with_sinks);
    const std::string window = concat(",window=", windowed.window);
    const std::string with_both = line_of("forward", "cudnn", windowed);
    CHECK(e.engines.choices() == line_of("forward", "cudnn") + line_of("forward", "own", windowed) +
                                     with_both.substr(0, with_both.find(window) + window.size()) +
                                     ",sinks cudnn\n");
    const std::string choices = e.engines.choices();
    e.forward(e.memory.forward(of_all));  // no window
    CHECK(e.engines.choices() == choices);
    cuda::AttentionEngines again(nullptr, 90, open_scripted);
    again.set_choices(choices);
    CHECK(again.choices() == choices);
}

TEST_CASE("sinks reach cuDNN in fp32", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const DType dtype = GENERATE(DType::bf16, DType::fp32);
    script = {};
    const std::vector<float> values{1, -2, 0.5f, 3};
    const Buffer sinks(dtype, {4}, values);
    TestStream test_stream(1024, {.attention = Wanted::cudnn});
    Stream& stream = test_stream;
    cuda::AttentionEngines engines(nullptr, 90, open_scripted);
    Untouched memory;
    AttentionForward args = memory.forward();
    args.sinks = sinks;
    int own = 0;
    engines.forward(stream, args, [&] { ++own; });
    CHECK(own == 0);
    CHECK(script.forwards == 1);
    stream.synchronize();
    REQUIRE(script.sinks.dtype == DType::fp32);
    CHECK(std::equal(values.begin(), values.end(), script.sinks.as<float>()));
}

TEST_CASE("a window or sinks that cuDNN does not have leave it the other calls", "[cuda]") {
    const char* const from_9_13 = "since cuDNN is used with a window or sinks from 9.13 on";
    AttentionShape windowed = small_shape();
    windowed.window = 100;
    script = {};
    script.version = static_cast<size_t>(random_int(90000, 91299));
    Engines e(Wanted::cudnn);
    AttentionForward with_sinks = e.memory.forward();
    with_sinks.sinks = Tensor(e.memory.bytes, DType::fp32, {4});
    for (const AttentionForward& args : {with_sinks, e.memory.forward(windowed)}) {
        const int own = e.own_forwards;
        e.forward(args);
        CHECK(e.own_forwards == own + 1);
        CHECK(e.engines.use().forward == AttentionUse::Pass{"own", from_9_13});
        e.forward();
        CHECK(e.own_forwards == own + 1);
        CHECK(e.engines.use().forward.engine == "a library 1.2");
    }
    CHECK_FALSE(e.backward());
    CHECK(e.backward(windowed));
    CHECK(e.own_backwards == 1);
}

TEST_CASE("with a window cuDNN does not add up through a matrix of all scores", "[cuda]") {
    AttentionShape windowed = small_shape();
    windowed.window = static_cast<int>(random_int(1, 127));
    const int architecture = GENERATE(80, 90, 100, 120);
    for (const bool deterministic : {true, false}) {
        script = {};
        script.version = GENERATE(91900, 92500);
        CAPTURE(architecture, deterministic, script.version);
        Engines e(Wanted::cudnn, architecture);
        e.stream.settings.deterministic = deterministic;
        e.stream.settings.autotune = true;
        std::set<AttentionWay> expected;
        if (!deterministic) expected.insert(AttentionWay::cudnn_unordered);
        if (architecture == 100) expected.insert(AttentionWay::cudnn);
        if (architecture == 90 && script.version >= 92500)
            expected.insert(AttentionWay::cudnn_ordered);
        CHECK(e.backward(windowed) == expected.empty());
        CHECK(script.asked == expected);
        if (expected.empty())
            CHECK(e.engines.use().backward.reason ==
                  "since cuDNN has no way here that skips what a window hides and always gives the "
                  "same bits");
    }
}

TEST_CASE("a library that fails while it is timed, or after it was chosen, is given up", "[cuda]") {
    script = {};
    script.forward_failure = fresh_reason();
    Engines e;
    Stderr captured;
    e.engines.set_choices("attention forward cudnn\nattention backward cudnn\n");
    e.forward();
    e.backward();
    CHECK(contains(captured.text(), script.forward_failure));
    CHECK(e.engines.choices() == "attention forward own\nattention backward own\n");
    CHECK(std::pair(e.own_forwards, e.own_backwards) == std::pair(1, 1));
}

TEST_CASE("the fastest of all ways of a backward pass is chosen, and kept", "[cuda]") {
    for (int round = 0; round < 20; ++round) {
        std::vector<int> milliseconds{1, 2, 3, 4};  // of each way
        for (size_t i = milliseconds.size(); i > 1; --i)
            std::swap(
                milliseconds[i - 1],
                milliseconds[static_cast<size_t>(random_int(0, static_cast<int64_t>(i) - 1))]);
        const bool deterministic = random_int(0, 1) == 1;
        const Wanted wanted = random_int(0, 1) == 1 ? Wanted::automatic : Wanted::cudnn;
        CAPTURE(milliseconds, deterministic, static_cast<int>(wanted));
        script = {};
        script.version = 92500 + static_cast<size_t>(random_int(0, 500));
        for (const AttentionWay way : all_ways)
            script.way_milliseconds[way] = milliseconds[static_cast<size_t>(way)];
        const auto set = [&](Engines& e) {
            e.own_milliseconds = milliseconds[0];
            e.stream.settings.deterministic = deterministic;
            e.stream.settings.autotune = true;
        };
        Engines e(wanted);
        set(e);
        e.backward();

        std::set<AttentionWay> candidates(std::begin(all_ways), std::end(all_ways));
        if (deterministic) candidates.erase(AttentionWay::cudnn_unordered);
        if (wanted == Wanted::cudnn) candidates.erase(AttentionWay::own);
        const AttentionWay fastest = *std::ranges::min_element(
            candidates, {},
            [&](AttentionWay way) { return milliseconds[static_cast<size_t>(way)]; });
        CHECK(e.engines.choices() == line_of("backward", word_of(fastest)));
        CHECK((e.own_backwards > 0) == (wanted == Wanted::automatic));
        candidates.erase(AttentionWay::own);
        CHECK(script.asked == candidates);
        CHECK(e.engines.use().same_bits == (fastest != AttentionWay::cudnn_unordered));
        const char* const notes[] = {"own", "a library 1.2", "a library 1.2 (ordered)",
                                     "a library 1.2 (unordered)"};
        CHECK(e.engines.use().backward.engine == notes[static_cast<int>(fastest)]);

        // Kept, it runs without timing; among ranks the first one's choice counts.
        Engines again(wanted), other(wanted);
        set(again);
        set(other);
        script.asked.clear();
        script.clock = 0;
        again.engines.set_choices(e.engines.choices());
        again.backward();
        CHECK(script.clock == milliseconds[static_cast<size_t>(fastest)]);
        const AttentionWay slower =
            fastest == AttentionWay::cudnn ? AttentionWay::cudnn_ordered : AttentionWay::cudnn;
        other.engines.set_choices(line_of("backward", word_of(slower)));
        CHECK(other.engines.unite_choices({e.engines.choices(), other.engines.choices()}));
        CHECK(other.engines.choices() == e.engines.choices());
    }
}

TEST_CASE("cuDNN's ordered sums are for Hopper and 9.25, the unordered ones are asked for",
          "[cuda]") {
    for (int round = 0; round < 60; ++round) {
        script = {};
        script.version = static_cast<size_t>(random_int(90000, 93000));
        if (random_int(0, 2) == 0) script.version = static_cast<size_t>(random_int(92499, 92500));
        const int architectures[] = {80, 86, 89, 90, 100, 103, 120};
        Engines e(random_int(0, 1) == 1 ? Wanted::automatic : Wanted::cudnn,
                  architectures[random_int(0, 6)]);
        e.stream.settings.autotune = true;
        e.stream.settings.deterministic = random_int(0, 1) == 1;
        CAPTURE(script.version, e.architecture, e.stream.settings.deterministic);
        e.backward();
        std::set<AttentionWay> expected{AttentionWay::cudnn};
        if (e.architecture == 90 && script.version >= 92500)
            expected.insert(AttentionWay::cudnn_ordered);
        if (!e.stream.settings.deterministic) expected.insert(AttentionWay::cudnn_unordered);
        CHECK(script.asked == expected);
    }
}

TEST_CASE("a kept way that the settings or the library rule out is chosen anew", "[cuda]") {
    script = {};
    script.version = 92801;
    script.milliseconds = 1;
    SECTION("unordered sums, once kernels.deterministic is on") {
        script.way_milliseconds[AttentionWay::cudnn_ordered] = 0;
        Engines e;
        e.own_milliseconds = 5;
        e.engines.set_choices(random_int(0, 1) == 1 ? line_of("backward", "cudnn_unordered")
                                                    : "attention backward cudnn_unordered\n");
        for (int i = 0; i < 2; ++i) e.backward();
        CHECK_FALSE(script.asked.contains(AttentionWay::cudnn_unordered));
        CHECK(contains(e.engines.choices(), line_of("backward", "cudnn_ordered")));
        CHECK(e.engines.use().same_bits);
    }
    SECTION("our own kernels, once cuDNN is wanted") {
        Engines e(Wanted::cudnn);
        e.stream.settings.autotune = true;
        script.way_milliseconds[AttentionWay::cudnn] = 0;
        e.engines.set_choices(line_of("forward", "own") + line_of("backward", "own"));
        e.forward();
        e.backward();
        CHECK(e.own_forwards + e.own_backwards == 0);
        CHECK(e.engines.choices() == line_of("forward", "cudnn") + line_of("backward", "cudnn"));
    }
    SECTION("ordered sums that this version lacks") {
        script.version = 92400;
        Engines e;
        e.engines.set_choices(line_of("backward", "cudnn_ordered"));
        e.backward();
        CHECK(script.asked == std::set{AttentionWay::cudnn});
        CHECK(e.engines.choices() == line_of("backward", "cudnn"));
    }
    SECTION("a matrix that is too large") {
        AttentionShape long_one = small_shape();
        long_one.T = long_one.S = 32768;
        Engines e;
        e.own_milliseconds = 5;
        e.engines.set_choices("attention backward cudnn\n");
        e.backward(long_one);
        CHECK(script.asked == std::set{AttentionWay::cudnn_ordered});
        e.backward();
        CHECK(script.asked == std::set{AttentionWay::cudnn, AttentionWay::cudnn_ordered});
    }
}

TEST_CASE("without timing, cuDNN adds up through a matrix if one head's matrix fits", "[cuda]") {
    AttentionShape short_one = small_shape(), long_one = small_shape();
    long_one.T = long_one.S = 32768;  // 2 heads · 32768² · 2 bytes: 4 GiB
    const auto asked_for = [](Engines& e, const AttentionShape& shape) {
        script.asked.clear();
        e.backward(shape);
        return script.asked;
    };
    script = {};
    script.version = 92500;
    Engines e(Wanted::cudnn);
    CHECK(asked_for(e, short_one) == std::set{AttentionWay::cudnn});
    CHECK(asked_for(e, long_one) == std::set{AttentionWay::cudnn_ordered});
    CHECK(e.engines.use().same_bits);
    e.stream.settings.deterministic = false;
    CHECK(asked_for(e, short_one) == std::set{AttentionWay::cudnn_unordered});
    CHECK(asked_for(e, long_one) == std::set{AttentionWay::cudnn_unordered});
    CHECK_FALSE(e.engines.use().same_bits);
    CHECK(e.own_backwards == 0);
    CHECK(e.engines.choices().empty());

    script.version = 92400;
    Engines older(random_int(0, 1) == 1 ? Wanted::cudnn : Wanted::automatic);
    for (int i = 0; i < 2; ++i) {
        CHECK(asked_for(older, long_one).empty());
        CHECK(older.engines.use().backward ==
              AttentionUse::Pass{"own", "since cuDNN would need more than 2 GiB for one head"});
    }
    CHECK(older.own_backwards == 2);
}

TEST_CASE("a way that fails leaves the other ways", "[cuda]") {
    script = {};
    script.version = 92801;
    script.milliseconds = 1;
    AttentionWay fails = AttentionWay::cudnn, stays = AttentionWay::cudnn_ordered;
    Engines e;
    SECTION("without timing") { e.stream.settings.attention = Wanted::cudnn; }
    SECTION("when it is timed, or after it was chosen") {
        if (random_int(0, 1) == 1) std::swap(fails, stays);
        if (random_int(0, 1) == 1) e.engines.set_choices(line_of("backward", word_of(fails)));
        e.own_milliseconds = 5;
    }
    script.way_failures[fails] = fresh_reason();
    {
        Stderr captured;
        for (int i = 0; i < 3; ++i) e.backward();
        e.forward();
        CHECK(captured.text() == concat("train_gpt: the backward pass of attention does without ",
                                        word_of(fails), ", since ", script.way_failures[fails],
                                        "\n"));
    }
    CHECK(e.engines.use().backward.engine ==
          (stays == AttentionWay::cudnn ? "a library 1.2" : "a library 1.2 (ordered)"));
    CHECK(e.engines.use().forward.engine == "a library 1.2");
    const bool timed = e.stream.settings.attention == Wanted::automatic;
    CHECK(e.engines.choices() ==
          (timed ? line_of("forward", "cudnn") + line_of("backward", word_of(stays)) : ""));
    // Once the other one fails too, our own kernels are left.
    script.way_failures[stays] = fresh_reason();
    const int own = e.own_backwards;
    Stderr captured;
    for (int i = 0; i < 2; ++i) e.backward();
    CHECK(captured.text() ==
          "train_gpt: the backward pass of attention runs on our own kernels, since " +
              script.way_failures[stays] + "\n");
    CHECK(e.own_backwards == own + 2);
    CHECK(e.engines.use().backward ==
          AttentionUse::Pass{"own", "since " + script.way_failures[stays]});
}

TEST_CASE("damaged choices of attention engines are refused", "[cuda]") {
    cuda::AttentionEngines engines(nullptr, 90, open_scripted);
    engines.set_choices("attention backward cudnn\n");
    for (const char* damaged :
         {"attention backward\n", "attention sideways own\n", "attention forward flash\n",
          "retention forward own\n", "attention forward own own\n", "\n",
          "attention forward B=1,T=8,S=8,H=1,H_kv=1,D=8\n",
          "attention forward B=1,T=8,S=8,H=1,H_kv=1,D=8x own\n",
          "attention forward B=1,T=8,S=8,H=1,D=8 own\n",
          "attention forward B=1,T=8,S=8,H=1,H_kv=1,D=8,window= own\n",
          "attention forward B=1,T=8,S=8,H=1,H_kv=1,D=8,window=4x own\n",
          "attention forward B=1,T=8,S=8,H=1,H_kv=1,D=8,window own\n",
          "attention forward B=1,T=8,S=8,H=1,H_kv=1,D=8,sinks,sinks own\n",
          "attention forward own B=1,T=8,S=8,H=1,H_kv=1,D=8\n", "attention forward cudnn_ordered\n",
          "attention forward B=1,T=8,S=8,H=1,H_kv=1,D=8 cudnn_unordered\n"})
        CHECK(contains(error_of([&] { engines.set_choices(damaged); }), "damaged"));
    CHECK(engines.choices() == "attention backward cudnn\n");
    engines.set_choices("");
    CHECK(engines.choices().empty());
}

TEST_CASE("a queue's choices of attention engines are kept and taken as text", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    Stream stream(test_device());
    CHECK(kernel_choices(stream).empty());
    const std::string own = "attention forward own\nattention backward own\n";
    set_kernel_choices(stream, own);
    CHECK(kernel_choices(stream) == own);
}

namespace {

/// Root mean squares.
double size_of_values(const std::vector<double>& values) {
    double sum = 0;
    for (double value : values) sum += value * value;
    return std::sqrt(sum / static_cast<double>(values.size()));
}
double distance(std::vector<double> from, const std::vector<double>& to) {
    for (size_t i = 0; i < from.size(); ++i) from[i] -= to[i];
    return size_of_values(from);
}

/// Attention on a packed tensor [B, S, H + 2·H_kv, D], as in a model; the queries are the last T
/// rows.
struct TestedCudnn {
    AttentionShape shape;
    Buffer qkv, out, lse, dout, dqkv;
    Tensor sinks = {};

    TestedCudnn(AttentionShape s, const std::vector<float>& qkv_values,
                const std::vector<float>& dout_values)
        : shape(s),
          qkv(s.dtype, {s.B, s.S, s.H + 2 * s.H_kv, s.D}, qkv_values),
          out(s.dtype, {s.B, s.T, s.H, s.D}),
          lse(DType::fp32, {s.B, s.H, s.T}),
          dout(s.dtype, {s.B, s.T, s.H, s.D}, dout_values),
          dqkv(s.dtype, {s.B, s.S, s.H + 2 * s.H_kv, s.D}, std::vector<float>(qkv_values.size())) {}

    HeadsView packed(const Buffer& buffer, int first_head, int first_row = 0) const {
        const int64_t token = int64_t{shape.H + 2 * shape.H_kv} * shape.D;
        auto* start =
            static_cast<char*>(buffer.tensor().data) +
            static_cast<size_t>(first_row * token + first_head * shape.D) * size_of(shape.dtype);
        return {start, shape.S * token, token, shape.D};
    }
    HeadsView queries(const Buffer& buffer) const { return packed(buffer, 0, shape.S - shape.T); }
    HeadsView plain(const Buffer& buffer) const {
        const int64_t token = int64_t{shape.H} * shape.D;
        return {buffer.tensor().data, shape.T * token, token, shape.D};
    }
    AttentionForward forward() const {
        return {shape,
                queries(qkv),
                packed(qkv, shape.H),
                packed(qkv, shape.H + shape.H_kv),
                plain(out),
                lse.as<float>(),
                sinks};
    }
    AttentionBackward backward() const {
        return {shape,
                queries(qkv),
                packed(qkv, shape.H),
                packed(qkv, shape.H + shape.H_kv),
                plain(out),
                plain(dout),
                lse.as<float>(),
                queries(dqkv),
                packed(dqkv, shape.H),
                packed(dqkv, shape.H + shape.H_kv),
                KeyGradients::write,
                sinks};
    }
};

const AttentionShape cudnn_shapes[] = {
    {.dtype = DType::bf16,
     .B = 2,
     .T = 1024,
     .S = 1024,
     .H = 3,
     .H_kv = 3,
     .D = 64,
     .scale = 0.125f},
    {.dtype = DType::bf16, .B = 3, .T = 384, .S = 384, .H = 6, .H_kv = 2, .D = 128, .scale = 0.1f},
    {.dtype = DType::bf16, .B = 2, .T = 256, .S = 256, .H = 2, .H_kv = 2, .D = 40, .scale = 0.2f},
    {.dtype = DType::bf16, .B = 2, .T = 256, .S = 640, .H = 6, .H_kv = 2, .D = 64, .scale = 0.1f}};

}  // namespace

TEST_CASE("the calls of a backward pass compute what the whole pass computes", "[cuda]") {
    ON_EACH_DEVICE();
    const int group = static_cast<int>(random_int(1, 3)), H_kv = static_cast<int>(random_int(2, 4));
    AttentionShape shape = small_shape();
    shape.B = static_cast<int>(random_int(2, 4));
    shape.H_kv = H_kv;
    shape.H = group * H_kv;
    shape.D = 8;
    const auto n = static_cast<size_t>(shape.B * shape.T * shape.D);
    const auto heads = static_cast<size_t>(shape.H), key_heads = static_cast<size_t>(H_kv);
    TestedCudnn whole(shape, random_normal(n * (heads + 2 * key_heads), 1.0f),
                      random_normal(n * heads, 1.0f));
    const KernelSettings own{.attention = Wanted::own};
    TestStream stream(attention_scratch_bytes(planning(own, test_device()), shape), own);
    attention_forward(stream, whole.forward());
    attention_backward(stream, whole.backward());
    const std::string bytes = whole.dqkv.bytes();

    // Room for some of the sequences, and for some of the key heads.
    const size_t head_bytes = static_cast<size_t>(group) * 2 * static_cast<size_t>(shape.T) *
                              static_cast<size_t>(shape.T);
    for (const size_t most : {head_bytes * key_heads * static_cast<size_t>(shape.B - 1),
                              head_bytes * static_cast<size_t>(random_int(1, H_kv - 1))}) {
        for (size_t i = 0; i < n * (heads + 2 * key_heads); ++i) whole.dqkv.set(i, 7.0f);
        const auto calls = cuda::cudnn_calls(whole.backward(), AttentionWay::cudnn, 90, most);
        CHECK(calls.size() > 1);
        for (const AttentionBackward& call : calls) attention_backward(stream, call);
        CHECK((whole.dqkv.bytes() == bytes));
    }
}

TEST_CASE("the gradients of sinks after cuDNN's pass have the bits of those after ours", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : {DType::bf16, DType::fp32}) {
        AttentionShape shape = small_shape();
        shape.T = shape.S = static_cast<int>(128 * random_int(1, 3));
        shape.D = static_cast<int>(8 * random_int(1, device_is_simulated() ? 4 : 16));
        shape.window = static_cast<int>(random_int(0, 2 * shape.T));
        CAPTURE(shape.T, shape.D, shape.window);
        const auto rows = static_cast<size_t>(shape.B * shape.T * shape.D);
        TestedCudnn p(shape,
                      random_normal(rows * static_cast<size_t>(shape.H + 2 * shape.H_kv), 1.0f),
                      random_normal(rows * static_cast<size_t>(shape.H), 1.0f));
        const Buffer sinks(dtype, {shape.H}, random_normal(static_cast<size_t>(shape.H), 2.0f));
        p.sinks = sinks;
        const KernelSettings settings{.attention = Wanted::own};
        TestStream stream(attention_scratch_bytes(planning(settings, test_device()), shape),
                          settings);
        const std::vector<float> before = random_normal(static_cast<size_t>(shape.H), 1.0f);
        const Buffer ours(DType::fp32, {shape.H}, before), after(DType::fp32, {shape.H}, before);
        AttentionBackward args = p.backward();
        args.dsinks = ours.sink(true);
        attention_forward(stream, p.forward());
        attention_backward(stream, args);
        args.dsinks = after.sink(true);
        cuda::attention_sink_gradient(stream, args);
        CHECK((ours.bytes() == after.bytes()));
        for (size_t h = 0; h < before.size(); ++h) CHECK(ours[h] != before[h]);
    }
}

TEST_CASE("cuDNN's attention is as accurate as ours, and gives the same bits again", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda() || !cuda::cudnn_obstacle().empty()) return;
    const Device device = test_device();
    int major = 0;
    REQUIRE(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index) ==
            cudaSuccess);
    const int architecture = 10 * major;
    const AttentionWay way =
        GENERATE(AttentionWay::cudnn, AttentionWay::cudnn_ordered, AttentionWay::cudnn_unordered);
    if (!cuda::cudnn_has(way, architecture, cuda::cudnn_version())) return;
    CAPTURE(word_of(way));
    // No window, and windows whose ends lie anywhere in a tile
    const int window = GENERATE(0, 1, 2, 127, 128, 129, static_cast<int>(random_int(3, 640)));
    const bool with_sinks = random_int(0, 1) == 1;
    for (AttentionShape shape : cudnn_shapes) {
        shape.window = window;
        if (!cuda::cudnn_heeds_window(shape, way, architecture) ||
            cuda::cudnn_version() < cuda::cudnn_oldest_version(shape, with_sinks))
            continue;
        const DeviceUnderTest gpu(device);
        CAPTURE(shape.B, shape.T, shape.S, shape.H, shape.H_kv, shape.D, window, with_sinks);
        const auto random_bf16 = [](int64_t n) {
            std::vector<float> values = random_normal(static_cast<size_t>(n), 1.0f);
            for (float& value : values) value = to_float(bf16(value));
            return values;
        };
        const std::vector<float> qkv = random_bf16(int64_t{shape.B} * shape.S *
                                                   (shape.H + 2 * shape.H_kv) * shape.D),
                                 dout = random_bf16(int64_t{shape.B} * shape.T * shape.H * shape.D);

        const std::vector<float> sink_values = random_normal(static_cast<size_t>(shape.H), 2.0f);
        const Buffer sinks(DType::fp32, {shape.H}, sink_values);
        TestedCudnn ours(shape, qkv, dout);
        if (with_sinks) ours.sinks = sinks;
        for (size_t i = 0; i < qkv.size(); ++i)  // all rows of keys and values are written
            if (static_cast<int>(i) / shape.D % (shape.H + 2 * shape.H_kv) >= shape.H)
                ours.dqkv.set(i, 7.0f);
        cudaStream_t stream = nullptr;
        REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        const size_t workspace_bytes =
            cuda::attention_library_scratch_bytes({.deterministic = false}, shape, architecture);
        const TestMemory workspace(workspace_bytes);
        {
            const auto library = cuda::open_cudnn_attention(stream);
            const auto compute = [&] {
                library->forward(ours.forward(), workspace.data(), workspace_bytes);
                library->backward(way, ours.backward(), workspace.data(), workspace_bytes);
                return ours.out.bytes() + ours.lse.bytes() + ours.dqkv.bytes();
            };
            const std::string bytes = compute();
            for (int again = 0; again < 3; ++again)
                CHECK((compute() == bytes || way == AttentionWay::cudnn_unordered));
        }
        cudaStreamDestroy(stream);

        const DeviceUnderTest cpu{Device{}};
        AttentionShape exact_shape = shape;
        exact_shape.dtype = DType::fp32;
        TestedCudnn plain(shape, qkv, dout), exact(exact_shape, qkv, dout);
        const Buffer host_sinks(DType::fp32, {shape.H}, sink_values);
        for (TestedCudnn* p : {&plain, &exact}) {
            if (with_sinks) p->sinks = host_sinks;
            TestStream host(attention_scratch_bytes(planning({}, Device{}), p->shape));
            attention_forward(host, p->forward());
            attention_backward(host, p->backward());
        }
        // cuDNN rounds the probabilities and the scores' gradient before it multiplies with them,
        // each about as much as the result itself is rounded.
        const auto check = [&](const char* what, const Buffer TestedCudnn::*buffer) {
            const std::vector<double> reference = (exact.*buffer).values();
            const double error = distance((ours.*buffer).values(), reference),
                         plain_error = distance((plain.*buffer).values(), reference);
            CAPTURE(what, error, plain_error);
            CHECK(error <= 2.5 * plain_error + 0x1p-8 * size_of_values(reference));
        };
        check("out", &TestedCudnn::out);
        check("dqkv", &TestedCudnn::dqkv);
        CHECK(distance(ours.lse.values(), exact.lse.values()) <= 1e-3);
    }
}
#endif  // TRAIN_GPT_CUDA

}  // namespace train_gpt
