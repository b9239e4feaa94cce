// The benchmark: how fast a training step is beside what this machine allows (the floor) and beside PyTorch, all
// measured in one run on the same threads. scripts/bench.sh prepares and starts it.
//
// A neighbour on the same machine slows everything down for a while. A canary, a short loop of multiply-adds on every
// thread, runs before and after each sample; when it is slower than 0.85 of the fastest seen, the sample does not count.
// A round of training steps does not count either when other processes, or other guests of the host, took more than 5 % of
// the processor time meanwhile.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/times.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef TRAIN_GPT_ONEDNN
#include <dnnl.hpp>
#endif

#include "base/error.h"
#include "base/file.h"
#include "base/tensor.h"
#include "device/device.h"
#include "device/memory.h"
#include "kernels/attention/attention.h"
#include "kernels/linear/linear.h"

namespace train_gpt {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Processor time that all cores spent on anything, or that the host took from them, in clock ticks.
int64_t machine_ticks() {
    std::ifstream file("/proc/stat");
    std::string name;
    int64_t user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, soft_irq = 0, steal = 0;
    file >> name >> user >> nice >> system >> idle >> waiting >> irq >> soft_irq >> steal;
    return user + nice + system + irq + soft_irq + steal;
}

/// The share of all processor time since construction that went neither to this process nor to another whose own time,
/// before and after, is given.
class OthersShare {
  public:
    explicit OthersShare(int64_t own_ticks = 0) : start_(now()), taken_(taken(own_ticks)) {}
    double operator()(int64_t own_ticks = 0) const {
        const double available =
            (now() - start_) *
            static_cast<double>(::sysconf(_SC_CLK_TCK) * ::sysconf(_SC_NPROCESSORS_ONLN));
        // One tick either way is the precision of these numbers.
        return static_cast<double>(std::max<int64_t>(0, taken(own_ticks) - taken_ - 2)) / available;
    }

  private:
    static int64_t taken(int64_t own_ticks) {
        tms self{};
        ::times(&self);
        return machine_ticks() - self.tms_utime - self.tms_stime - own_ticks;
    }
    double start_;
    int64_t taken_;
};

// --- multiply-adds: the canary and the peak ----------------------------------------------------------------------------

// Each loop makes `rounds` rounds of 12 independent vector operations, which hides the latency of two units with four
// cycles each. The result is returned so that it is not optimised away.
using FmaLoop = float (*)(int64_t rounds);
struct FmaKind {
    FmaLoop loop;
    double flops_per_round;
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float fma_avx512(int64_t rounds) {
    __m512 sums[12];
    for (__m512& sum : sums) sum = _mm512_set1_ps(1.0f);
    const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
    for (int64_t i = 0; i < rounds; ++i)
        for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, a, b);
    for (int i = 1; i < 12; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    float lanes[16];
    _mm512_storeu_ps(lanes, sums[0]);
    return std::accumulate(lanes, lanes + 16, 0.0f);
}

__attribute__((target("avx2,fma"))) float fma_avx2(int64_t rounds) {
    __m256 sums[12];
    for (__m256& sum : sums) sum = _mm256_set1_ps(1.0f);
    const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
    for (int64_t i = 0; i < rounds; ++i)
        for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, a, b);
    for (int i = 1; i < 12; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
    float lanes[8];
    _mm256_storeu_ps(lanes, sums[0]);
    return std::accumulate(lanes, lanes + 8, 0.0f);
}

__attribute__((target("avx512f,avx512bf16"))) float dot_bf16_avx512(int64_t rounds) {
    __m512 sums[12];
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
    for (int64_t i = 0; i < rounds; ++i)
        for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, a, a);
    for (int i = 1; i < 12; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    float lanes[16];
    _mm512_storeu_ps(lanes, sums[0]);
    return std::accumulate(lanes, lanes + 16, 0.0f);
}
#endif

float fma_plain(int64_t rounds) {
    float sums[12];
    for (float& sum : sums) sum = 1.0f;
    for (int64_t i = 0; i < rounds; ++i)
        for (float& sum : sums) sum = sum * 0.999f + 0.001f;
    return std::accumulate(sums, sums + 12, 0.0f);
}

FmaKind fma_kind(const CpuInfo& cpu) {
#if defined(__x86_64__)
    if (cpu.avx512) return {fma_avx512, 12 * 32};
    if (cpu.avx2) return {fma_avx2, 12 * 16};
#endif
    (void)cpu;
    return {fma_plain, 12 * 2};
}

/// FLOP/s of all threads together, taken from the slowest: work is shared out evenly, so that it sets the pace.
double fma_rate(const FmaKind& kind, int64_t rounds, int threads) {
    double slowest = 0;
    float sink = 0;
#pragma omp parallel num_threads(threads) reduction(max : slowest) reduction(+ : sink)
    {
#pragma omp barrier
        const double start = now();
        sink += kind.loop(rounds);
        slowest = now() - start;
    }
    static volatile float kept;
    kept = sink;
    (void)kept;
    return kind.flops_per_round * static_cast<double>(rounds) * threads / slowest;
}

/// Tells whether the cores are this process's own at the moment. A look takes 4 to 8 ms: longer than a time slice, so that
/// other processes of this machine show as well.
class Canary {
  public:
    Canary(const CpuInfo& cpu) : kind_(fma_kind(cpu)), threads_(cpu.threads) {
        while (rounds_ < int64_t{1} << 40 && seconds() < 4e-3) rounds_ *= 2;
        for (const double end = now() + 0.5; now() < end;) quiet();
    }

    bool quiet() {
        const double rate = fma_rate(kind_, rounds_, threads_);
        best_ = std::max(best_, rate);
        ++looks_;
        const bool good = rate > 0.85 * best_;
        good_ += good;
        return good;
    }
    /// Up to `limit` seconds until the cores are quiet.
    bool wait_for_quiet(double limit) {
        for (const double end = now() + limit; now() < end; ::usleep(20000))
            if (quiet()) return true;
        return false;
    }
    double best_rate() const { return best_; }
    double quiet_share() const { return static_cast<double>(good_) / static_cast<double>(looks_); }

  private:
    double seconds() const {
        return kind_.flops_per_round * static_cast<double>(rounds_) * threads_ /
               fma_rate(kind_, rounds_, threads_);
    }

    FmaKind kind_;
    int threads_;
    int64_t rounds_ = 1024;
    double best_ = 0;
    int64_t looks_ = 0, good_ = 0;
};

/// The median time of `work` in seconds over up to `samples` quiet samples after a warm-up. When the machine is never quiet
/// for the length of a sample, the median of all: *disturbed counts those.
struct Timing {
    Canary& canary;
    int samples = 5;
    double limit = 5;  // seconds for one measurement
    int64_t disturbed = 0, measured = 0;

    double operator()(const std::function<void()>& work) {
        work();
        const OthersShare others;
        std::vector<double> good, all;
        const double end = now() + limit;
        while (static_cast<int>(good.size()) < samples && (all.size() < 2 || now() < end)) {
            const bool before = canary.wait_for_quiet(0.2);
            const double start = now();
            work();
            const double seconds = now() - start;
            all.push_back(seconds);
            if (before && canary.quiet()) good.push_back(seconds);
        }
        ++measured;
        disturbed += good.empty() || others() > 0.1;
        return median(good.empty() ? all : good);
    }
};

// --- memory -------------------------------------------------------------------------------------------------------------

struct Bandwidth {
    double triad = 0;   // bytes/s of c = a + s·b, three streams counted
    double update = 0;  // bytes/s of AdamW's streams: four read, three of them written back
};

Bandwidth measure_bandwidth(Timing& timing, int threads) {
    constexpr int64_t n = int64_t{24} << 20;  // 96 MiB an array: beyond the caches
    std::vector<std::unique_ptr<float[]>> arrays;
    for (int i = 0; i < 4; ++i) arrays.emplace_back(new float[n]);
    float *a = arrays[0].get(), *b = arrays[1].get(), *c = arrays[2].get(), *d = arrays[3].get();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; ++i) a[i] = b[i] = c[i] = d[i] = 1.0f;

    const double triad = timing([&] {
#pragma omp parallel for simd num_threads(threads) schedule(static)
        for (int64_t i = 0; i < n; ++i) c[i] = a[i] + 0.5f * b[i];
    });
    const double update = timing([&] {
#pragma omp parallel for simd num_threads(threads) schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            a[i] = 0.5f * a[i] + d[i];
            b[i] = 0.5f * b[i] + d[i];
            c[i] = 0.5f * c[i] + d[i];
        }
    });
    constexpr double bytes = static_cast<double>(n) * sizeof(float);
    return {3 * bytes / triad, 7 * bytes / update};
}

// --- matrix products ---------------------------------------------------------------------------------------------------

/// Memory for tensors of one measurement.
class Buffers {
  public:
    Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
        Tensor t(nullptr, dtype, shape);
        t.data = take(t.bytes());
        return t;
    }
    /// Filled with values of the size activations have; the multiplication of denormals would be slow.
    Tensor random(DType dtype, std::initializer_list<int64_t> shape) {
        Tensor t = tensor(dtype, shape);
        const int64_t n = t.numel();
        with_float_type(dtype, [&]<class T>(T) {
            T* p = t.as<T>();
#pragma omp parallel for schedule(static)
            for (int64_t i = 0; i < n; ++i)
                p[i] = static_cast<T>(static_cast<float>(i * 2654435761u % 2048) / 1024.0f - 1.0f);
        });
        return t;
    }
    void* take(size_t bytes) {
        memory_.emplace_back(std::aligned_alloc(64, (bytes + 127) / 64 * 64), &std::free);
        if (!memory_.back())
            throw Error("out of memory: ", format_bytes(bytes),
                        " are needed; close other programs");
        return memory_.back().get();
    }

  private:
    std::vector<std::unique_ptr<void, void (*)(void*)>> memory_;
};

enum class Product { forward, backward_input, backward_weight };
constexpr Product products[] = {Product::forward, Product::backward_input,
                                Product::backward_weight};
const char* name_of(Product p) {
    return p == Product::forward          ? "forward"
           : p == Product::backward_input ? "d input"
                                          : "d weight";
}

/// A linear layer's products: x [M, K], w [N, K], y [M, N].
struct Linear {
    const char* name;
    int64_t M, N, K;
    int count;  // how often a step has it
    double flops() const {
        return 2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K);
    }
};

/// Seconds of one product; 0 where it was not measured.
struct ProductTimes {
    double project = 0, library = 0, library_packed = 0;
    double best() const {
        double least = project;
        for (const double t : {library, library_packed})
            if (t > 0) least = std::min(least, t);
        return least;
    }
};

#ifdef TRAIN_GPT_ONEDNN
/// One product through oneDNN alone. With `packed` the weights lie in the layout oneDNN likes best.
class LibraryProduct {
  public:
    LibraryProduct(Product product, DType dtype, const Linear& l, const Tensor& x, const Tensor& w,
                   const Tensor& y, const Tensor& dw, bool packed)
        : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
        using Dims = dnnl::memory::dims;
        const auto in =
            dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
        const auto f32 = dnnl::memory::data_type::f32;
        const auto matrix = [](int64_t rows, int64_t cols, dnnl::memory::data_type type,
                               bool transposed) {
            return dnnl::memory::desc({rows, cols}, type,
                                      transposed ? Dims{1, rows} : Dims{cols, 1});
        };
        dnnl::memory::desc a, b, c;
        void *pa = nullptr, *pb = nullptr, *pc = nullptr;
        switch (product) {
            case Product::forward:
                a = matrix(l.M, l.K, in, false), b = matrix(l.K, l.N, in, true),
                c = matrix(l.M, l.N, in, false);
                pa = x.data, pb = w.data, pc = y.data;
                break;
            case Product::backward_input:
                a = matrix(l.M, l.N, in, false), b = matrix(l.N, l.K, in, false),
                c = matrix(l.M, l.K, in, false);
                pa = y.data, pb = w.data, pc = x.data;
                break;
            case Product::backward_weight:
                a = matrix(l.N, l.M, in, true), b = matrix(l.M, l.K, in, false),
                c = matrix(l.N, l.K, f32, false);
                pa = y.data, pb = x.data, pc = dw.data;
                break;
        }
        const Dims b_dims = product == Product::forward          ? Dims{l.K, l.N}
                            : product == Product::backward_input ? Dims{l.N, l.K}
                                                                 : Dims{l.M, l.K};
        auto b_used = b;
        if (packed) b_used = dnnl::memory::desc(b_dims, in, dnnl::memory::format_tag::any);
#if DNNL_VERSION_MAJOR >= 3
        const dnnl::matmul::primitive_desc description(engine_, a, b_used, c);
#else
        const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b_used, c), engine_);
#endif
        matmul_ = dnnl::matmul(description);
        dnnl::memory weights(b, engine_, pb);
        if (packed) {
            dnnl::memory laid_out(description.weights_desc(), engine_);
            dnnl::reorder(weights, laid_out).execute(stream_, weights, laid_out);
            stream_.wait();
            weights = laid_out;
        }
        arguments_ = {{DNNL_ARG_SRC, dnnl::memory(a, engine_, pa)},
                      {DNNL_ARG_WEIGHTS, weights},
                      {DNNL_ARG_DST, dnnl::memory(c, engine_, pc)}};
    }
    void run() {
        matmul_.execute(stream_, arguments_);
        stream_.wait();
    }

  private:
    dnnl::engine engine_;
    dnnl::stream stream_;
    dnnl::matmul matmul_;
    std::unordered_map<int, dnnl::memory> arguments_;
};
#endif

ProductTimes measure_product(Timing& timing, Product product, DType dtype, const Linear& l) {
    Buffers memory;
    const Device cpu;
    Stream stream(cpu);
    stream.scratch_bytes = linear_scratch_bytes(cpu, dtype, l.M, l.N, l.K);
    stream.scratch = memory.take(stream.scratch_bytes);
    const Tensor x = memory.random(dtype, {l.M, l.K}), w = memory.random(dtype, {l.N, l.K}),
                 y = memory.random(dtype, {l.M, l.N});
    const Tensor dw =
        product == Product::backward_weight ? memory.tensor(DType::fp32, {l.N, l.K}) : Tensor();
    ProductTimes times;
    times.project = timing([&] {
        switch (product) {
            case Product::forward:
                linear_forward(stream, {.out = y, .x = x, .w = w});
                break;
            case Product::backward_input:
                linear_backward_input(stream, {.dx = x, .dy = y, .w = w});
                break;
            case Product::backward_weight:
                linear_backward_weight(stream,
                                       {.dw = {dw.data, DType::fp32, false}, .x = x, .dy = y});
                break;
        }
    });
#ifdef TRAIN_GPT_ONEDNN
    try {
        LibraryProduct plain(product, dtype, l, x, w, y, dw, false);
        times.library = timing([&] { plain.run(); });
        if (product != Product::backward_weight) {
            LibraryProduct packed(product, dtype, l, x, w, y, dw, true);
            times.library_packed = timing([&] { packed.run(); });
        }
    } catch (const dnnl::error&) {
        // A product that oneDNN does not have for this CPU (bf16 on AVX2): the project's own is what there is.
    }
#endif
    return times;
}

// --- models --------------------------------------------------------------------------------------------------------------

struct Model {
    const char* name;
    int n_layer, n_embd, n_head;
    int64_t vocab, padded_vocab;
    int B, T;

    int64_t tokens() const { return int64_t{B} * T; }
    double parameters() const {
        const double C = n_embd;
        return n_layer * (12 * C * C + 13 * C) + (static_cast<double>(padded_vocab) + T + 2) * C;
    }
};
constexpr Model models[] = {{"12.3M", 6, 384, 6, 4096, 4096, 8, 256},
                            {"124M", 12, 768, 12, 50257, 50304, 4, 256}};

/// Least times of a step's parts, in seconds.
struct Floor {
    double products = 0, attention = 0, adamw = 0, element_wise = 0;
    double total() const { return products + attention + adamw + element_wise; }
};

double measure_attention(Timing& timing, const Model& m, DType dtype) {
    Buffers memory;
    const Device cpu;
    const int64_t C = m.n_embd, D = m.n_embd / m.n_head, T = m.T;
    const Tensor qkv = memory.random(dtype, {m.B, T, 3 * C}),
                 out = memory.tensor(dtype, {m.B, T, C}), dout = memory.random(dtype, {m.B, T, C}),
                 dqkv = memory.tensor(dtype, {m.B, T, 3 * C}),
                 lse = memory.tensor(DType::fp32, {m.B, m.n_head, T});
    AttentionShape shape;
    shape.dtype = dtype;
    shape.B = m.B;
    shape.T = shape.S = m.T;
    shape.H = shape.H_kv = m.n_head;
    shape.D = static_cast<int>(D);
    shape.scale = 0.125f;
    Stream stream(cpu);
    stream.scratch_bytes = attention_scratch_bytes(cpu, shape);
    stream.scratch = memory.take(stream.scratch_bytes);
    const auto part = [&](const Tensor& packed, int64_t i) {
        return HeadsView{
            static_cast<char*>(packed.data) + static_cast<size_t>(i * C) * size_of(dtype),
            3 * T * C, 3 * C, D};
    };
    const auto whole = [&](const Tensor& t) { return HeadsView{t.data, T * C, C, D}; };
    return timing([&] {
        attention_forward(stream, {.shape = shape,
                                   .q = part(qkv, 0),
                                   .k = part(qkv, 1),
                                   .v = part(qkv, 2),
                                   .out = whole(out),
                                   .lse = lse.as<float>()});
        attention_backward(stream, {.shape = shape,
                                    .q = part(qkv, 0),
                                    .k = part(qkv, 1),
                                    .v = part(qkv, 2),
                                    .out = whole(out),
                                    .dout = whole(dout),
                                    .lse = lse.as<float>(),
                                    .dq = part(dqkv, 0),
                                    .dk = part(dqkv, 1),
                                    .dv = part(dqkv, 2)});
    });
}

constexpr const char* floor_rule =
    "The floor of a step is the sum of: its matrix products, each at the fastest of this project's "
    "kernel, oneDNN, and "
    "oneDNN with weights packed beforehand; causal attention, 7·B·T²·C FLOPs a layer, at 0.6 of "
    "the best product's rate or "
    "at the rate of this project's attention where that is higher; AdamW's 28 (fp32) or 30 (bf16) "
    "bytes a parameter at the "
    "update bandwidth; and at triad bandwidth the element-wise traffic that remains when all is "
    "fused: (22·L + 9)·B·T·C "
    "activations and 2·B·T·V logits.\n";

Floor measure_floor(Timing& timing, const Model& m, DType dtype, const Bandwidth& bandwidth,
                    std::string* table) {
    const int64_t M = m.tokens(), C = m.n_embd;
    const Linear layers[] = {{"qkv", M, 3 * C, C, m.n_layer},
                             {"attention out", M, C, C, m.n_layer},
                             {"mlp up", M, 4 * C, C, m.n_layer},
                             {"mlp down", M, C, 4 * C, m.n_layer},
                             {"head", M, m.padded_vocab, C, 1}};
    Floor floor;
    double best_rate = 0;
    for (const Linear& l : layers) {
        for (const Product product : products) {
            const ProductTimes t = measure_product(timing, product, dtype, l);
            floor.products += l.count * t.best();
            best_rate = std::max(best_rate, l.flops() / t.best());
            const auto rate = [&](double seconds) {
                char text[16] = "–";
                if (seconds > 0)
                    std::snprintf(text, sizeof text, "%.0f", l.flops() / seconds / 1e9);
                return std::string(text);
            };
            *table += concat("| ", m.name, " ", name_of(dtype), " | ", l.name, " ", l.M, "×", l.N,
                             "×", l.K, " | ", name_of(product), " | ", rate(t.project), " | ",
                             rate(t.library), " | ", rate(t.library_packed), " |\n");
        }
    }
    const double width = static_cast<double>(size_of(dtype)), tokens = static_cast<double>(M);
    const double attention_flops = 7.0 * tokens * m.T * m.n_embd;
    const double own_attention = attention_flops / measure_attention(timing, m, dtype);
    char text[160];
    std::snprintf(text, sizeof text, "| %s %s | attention, %d heads of %d | both | %.0f | | |\n",
                  m.name, name_of(dtype), m.n_head, m.n_embd / m.n_head, own_attention / 1e9);
    *table += text;
    floor.attention = m.n_layer * attention_flops / std::max(0.6 * best_rate, own_attention);
    floor.adamw = m.parameters() * (dtype == DType::bf16 ? 30 : 28) / bandwidth.update;
    floor.element_wise = ((22 * m.n_layer + 9) * tokens * m.n_embd +
                          2 * tokens * static_cast<double>(m.padded_vocab)) *
                         width / bandwidth.triad;
    return floor;
}

// --- training steps of both sides ---------------------------------------------------------------------------------------

/// A child process; ended when the object goes. What it says goes to a file that errors quote from: stderr alone where
/// stdin and stdout are pipes to talk through, else stdout too.
class Child {
  public:
    Child(const std::vector<std::string>& command, const std::string& log, bool talk) : log_(log) {
        int in[2], out[2];
        if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0)
            throw Error("cannot make a pipe: ", std::strerror(errno));
        std::vector<char*> arguments;
        for (const std::string& word : command)
            arguments.push_back(const_cast<char*>(word.c_str()));
        arguments.push_back(nullptr);
        pid_ = ::fork();
        if (pid_ < 0) throw Error("cannot start ", command[0], ": ", std::strerror(errno));
        if (pid_ == 0) {
            ::setpgid(0, 0);
            const int err = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
            const int nothing = ::open("/dev/null", O_RDONLY);
            ::dup2(talk ? in[0] : nothing, 0);
            ::dup2(talk ? out[1] : err, 1);
            ::dup2(err, 2);
            ::execvp(arguments[0], arguments.data());
            ::_exit(127);
        }
        ::setpgid(pid_, pid_);
        ::close(in[0]);
        ::close(out[1]);
        to_ = in[1];
        from_ = out[0];
    }
    ~Child() {
        signal(SIGKILL);
        if (!reaped_) ::waitpid(pid_, nullptr, 0);
        ::close(to_);
        ::close(from_);
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    /// To the child and whatever it started.
    void signal(int number) { ::kill(-pid_, number); }

    void send(const std::string& line) {
        const std::string text = line + "\n";
        if (::write(to_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
            fail("stopped listening");
    }
    /// The next line on the child's stdout that begins with '{', parsed.
    json receive(double limit) {
        const double end = now() + limit;
        for (;;) {
            const size_t newline = pending_.find('\n');
            if (newline != std::string::npos) {
                const std::string line = pending_.substr(0, newline);
                pending_.erase(0, newline + 1);
                if (!line.empty() && line[0] == '{') return json::parse(line);
                continue;
            }
            pollfd wait{from_, POLLIN, 0};
            if (now() > end || ::poll(&wait, 1, 1000) < 0) fail("did not answer");
            if (!(wait.revents & (POLLIN | POLLHUP))) continue;
            char buffer[4096];
            const ssize_t n = ::read(from_, buffer, sizeof buffer);
            if (n <= 0) fail("ended early");
            pending_.append(buffer, static_cast<size_t>(n));
        }
    }
    bool running() {
        if (!reaped_ && ::waitpid(pid_, nullptr, WNOHANG) == pid_) reaped_ = true;
        return !reaped_;
    }
    /// Processor time of all its threads so far, in clock ticks.
    int64_t ticks() const {
        std::ifstream file(concat("/proc/", pid_, "/stat"));
        std::string text;
        std::getline(file, text);
        // The second field is the name in parentheses, which may hold spaces; user and system time are the 14th and 15th.
        std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));
        std::string skipped;
        for (int i = 3; i < 14; ++i) fields >> skipped;
        int64_t user = 0, system = 0;
        fields >> user >> system;
        return user + system;
    }
    uint64_t peak_rss() const {
        std::ifstream status(concat("/proc/", pid_, "/status"));
        for (std::string line; std::getline(status, line);)
            if (line.rfind("VmHWM:", 0) == 0)
                return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
        return 0;
    }
    [[noreturn]] void fail(const std::string& what) const {
        std::ifstream log(log_);
        std::string last, line;
        while (std::getline(log, line))
            if (!line.empty()) last = line;
        throw Error("the program being measured ", what, last.empty() ? "" : ": " + last, " (see ",
                    log_, ")");
    }

  private:
    std::string log_, pending_;
    pid_t pid_ = -1;
    int to_ = -1, from_ = -1;
    bool reaped_ = false;
};

/// train_gpt as a user runs it, on synthetic data; stopped (SIGSTOP) between rounds.
class OurRun {
  public:
    OurRun(const std::string& program, const std::string& folder, const Model& m, DType dtype)
        : metrics_(folder + "/run/metrics.jsonl") {
        std::filesystem::remove_all(folder);
        make_directory(folder);
        const json config = {
            {"run_dir", folder + "/run"},
            {"device", "cpu"},
            {"model",
             {{"n_layer", m.n_layer},
              {"n_head", m.n_head},
              {"n_embd", m.n_embd},
              {"n_ctx", m.T},
              {"vocab_size", m.vocab}}},
            {"data", {{"train", "synthetic"}}},
            {"batch",
             {{"tokens_per_step", m.tokens()}, {"micro_batch", m.B}, {"sequence_length", m.T}}},
            {"optimizer", {{"learning_rate", 3e-4}}},
            {"schedule", {{"steps", 1000000}, {"decay", "constant"}}},
            {"precision", {{"dtype", name_of(dtype)}}},
            {"checkpoint", {{"every", 0}}},
            {"evaluation", {{"every", 0}}},
            {"log", {{"progress", "lines"}}}};
        write_file(folder + "/config.json", config.dump(2));
        child_ = std::make_unique<Child>(
            std::vector<std::string>{program, "train", folder + "/config.json"}, folder + "/log",
            false);
        steps(3);  // warm-up
    }

    /// Milliseconds of n whole steps; the one during which the process was halted does not count.
    std::vector<double> steps(int n) {
        std::vector<double> all = read_metrics();
        const auto first = static_cast<std::ptrdiff_t>(all.size()) + 1;
        child_->signal(SIGCONT);
        const double end = now() + 120 + 60 * n;
        for (uintmax_t seen = 0; std::ssize(all) < first + n;) {
            ::usleep(5000);
            if (!child_->running()) child_->fail("ended early");
            if (now() > end) child_->fail("takes too long");
            std::error_code missing;
            const uintmax_t size = std::filesystem::file_size(metrics_, missing);
            if (missing || size == seen) continue;
            seen = size;
            all = read_metrics();
        }
        child_->signal(SIGSTOP);
        return {all.begin() + first, all.begin() + first + n};
    }
    uint64_t peak_rss() const { return child_->peak_rss(); }
    int64_t ticks() const { return child_->ticks(); }

  private:
    std::vector<double> read_metrics() {
        std::ifstream file(metrics_);
        std::vector<double> ms;
        for (std::string line; std::getline(file, line) && !file.eof();) {
            const json entry = json::parse(line, nullptr, false);
            if (entry.is_object() && entry.contains("ms")) ms.push_back(entry["ms"].get<double>());
        }
        return ms;
    }
    std::string metrics_;
    std::unique_ptr<Child> child_;
};

/// PyTorch through scripts/bench_pytorch.py, which waits between rounds.
class PeerRun {
  public:
    PeerRun(const std::string& python, const std::string& folder, const Model& m,
            const std::string& dtype, bool compiled, int threads)
        : label_(dtype == "fp32" ? "" : dtype + ", ") {
        label_ += compiled ? "compiled" : "eager";
        std::vector<std::string> command{python, "scripts/bench_pytorch.py", "--server", "--dtype",
                                         dtype};
        if (compiled) command.emplace_back("--compile");
        const auto option = [&](const char* name, int64_t value) {
            command.emplace_back(name);
            command.push_back(std::to_string(value));
        };
        option("--n-layer", m.n_layer);
        option("--n-embd", m.n_embd);
        option("--n-head", m.n_head);
        option("--vocab", m.padded_vocab);
        option("--batch", m.B);
        option("--sequence", m.T);
        option("--threads", threads);
        make_directory(folder);
        child_ = std::make_unique<Child>(command, folder + "/log", true);
        version_ = child_->receive(600)["torch"].get<std::string>();
    }
    std::vector<double> steps(int n) {
        child_->send(concat("go ", n));
        const json answer = child_->receive(120 + 60 * n);
        peak_rss_ = answer["peak_rss"].get<uint64_t>();
        return answer["ms"].get<std::vector<double>>();
    }
    uint64_t peak_rss() const { return peak_rss_; }
    int64_t ticks() const { return child_->ticks(); }
    const std::string& label() const { return label_; }
    const std::string& version() const { return version_; }

  private:
    std::string label_, version_;
    std::unique_ptr<Child> child_;
    uint64_t peak_rss_ = 0;
};

/// Times of steps, those of quiet rounds apart.
struct Rounds {
    std::vector<double> good, all;
    int good_rounds = 0, rounds = 0;

    template <class Run>
    void add(Canary& canary, Run& run, int steps) {
        const bool before = canary.wait_for_quiet(5);
        const OthersShare others(run.ticks());
        const std::vector<double> ms = run.steps(steps);
        const double share = others(run.ticks());
        ++rounds;
        all.insert(all.end(), ms.begin(), ms.end());
        if (!before || share > 0.05 || !canary.quiet()) return;
        ++good_rounds;
        good.insert(good.end(), ms.begin(), ms.end());
    }
    double ms() const { return median(good.empty() ? all : good); }
    std::string quality() const { return concat(good_rounds, "/", rounds); }
};

struct Options {
    bool quick = false;
    std::string program = "build/train_gpt", python, folder = "build/bench-runs", only;
    double cell_seconds = 100;  // for the rounds of one model and dtype
};

/// The fastest way in which PyTorch can run this step: each is tried for a few steps.
std::unique_ptr<PeerRun> fastest_peer(const Options& options, const Model& m, DType dtype,
                                      int threads) {
    std::unique_ptr<PeerRun> best;
    double best_ms = 0;
    const std::vector<std::string> kinds = dtype == DType::fp32
                                               ? std::vector<std::string>{"fp32"}
                                               : std::vector<std::string>{"autocast", "masters"};
    for (const std::string& kind : kinds) {
        for (const bool compiled : {false, true}) {
            if (options.quick && (!compiled || kind == "masters")) continue;
            const std::string name = concat(m.name, "-", kind, compiled ? "-compiled" : "-eager");
            try {
                auto run = std::make_unique<PeerRun>(
                    options.python, options.folder + "/peer-" + name, m, kind, compiled, threads);
                const double ms = median(run->steps(3));
                std::fprintf(stderr, "  PyTorch %s: %.0f ms\n", name.c_str(), ms);
                if (!best || ms < best_ms) best = std::move(run), best_ms = ms;
            } catch (const Error& error) {
                std::fprintf(stderr, "  PyTorch %s was left out: %s\n", name.c_str(), error.what());
            }
        }
    }
    return best;
}

struct Cell {
    const Model* model;
    DType dtype;
    Floor floor;
    Rounds ours, peer;
    uint64_t our_rss = 0, peer_rss = 0;
    std::string peer_label;
};

std::string milliseconds(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, seconds < 0.01 ? "%.1f" : "%.0f", 1e3 * seconds);
    return text;
}

void print_cells(const std::vector<Cell>& cells) {
    std::printf(
        "\n| model, dtype | floor ms (products + attention + AdamW + element-wise) | train_gpt ms "
        "| of the floor | "
        "PyTorch ms | PyTorch / train_gpt | GiB train_gpt | GiB PyTorch | quiet rounds |\n"
        "|---|---|---|---|---|---|---|---|---|\n");
    const auto number = [](const char* format, double value) {
        char text[32];
        std::snprintf(text, sizeof text, format, value);
        return std::string(value > 0 ? text : "–");
    };
    for (const Cell& c : cells) {
        const double ours = c.ours.ms(), peer = c.peer.ms(), floor = 1e3 * c.floor.total();
        std::printf(
            "| %s B%d T%d %s | %.0f (%s + %s + %s + %s) | %s | %s | %s | %s | %s | %s | %s, %s |\n",
            c.model->name, c.model->B, c.model->T, name_of(c.dtype), floor,
            milliseconds(c.floor.products).c_str(), milliseconds(c.floor.attention).c_str(),
            milliseconds(c.floor.adamw).c_str(), milliseconds(c.floor.element_wise).c_str(),
            number("%.0f", ours).c_str(), number("%.2f ×", ours / floor).c_str(),
            peer > 0 ? concat(number("%.0f", peer), " (", c.peer_label, ")").c_str() : "–",
            number("%.2f ×", ours > 0 ? peer / ours : 0).c_str(),
            number("%.2f", static_cast<double>(c.our_rss) / (1 << 30)).c_str(),
            number("%.2f", static_cast<double>(c.peer_rss) / (1 << 30)).c_str(),
            c.ours.quality().c_str(), c.peer.quality().c_str());
    }
}

void bench(const Options& options) {
    require_cpu_features();
    const CpuInfo cpu = cpu_info();
    char date[32];
    const std::time_t today = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&today));
    std::printf("# Speed of a training step\n\n%s, %d threads, %s%s%s; %s", cpu.model.c_str(),
                cpu.threads,
                cpu.avx512 ? "AVX-512"
                : cpu.avx2 ? "AVX2"
                           : "no AVX2",
                cpu.avx512_bf16 ? ", AVX512_BF16" : "", cpu.amx_bf16 ? ", AMX" : "", date);
#ifdef TRAIN_GPT_ONEDNN
    std::printf("; oneDNN %d.%d.%d", dnnl::version()->major, dnnl::version()->minor,
                dnnl::version()->patch);
#endif
    Canary canary(cpu);
    Timing timing{canary, options.quick ? 5 : 9, options.quick ? 2.0 : 6.0};
    const Bandwidth bandwidth = measure_bandwidth(timing, cpu.threads);
    std::printf("\n\n- multiply-adds: %.0f GF/s fp32", canary.best_rate() / 1e9);
#if defined(__x86_64__)
    if (cpu.avx512_bf16) {
        double best = 0;
        for (int i = 0; i < 20; ++i)
            best = std::max(best, fma_rate({dot_bf16_avx512, 12 * 64}, 100000, cpu.threads));
        std::printf(", %.0f GF/s bf16 (VDPBF16PS)", best / 1e9);
    }
#endif
    std::printf("\n- memory: triad %.1f GB/s, update in place (AdamW) %.1f GB/s\n",
                bandwidth.triad / 1e9, bandwidth.update / 1e9);
    std::fflush(stdout);

    std::vector<Cell> cells;
    std::string products =
        "\n| | M×N×K | product | train_gpt GF/s | oneDNN | oneDNN packed "
        "|\n|---|---|---|---|---|---|\n";
    std::string peer_version;
    for (const Model& m : models) {
        if (options.quick && &m != models) continue;
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            const std::string name = concat(m.name, "-", name_of(dtype));
            if (!options.only.empty() && name.find(options.only) == std::string::npos) continue;
            std::fprintf(stderr, "%s: the floor\n", name.c_str());
            Cell cell{&m, dtype, measure_floor(timing, m, dtype, bandwidth, &products), {}, {}, 0,
                      0,  ""};
            std::unique_ptr<PeerRun> peer;
            if (!options.python.empty()) peer = fastest_peer(options, m, dtype, cpu.threads);
            OurRun ours(options.program, options.folder + "/" + name, m, dtype);
            std::fprintf(stderr, "%s: rounds of steps\n", name.c_str());
            const double slower =
                std::max(median(ours.steps(2)), peer ? median(peer->steps(2)) : 0);
            const int steps = std::clamp(static_cast<int>(2500 / slower), 2, 8);
            const int wanted = options.quick ? 3 : 5;
            const double start = now();
            do {
                if (peer) cell.peer.add(canary, *peer, steps);
                cell.ours.add(canary, ours, steps);
            } while ((cell.ours.good_rounds < wanted || (peer && cell.peer.good_rounds < wanted)) &&
                     now() - start < (options.quick ? 25 : options.cell_seconds));
            cell.our_rss = ours.peak_rss();
            if (peer) {
                cell.peer_rss = peer->peak_rss();
                cell.peer_label = peer->label();
                peer_version = peer->version();
            }
            cells.push_back(std::move(cell));
        }
    }
    std::printf("- peer: %s\n- quiet: %.0f %% of the looks at the canary",
                peer_version.empty() ? "none was measured" : ("PyTorch " + peer_version).c_str(),
                100 * canary.quiet_share());
    if (timing.disturbed > 0)
        std::printf("; %lld of %lld rates below were taken on a busy machine",
                    static_cast<long long>(timing.disturbed),
                    static_cast<long long>(timing.measured));
    std::printf("\n");
    print_cells(cells);
    std::printf(
        "\nMedians over the steps of quiet rounds, the two programs taking turns; without any "
        "quiet "
        "round, of all steps, and then the numbers hold only roughly. GiB: peak "
        "resident memory.\n"
        "%s%s",
        floor_rule, products.c_str());
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
    using namespace train_gpt;
    std::signal(SIGPIPE, SIG_IGN);
    try {
        Options options;
        for (int i = 1; i < argc; ++i) {
            const std::string word = argv[i];
            const auto value = [&] {
                if (++i == argc) throw UsageError(word, " wants a value");
                return std::string(argv[i]);
            };
            if (word == "quick")
                options.quick = true;
            else if (word == "--python")
                options.python = value();
            else if (word == "--program")
                options.program = value();
            else if (word == "--folder")
                options.folder = value();
            else if (word == "--only")
                options.only = value();
            else
                throw UsageError(
                    "usage: bench [quick] [--program build/train_gpt] [--python PYTHON_WITH_TORCH] "
                    "[--folder SCRATCH] [--only 12.3M-bf16], in the repository's root");
        }
        bench(options);
        return 0;
    } catch (const UsageError& error) {
        std::fprintf(stderr, "bench: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench: %s\n", error.what());
        return 1;
    }
}
