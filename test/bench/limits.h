// The least time that a training step can take on this machine, from the measured rates of memory,
// matrix products and attention and the amount of each in a step.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#ifdef TRAIN_GPT_ONEDNN
#include <dnnl.hpp>
#endif

#include "base/error.h"
#include "base/tensor.h"
#include "device/device.h"
#include "device/memory.h"
#include "device/stream.h"
#include "kernels/attention/attention.h"
#include "kernels/linear/linear.h"
#include "test/bench/machine.h"

namespace train_gpt::bench {

// --- Memory --------------------------------------------------------------------------------------

struct Bandwidth {
    double triad = 0;   // bytes/s of c = a + s·b, three streams counted
    double update = 0;  // bytes/s of AdamW's streams: four read, three of them written back
};

inline Bandwidth measure_bandwidth(Timing& timing, int threads) {
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

// --- Matrix products -----------------------------------------------------------------------------

/// Memory for tensors of one measurement.
class Buffers {
  public:
    Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
        Tensor t(nullptr, dtype, shape);
        t.data = take(t.bytes());
        return t;
    }
    /// Filled with values of the size activations have; the multiplication of denormals would be
    /// slow.
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
inline const char* name_of(Product p) {
    return p == Product::forward          ? "forward"
           : p == Product::backward_input ? "d input"
                                          : "d weight";
}

/// A linear layer's products: x [M, K], w [N, K], y [M, N].
struct Linear {
    const char* name;
    int64_t M, N, K;
    int count;  // occurrences in a step
    double flops() const {
        return 2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K);
    }
};

/// Seconds of one product; 0 if it was not measured.
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
/// One product through oneDNN alone. With `packed`, the weights are in the layout that oneDNN
/// prefers.
class LibraryProduct {
  public:
    struct Operands {
        Tensor x, w, y, dw;
    };
    LibraryProduct(Product product, DType dtype, const Linear& l, const Operands& of, bool packed)
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
                pa = of.x.data, pb = of.w.data, pc = of.y.data;
                break;
            case Product::backward_input:
                a = matrix(l.M, l.N, in, false), b = matrix(l.N, l.K, in, false),
                c = matrix(l.M, l.K, in, false);
                pa = of.y.data, pb = of.w.data, pc = of.x.data;
                break;
            case Product::backward_weight:
                a = matrix(l.N, l.M, in, true), b = matrix(l.M, l.K, in, false),
                c = matrix(l.N, l.K, f32, false);
                pa = of.y.data, pb = of.x.data, pc = of.dw.data;
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

inline ProductTimes measure_product(Timing& timing, Product product, DType dtype, const Linear& l) {
    Buffers memory;
    const Device cpu;
    Stream stream(cpu);
    stream.scratch_bytes = linear_scratch_bytes(stream, dtype, l.M, l.N, l.K);
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
        LibraryProduct plain(product, dtype, l, {x, w, y, dw}, false);
        times.library = timing([&] { plain.run(); });
        if (product != Product::backward_weight) {
            LibraryProduct packed(product, dtype, l, {x, w, y, dw}, true);
            times.library_packed = timing([&] { packed.run(); });
        }
    } catch (const dnnl::error&) {
        // oneDNN may not have a product for this CPU (bf16 on AVX2); then only the project's own is
        // measured.
    }
#endif
    return times;
}

// --- Models --------------------------------------------------------------------------------------

struct Model {
    const char* name;
    const char* family = "gpt2";  // or llama, qwen3_moe
    int n_layer, n_embd, n_head, n_kv_head;
    int64_t n_ff, vocab, padded_vocab;
    bool tied = true;
    int B, T;
    int n_expert = 0, n_expert_per_token = 0;  // n_ff is then an expert's

    int64_t tokens() const { return int64_t{B} * T; }
    bool is_llama() const { return std::string(family) != "gpt2"; }
    /// Rows of the MLPs for each token, and MLPs of a layer.
    int rows() const { return n_expert > 0 ? n_expert_per_token : 1; }
    int mlps() const { return std::max(n_expert, 1); }
    int head_size() const { return n_embd / n_head; }
    int64_t qkv() const { return int64_t{n_head + 2 * n_kv_head} * head_size(); }
    int64_t up() const { return is_llama() ? 2 * n_ff : n_ff; }
    double parameters() const {
        const double C = n_embd, in = static_cast<double>(qkv()), wide = static_cast<double>(up()),
                     F = static_cast<double>(n_ff), V = static_cast<double>(padded_vocab);
        const double matrices = C * (in + C + mlps() * (wide + F) + n_expert);
        return is_llama() ? n_layer * (matrices + 2 * C) + C + (tied ? V : 2 * V) * C
                          : n_layer * (matrices + in + C + wide + C + 4 * C) + (V + T + 2) * C;
    }
    /// Elements per token and layer that are moved besides what products and attention read and
    /// write, when all is fused: the norms forward and backward, the residual stream, and for the
    /// MLP its preactivation, written and read again; with SwiGLU the gradient has two halves, and
    /// queries and keys are rotated in place in both passes. The rows of experts are added up for
    /// their token, and its gradient goes to each of them.
    double element_wise() const {
        const double C = n_embd, F = static_cast<double>(n_ff);
        return is_llama() ? 14 * C + rows() * 5 * F + (n_expert > 0 ? 2 * rows() * C : 0) +
                                4.0 * (n_head + n_kv_head) * head_size()
                          : 14 * C + 2 * F;
    }
};
constexpr Model models[] = {{.name = "12.3M",
                             .n_layer = 6,
                             .n_embd = 384,
                             .n_head = 6,
                             .n_kv_head = 6,
                             .n_ff = 1536,
                             .vocab = 4096,
                             .padded_vocab = 4096,
                             .B = 8,
                             .T = 256},
                            {.name = "124M",
                             .n_layer = 12,
                             .n_embd = 768,
                             .n_head = 12,
                             .n_kv_head = 12,
                             .n_ff = 3072,
                             .vocab = 50257,
                             .padded_vocab = 50304,
                             .B = 4,
                             .T = 256},
                            {.name = "Llama 15.7M",
                             .family = "llama",
                             .n_layer = 8,
                             .n_embd = 384,
                             .n_head = 6,
                             .n_kv_head = 2,
                             .n_ff = 1024,
                             .vocab = 4096,
                             .padded_vocab = 4096,
                             .tied = false,
                             .B = 8,
                             .T = 256},
                            {.name = "SmolLM2 135M",
                             .family = "llama",
                             .n_layer = 30,
                             .n_embd = 576,
                             .n_head = 9,
                             .n_kv_head = 3,
                             .n_ff = 1536,
                             .vocab = 49152,
                             .padded_vocab = 49152,
                             .B = 4,
                             .T = 256},
                            {.name = "mixture 20M",
                             .family = "qwen3_moe",
                             .n_layer = 7,
                             .n_embd = 320,
                             .n_head = 10,
                             .n_kv_head = 2,
                             .n_ff = 288,
                             .vocab = 4096,
                             .padded_vocab = 4096,
                             .tied = false,
                             .B = 8,
                             .T = 256,
                             .n_expert = 8,
                             .n_expert_per_token = 2}};

/// Least times of a step's parts, in seconds.
struct LeastTimes {
    double products = 0, attention = 0, adamw = 0, element_wise = 0;
    double total() const { return products + attention + adamw + element_wise; }
};

inline double measure_attention(Timing& timing, const Model& m, DType dtype) {
    Buffers memory;
    const Device cpu;
    const int64_t C = m.n_embd, D = m.head_size(), T = m.T, width = m.qkv();
    const Tensor qkv = memory.random(dtype, {m.B, T, width}),
                 out = memory.tensor(dtype, {m.B, T, C}), dout = memory.random(dtype, {m.B, T, C}),
                 dqkv = memory.tensor(dtype, {m.B, T, width}),
                 lse = memory.tensor(DType::fp32, {m.B, m.n_head, T});
    AttentionShape shape;
    shape.dtype = dtype;
    shape.B = m.B;
    shape.T = shape.S = m.T;
    shape.H = m.n_head;
    shape.H_kv = m.n_kv_head;
    shape.D = static_cast<int>(D);
    shape.scale = 0.125f;
    Stream stream(cpu);
    stream.scratch_bytes = attention_scratch_bytes(stream, shape);
    stream.scratch = memory.take(stream.scratch_bytes);
    const auto part = [&](const Tensor& packed, int64_t first_head) {
        return HeadsView{
            static_cast<char*>(packed.data) + static_cast<size_t>(first_head * D) * size_of(dtype),
            T * width, width, D};
    };
    const int k = m.n_head, v = m.n_head + m.n_kv_head;
    const auto whole = [&](const Tensor& t) { return HeadsView{t.data, T * C, C, D}; };
    return timing([&] {
        attention_forward(stream, {.shape = shape,
                                   .q = part(qkv, 0),
                                   .k = part(qkv, k),
                                   .v = part(qkv, v),
                                   .out = whole(out),
                                   .lse = lse.as<float>()});
        attention_backward(stream, {.shape = shape,
                                    .q = part(qkv, 0),
                                    .k = part(qkv, k),
                                    .v = part(qkv, v),
                                    .out = whole(out),
                                    .dout = whole(dout),
                                    .lse = lse.as<float>(),
                                    .dq = part(dqkv, 0),
                                    .dk = part(dqkv, k),
                                    .dv = part(dqkv, v)});
    });
}

constexpr const char* bound_rule =
    "The lower bound of a step is the sum of: its matrix products, each at the fastest of this "
    "project's "
    "kernel, oneDNN, and "
    "oneDNN with weights packed beforehand; causal attention, 7·B·T²·C FLOPs a layer, at 0.6 of "
    "the best product's rate or "
    "at the rate of this project's attention where that is higher; AdamW's 28 (fp32) or 30 (bf16) "
    "bytes a parameter at the "
    "update bandwidth; and at triad bandwidth the element-wise traffic that remains when all is "
    "fused: (22·L + 9)·B·T·C "
    "activations (Llama: ((14·C + 5·F + 4·(H + H_kv)·D)·L + 9·C)·B·T; with k experts for a token "
    "5·k·F + 2·k·C) and "
    "2·B·T·V logits. The rows of experts count as one dense product.\n";

inline LeastTimes measure_least_times(Timing& timing, const Model& m, DType dtype,
                                      const Bandwidth& bandwidth, std::string* table) {
    const int64_t M = m.tokens(), C = m.n_embd;
    const Linear layers[] = {{"qkv", M, m.qkv(), C, m.n_layer},
                             {"attention out", M, C, C, m.n_layer},
                             {"mlp up", M * m.rows(), m.up(), C, m.n_layer},
                             {"mlp down", M * m.rows(), C, m.n_ff, m.n_layer},
                             {"head", M, m.padded_vocab, C, 1}};
    LeastTimes bound;
    double best_rate = 0;
    for (const Linear& l : layers) {
        for (const Product product : products) {
            const ProductTimes t = measure_product(timing, product, dtype, l);
            bound.products += l.count * t.best();
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
                  m.name, name_of(dtype), m.n_head, m.head_size(), own_attention / 1e9);
    *table += text;
    bound.attention = m.n_layer * attention_flops / std::max(0.6 * best_rate, own_attention);
    bound.adamw = m.parameters() * (dtype == DType::bf16 ? 30 : 28) / bandwidth.update;
    bound.element_wise =
        (m.n_layer * m.element_wise() + 9 * m.n_embd + 2 * static_cast<double>(m.padded_vocab)) *
        tokens * width / bandwidth.triad;
    return bound;
}

}  // namespace train_gpt::bench
