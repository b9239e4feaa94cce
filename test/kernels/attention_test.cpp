// Attention against a reference in float64, on random shapes, layouts and document boundaries.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include "base/error.h"
#include "test/catch.h"
#include "test/kernels/reference.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt {
namespace {

// --------------------------------------------------------------------------------------- reference

struct Case : AttentionProblem {
    bool aligned = false;  // all views, to 8 elements: what the tensor cores' kernels need
};

float rounded(double x, DType dtype) {
    const float single = static_cast<float>(x);
    return dtype == DType::bf16 ? to_float(bf16(single)) : single;
}

AttentionReference exact_attention(const Case& c) { return attention_reference<double>(c); }
/// Matrix units take bf16 operands: where there are some, a plain implementation rounds P and dS too.
AttentionReference plain_attention(const Case& c) {
    const bool matrix_units = test_device().is_cuda() || cpu_info().native_bf16();
    return attention_reference<float>(c, c.shape.dtype, matrix_units ? c.shape.dtype : DType::fp32);
}

// ----------------------------------------------------------------------------------------- layouts

enum class Layout { packed, separate, cache };

/// Memory of several heads tensors. Every element that belongs to no view holds a pattern that must
/// survive.
class Memory {
  public:
    Memory(DType dtype, size_t elements)
        : dtype_(dtype), memory_(elements * size_of(dtype)), owned_(elements, false) {
        for (size_t i = 0; i < elements * size_of(dtype); ++i)
            data()[i] = static_cast<unsigned char>(random_int(0, 255));
    }

    void* at(size_t element) const { return data() + element * size_of(dtype_); }
    double get(size_t element) const {
        if (dtype_ == DType::bf16) {
            bf16 x;
            std::memcpy(&x, at(element), 2);
            return to_float(x);
        }
        float x;
        std::memcpy(&x, at(element), 4);
        return x;
    }
    void set(size_t element, double value) {
        const bf16 half(static_cast<float>(value));
        const float single = static_cast<float>(value);
        std::memcpy(at(element), dtype_ == DType::bf16 ? static_cast<const void*>(&half) : &single,
                    size_of(dtype_));
    }
    void own(size_t element) { owned_[element] = true; }
    void settle() const { memory_.settle(); }
    std::vector<unsigned char> bytes() const {
        settle();
        return {data(), data() + owned_.size() * size_of(dtype_)};
    }
    /// True when nothing but owned elements differs from `before`.
    bool others_unchanged(const std::vector<unsigned char>& before) const {
        const size_t size = size_of(dtype_);
        settle();
        for (size_t i = 0; i < owned_.size(); ++i) {
            if (!owned_[i] && std::memcmp(at(i), &before[i * size], size) != 0) return false;
        }
        return true;
    }

  private:
    unsigned char* data() const { return static_cast<unsigned char*>(memory_.data()); }

    DType dtype_;
    TestMemory memory_;
    std::vector<bool> owned_;
};

/// One tensor [B, T, heads, D] somewhere in a Memory.
struct Placed {
    std::shared_ptr<Memory> memory;
    size_t origin = 0;
    HeadsView view;
    int B = 0, T = 0, heads = 0, D = 0;

    template <class F>
    void each(F&& f) const {
        size_t i = 0;
        for (int b = 0; b < B; ++b)
            for (int t = 0; t < T; ++t)
                for (int h = 0; h < heads; ++h)
                    for (int d = 0; d < D; ++d)
                        f(origin + static_cast<size_t>(b * view.batch + t * view.token +
                                                       h * view.head + d),
                          i++);
    }
    void fill(const Values& values) const {
        each([&](size_t at, size_t i) { memory->set(at, values[i]); });
    }
    Values read() const {
        Values values;
        memory->settle();
        each([&](size_t at, size_t) { values.push_back(memory->get(at)); });
        return values;
    }
    void poison() const {
        each([&](size_t at, size_t) {
            memory->set(at, std::numeric_limits<double>::quiet_NaN());
            memory->own(at);
        });
    }
};

Placed place(const std::shared_ptr<Memory>& memory, size_t origin, int B, int T, int heads, int D,
             int64_t batch, int64_t token, int64_t head) {
    Placed p{memory, origin, {memory->at(origin), batch, token, head}, B, T, heads, D};
    return p;
}

/// A tensor of its own: [B, T, heads, D] or, as a cache, [B, heads, more than T, D], with random
/// gaps and a margin.
Placed place_alone(const Case& c, int T, int heads, Layout layout) {
    const AttentionShape& s = c.shape;
    const int64_t unit = c.aligned ? 8 : 1;
    const int64_t margin = unit * random_int(0, 40), gap = unit * random_int(0, 3);
    int64_t token, head, batch;
    if (layout == Layout::cache) {
        token = s.D + gap;
        head = (T + random_int(0, 5)) * token;
        batch = heads * head + gap;
    } else {
        head = s.D + gap;
        token = heads * head + unit * random_int(0, 9);
        batch = T * token;
    }
    auto memory = std::make_shared<Memory>(s.dtype, static_cast<size_t>(2 * margin + s.B * batch));
    return place(memory, static_cast<size_t>(margin), s.B, T, heads, s.D, batch, token, head);
}

/// Three tensors in one, [B, T, H + 2·H_kv, D].
std::vector<Placed> place_packed(const Case& c) {
    const AttentionShape& s = c.shape;
    const int64_t margin = (c.aligned ? 8 : 1) * random_int(0, 40);
    const int64_t token = static_cast<int64_t>(s.H + 2 * s.H_kv) * s.D;
    auto memory =
        std::make_shared<Memory>(s.dtype, static_cast<size_t>(2 * margin + s.B * s.T * token));
    const auto part = [&](int first, int heads) {
        return place(memory, static_cast<size_t>(margin + static_cast<int64_t>(first) * s.D), s.B,
                     s.T, heads, s.D, s.T * token, token, s.D);
    };
    return {part(0, s.H), part(s.H, s.H_kv), part(s.H + s.H_kv, s.H_kv)};
}

std::vector<Placed> place_qkv(const Case& c, Layout layout) {
    const AttentionShape& s = c.shape;
    if (layout == Layout::packed && s.T == s.S) return place_packed(c);
    return {place_alone(c, s.T, s.H, Layout::separate), place_alone(c, s.S, s.H_kv, layout),
            place_alone(c, s.S, s.H_kv, layout)};
}

/// A stream whose scratch is exactly what the contract asks for, full of NaNs. On CUDA a write behind it is an error, on
/// the CPU it is found by within_bounds().
struct TestStream {
    size_t bytes;
    TestMemory memory;
    Stream stream;

    explicit TestStream(const AttentionShape& shape)
        : bytes(attention_scratch_bytes(test_device(), shape)),
          memory(bytes + guard()),
          stream(test_device()) {
        stream.scratch = memory.data();
        stream.scratch_bytes = bytes;
    }
    bool within_bounds() const {
        memory.settle();
        const auto* end = static_cast<const unsigned char*>(memory.data()) + bytes;
        return std::all_of(end, end + guard(), [](unsigned char byte) { return byte == 0xff; });
    }

  private:
    static size_t guard() { return test_device().is_cuda() ? 0 : 64; }
};

/// One run of the kernels on a case; outputs poisoned before, surroundings checked after.
struct Run {
    Values out, dq, dk, dv;
    std::vector<float> lse;
};

Run run(const Case& c, Layout layout, bool want_lse = true) {
    AttentionShape shape = c.shape;
    const TestMemory documents(c.doc_start.size() * sizeof(int32_t));
    if (!c.doc_start.empty()) {
        std::memcpy(documents.data(), c.doc_start.data(), c.doc_start.size() * sizeof(int32_t));
        shape.doc_start = static_cast<const int32_t*>(documents.data());
    }
    const bool backward = !c.dout.empty();
    TestStream scratch(shape);
    auto qkv = place_qkv(c, layout);
    const Placed out = place_alone(c, shape.T, shape.H, Layout::separate);
    qkv[0].fill(c.q);
    qkv[1].fill(c.k);
    qkv[2].fill(c.v);
    out.poison();
    Run result;
    constexpr size_t guard = 16;
    const float mark = 1234.5f;
    const size_t rows = static_cast<size_t>(shape.B) * shape.H * shape.T;
    const TestMemory lse_memory((rows + 2 * guard) * sizeof(float));
    auto* const lse = static_cast<float*>(lse_memory.data());
    std::fill_n(lse, rows + 2 * guard, mark);
    std::fill_n(lse + guard, rows, std::numeric_limits<float>::quiet_NaN());

    const auto qkv_before = qkv[0].memory->bytes();
    const auto k_before = qkv[1].memory->bytes(), v_before = qkv[2].memory->bytes();
    const auto out_before = out.memory->bytes();
    AttentionForward forward{shape,       qkv[0].view, qkv[1].view,
                             qkv[2].view, out.view,    want_lse ? lse + guard : nullptr};
    attention_forward(scratch.stream, forward);
    result.out = out.read();
    result.lse.assign(lse + guard, lse + guard + rows);
    REQUIRE(out.memory->others_unchanged(out_before));
    REQUIRE(scratch.within_bounds());
    for (size_t i = 0; i < guard; ++i) REQUIRE((lse[i] == mark && lse[guard + rows + i] == mark));

    if (backward) {
        const Placed dout = place_alone(c, shape.T, shape.H, Layout::separate);
        dout.fill(c.dout);
        auto grads = place_qkv(c, layout);
        for (auto& g : grads) g.poison();
        std::vector<std::vector<unsigned char>> before;
        for (auto& g : grads) before.push_back(g.memory->bytes());
        TestStream fresh(shape);
        attention_backward(fresh.stream,
                           {shape, qkv[0].view, qkv[1].view, qkv[2].view, out.view, dout.view,
                            lse + guard, grads[0].view, grads[1].view, grads[2].view});
        for (size_t i = 0; i < grads.size(); ++i)
            REQUIRE(grads[i].memory->others_unchanged(before[i]));
        REQUIRE(fresh.within_bounds());
        result.dq = grads[0].read();
        result.dk = grads[1].read();
        result.dv = grads[2].read();
    }
    REQUIRE(qkv[0].memory->bytes() == qkv_before);
    REQUIRE(qkv[1].memory->bytes() == k_before);
    REQUIRE(qkv[2].memory->bytes() == v_before);
    return result;
}

// ------------------------------------------------------------------------------------------ inputs

Values random_values(size_t n, DType dtype, float stddev = 1.0f) {
    Values values;
    for (float x : random_normal(n, stddev)) values.push_back(rounded(x, dtype));
    return values;
}

struct Wish {
    DType dtype = DType::fp32;
    int T = 0, extra_keys = 0, D = 0;  // 0: any T, any D
    int B = 0, H = 0, H_kv = 0;        // 0: a few
    bool documents = false, backward = true, aligned = false;
    float size = 1;
};

Case random_case(const Wish& wish) {
    Case c;
    AttentionShape& s = c.shape;
    s.dtype = wish.dtype;
    s.B = wish.B ? wish.B : static_cast<int>(random_int(1, 2));
    c.aligned = wish.aligned;
    s.T = wish.T ? wish.T : static_cast<int>(random_int(1, device_is_simulated() ? 40 : 150));
    s.S = s.T + wish.extra_keys;
    s.D = wish.D         ? wish.D
          : wish.aligned ? 8 * static_cast<int>(random_int(1, 16))
                         : static_cast<int>(random_int(1, random_int(0, 3) ? 80 : 256));
    s.H_kv = wish.H_kv ? wish.H_kv : static_cast<int>(random_int(1, 2));
    s.H = wish.H ? wish.H : s.H_kv * static_cast<int>(random_int(1, 3));
    s.scale = 1 / std::sqrt(static_cast<float>(s.D));
    if (wish.documents) {
        for (int b = 0; b < s.B; ++b) {
            int start = static_cast<int>(random_int(0, std::max(0, s.S - s.T)));
            const int64_t mean_length = random_int(1, s.T);
            for (int t = 0; t < s.T; ++t) {
                if (random_int(1, mean_length) == 1) start = t + s.S - s.T;
                c.doc_start.push_back(start);
            }
        }
    }
    const size_t q_size = static_cast<size_t>(s.B) * s.T * s.H * s.D,
                 k_size = static_cast<size_t>(s.B) * s.S * s.H_kv * s.D;
    c.q = random_values(q_size, s.dtype, wish.size);
    c.k = random_values(k_size, s.dtype, wish.size);
    c.v = random_values(k_size, s.dtype);
    if (wish.backward && s.T == s.S) c.dout = random_values(q_size, s.dtype);
    return c;
}

std::string describe(const Case& c) {
    const AttentionShape& s = c.shape;
    return concat(name_of(s.dtype), " B", s.B, " T", s.T, " S", s.S, " H", s.H, " H_kv", s.H_kv,
                  " D", s.D, c.doc_start.empty() ? "" : " documents", c.aligned ? " aligned" : "");
}

// ------------------------------------------------------------------------------------------ errors

double root_mean_square(const Values& a) {
    double sum = 0;
    for (double x : a) sum += x * x;
    return a.empty() ? 0 : std::sqrt(sum / static_cast<double>(a.size()));
}
struct ErrorSize {
    double rms = 0, max = 0;  // max: relative to the terms of the element
};
ErrorSize error_of(const Values& a, const Values& exact, const Values& terms) {
    REQUIRE(a.size() == exact.size());
    Values difference;
    ErrorSize e;
    for (size_t i = 0; i < a.size(); ++i) {
        difference.push_back(a[i] - exact[i]);
        const double relative = std::abs(difference[i]) / (terms[i] + 1e-30);
        e.max = std::isfinite(relative) ? std::max(e.max, relative)
                                        : std::numeric_limits<double>::infinity();
    }
    e.rms = root_mean_square(difference);
    return e;
}

/// Errors may be twice (root mean square) or three times (largest) those of a plain implementation
/// with the same storage and fp32 arithmetic, and some roundings of the terms that are summed.
/// The backward pass computes probabilities from scores of its own and lse: their roundings are relative to the scores'
/// terms.
void check_tensor(const std::string& name, const Case& c, const Values& ours, const Values& plain,
                  const Values& exact, const Values& terms, double score_terms = 0) {
    const ErrorSize error = error_of(ours, exact, terms), usual = error_of(plain, exact, terms);
    const double terms_rms = root_mean_square(terms);
    CAPTURE(name, describe(c), terms_rms, score_terms, error.rms, error.max, usual.rms, usual.max);
    // bf16: P and dS may be rounded too. Where few elements make no statistics, and in a single element, one such
    // rounding can outweigh all roundings of the result; the bound is then the rounding itself.
    const bool half = c.shape.dtype == DType::bf16;
    const bool few = half && (exact.size() < 2000 || c.shape.D < 8);
    const double recomputed = 0x1p-24 * score_terms;
    CHECK(error.rms <= 2 * usual.rms + (few ? 1.0 / 256 : 3e-7 + recomputed) * terms_rms);
    CHECK(error.max <= 3 * usual.max + (half ? 1.0 / 256 : 1e-6 + recomputed));
}

void check_case(const Case& c, Layout layout) {
    const Run ours = run(c, layout);
    const AttentionReference exact = exact_attention(c), plain = plain_attention(c);
    check_tensor("out", c, ours.out, plain.out, exact.out, exact.out_terms);
    for (size_t i = 0; i < ours.lse.size(); ++i) {
        CAPTURE(describe(c), i);
        REQUIRE(std::abs(ours.lse[i] - exact.lse[i]) <= 3e-6 * (1 + std::abs(exact.lse[i])));
    }
    if (c.dout.empty()) return;
    check_tensor("dq", c, ours.dq, plain.dq, exact.dq, exact.dq_terms, exact.score_terms);
    check_tensor("dk", c, ours.dk, plain.dk, exact.dk, exact.dk_terms, exact.score_terms);
    check_tensor("dv", c, ours.dv, plain.dv, exact.dv, exact.dv_terms, exact.score_terms);
}

Layout any_layout() { return static_cast<Layout>(random_int(0, 2)); }

/// Sets the OpenMP team size and puts the old one back.
struct Threads {
    int before = omp_get_max_threads();
    explicit Threads(int n) { omp_set_num_threads(n); }
    ~Threads() { omp_set_num_threads(before); }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
bool same_bits(const Run& a, const Run& b) {
    return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) &&
           same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

const std::vector<DType> dtypes = {DType::fp32, DType::bf16};

}  // namespace

TEST_CASE(
    "attention forward and backward match float64 on random shapes, layouts and groups of heads",
    "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        for (int i = 0; i < (device_is_simulated() ? 12 : 24); ++i) {
            Wish wish;
            wish.dtype = dtype;
            wish.documents = i % 3 == 2;
            wish.aligned = i % 2 == 1;
            check_case(random_case(wish), any_layout());
        }
    }
}

TEST_CASE("attention matches float64 at the edges of its tiles and blocks", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        for (bool aligned : {false, true}) {
            for (int T :
                 {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300}) {
                if (device_is_simulated() && T > 65 && !(aligned && dtype == DType::bf16)) continue;
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = aligned;
                wish.B = 1;
                wish.T = T;
                wish.H_kv = 1;
                wish.H = T > 128 ? 1 : 2;
                wish.D =
                    aligned
                        ? 8 * static_cast<int>(random_int(1, 16))
                        : std::vector<int>{
                              1, 8, 16, 17, 31, 32, 48, 64}[static_cast<size_t>(random_int(0, 7))];
                wish.documents = random_int(0, 3) == 0;
                check_case(random_case(wish), any_layout());
            }
        }
        for (int D :
             {1, 2, 7, 8, 16, 24, 32, 33, 40, 64, 80, 96, 112, 127, 128, 129, 200, 255, 256}) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = D % 8 == 0;
            wish.T = static_cast<int>(random_int(60, 70));
            wish.D = D;
            check_case(random_case(wish), any_layout());
        }
    }
}

TEST_CASE("documents and groups of heads over many tiles match float64", "[cuda]") {
    ON_EACH_DEVICE();
    for (int mean_length : {10, 60, 400}) {
        Wish wish;
        wish.dtype = DType::bf16;
        wish.aligned = true;
        wish.B = 1;
        wish.T = static_cast<int>(random_int(250, 400));
        wish.H_kv = 1;
        wish.H = mean_length == 60 ? 2 : 1;
        wish.D = 16;
        Case c = random_case(wish);
        int start = 0;
        for (int t = 0; t < wish.T; ++t) {
            if (random_int(1, mean_length) == 1) start = t;
            c.doc_start.push_back(start);
        }
        check_case(c, any_layout());
    }
}

TEST_CASE("attention over a cache sees the keys before its queries", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        for (int i = 0; i < 24; i += device_is_simulated() ? 3 : 1) {
            Wish wish;
            wish.dtype = dtype;
            wish.T =
                i < 12 ? static_cast<int>(random_int(1, 4)) : static_cast<int>(random_int(1, 90));
            wish.extra_keys = static_cast<int>(random_int(1, 300));
            wish.documents = i % 2 == 1;
            wish.aligned = i % 4 < 2;
            check_case(random_case(wish), any_layout());
        }
    }
    // Positions against the edges of tiles of keys.
    for (int extra_keys : {1, 30, 31, 32, 33, 40, 48, 62, 63, 64, 65}) {
        Wish wish;
        wish.dtype = DType::bf16;
        wish.aligned = true;
        wish.B = 1;
        wish.T = 33;
        wish.extra_keys = extra_keys;
        wish.D = 64;
        check_case(random_case(wish), Layout::cache);
    }
}

TEST_CASE(
    "the float64 attention gradients that the kernels are tested against match numerical ones") {
    for (int i = 0; i < 6; ++i) {
        Wish wish;
        wish.T = static_cast<int>(random_int(1, 9));
        wish.D = static_cast<int>(random_int(1, 6));
        wish.documents = i % 2 == 1;
        Case c = random_case(wish);
        const AttentionReference exact = exact_attention(c);
        const auto loss = [&] {
            Case forward = c;
            forward.dout.clear();
            const Values out = exact_attention(forward).out;
            double sum = 0;
            for (size_t j = 0; j < out.size(); ++j) sum += out[j] * c.dout[j];
            return sum;
        };
        const auto compare = [&](Values& x, const Values& gradient) {
            for (int sample = 0; sample < 12; ++sample) {
                const auto j =
                    static_cast<size_t>(random_int(0, static_cast<int64_t>(x.size()) - 1));
                const double kept = x[j], step = 1e-5;
                x[j] = kept + step;
                const double above = loss();
                x[j] = kept - step;
                const double below = loss();
                x[j] = kept;
                CHECK(std::abs((above - below) / (2 * step) - gradient[j]) <
                      1e-7 * (1 + std::abs(gradient[j])));
            }
        };
        compare(c.q, exact.dq);
        compare(c.k, exact.dk);
        compare(c.v, exact.dv);
    }
}

TEST_CASE("a query that sees one key returns its value exactly", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        for (bool aligned : {false, true}) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = aligned;
            wish.T = static_cast<int>(random_int(16, 100));
            wish.D = aligned ? 16 : 0;
            wish.B = 1;
            Case c = random_case(wish);
            const AttentionShape& s = c.shape;
            const int alone = static_cast<int>(random_int(0, s.T - 1));
            for (int t = 0; t < s.T; ++t) c.doc_start.push_back(t < alone ? 0 : alone);
            const Run r = run(c, any_layout());
            for (int h = 0; h < s.H; ++h) {
                for (int t : {0, alone}) {
                    for (int d = 0; d < s.D; ++d) {
                        REQUIRE(r.out[c.q_at(0, t, h) + d] ==
                                c.v[c.k_at(0, t, h / (s.H / s.H_kv)) + d]);
                    }
                }
            }
        }
    }
}

TEST_CASE("attention stays finite and right for very large scores", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        for (int T : {static_cast<int>(random_int(1, 3)), static_cast<int>(random_int(20, 140))}) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = true;
            wish.B = 1;
            wish.T = T;
            wish.D = 64;
            wish.size = 300;  // scores of the order of 10^5: each row is decided by its largest
            Case c = random_case(wish);
            const Run r = run(c, Layout::separate);
            const AttentionReference exact = exact_attention(c);
            // The score of the winner is known to a relative 2⁻²⁴ · √D or so; rows whose two best
            // are closer are few.
            size_t wrong = 0;
            for (size_t i = 0; i < r.out.size(); ++i) {
                REQUIRE(std::isfinite(r.out[i]));
                wrong += std::abs(r.out[i] - exact.out[i]) >
                         (dtype == DType::bf16 ? 0.02 : 0.01) * (1 + std::abs(exact.out[i]));
            }
            CHECK(static_cast<double>(wrong) <= 0.01 * static_cast<double>(r.out.size()));
            for (const Values* g : {&r.dq, &r.dk, &r.dv}) {
                for (double x : *g) REQUIRE(std::isfinite(x));
            }
        }
    }
}

TEST_CASE("attention gives the same bits again, whatever the number of threads and the layout",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        for (int i = 0; i < 3; ++i) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = test_device().is_cuda();  // there, alignment chooses the kernel
            wish.B = 1;
            wish.H_kv = 1 + i % 2;
            wish.H = 2;
            wish.T = i == 2                  ? static_cast<int>(random_int(1, 3))
                     : device_is_simulated() ? static_cast<int>(random_int(129, 150))
                                             : static_cast<int>(random_int(257, 800));
            wish.D = test_device().is_cuda() ? 8 * static_cast<int>(random_int(1, 5))
                                             : static_cast<int>(random_int(8, 40));
            wish.documents = i == 1;
            const Case c = random_case(wish);
            CAPTURE(describe(c));
            std::unique_ptr<Run> first;
            for (int threads : test_device().is_cuda() ? std::vector<int>{1, 1}
                                                       : std::vector<int>{1, 1, 2, 3, 8}) {
                const Threads team(threads);
                Run r = run(c, any_layout());
                if (!first) first = std::make_unique<Run>(r);
                CAPTURE(threads);
                CHECK(same_bits(*first, r));
            }
        }
    }
}

TEST_CASE("a NaN reaches every query that sees it and none of another head", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        for (int which = 0; which < 3; ++which) {
            for (int T : {static_cast<int>(random_int(1, 3)),
                          static_cast<int>(random_int(16, device_is_simulated() ? 70 : 200))}) {
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = random_int(0, 1);
                wish.B = 1;
                if (device_is_simulated()) wish.D = 16;
                wish.T = T;
                wish.H_kv = 2;
                Case c = random_case(wish);
                const AttentionShape& s = c.shape;
                const int b = static_cast<int>(random_int(0, s.B - 1)),
                          t = static_cast<int>(random_int(0, s.T - 1));
                const int d = static_cast<int>(random_int(0, s.D - 1));
                const int h = static_cast<int>(random_int(0, s.H - 1)), g = h / (s.H / s.H_kv);
                Values& x = which == 0 ? c.q : which == 1 ? c.k : c.v;
                x[(which == 0 ? c.q_at(b, t, h) : c.k_at(b, t, g)) + d] =
                    std::numeric_limits<double>::quiet_NaN();
                const Run r = run(c, any_layout());
                const auto any_nan = [&](const Values& values, size_t start) {
                    return std::any_of(values.begin() + start, values.begin() + start + s.D,
                                       [](double value) { return std::isnan(value); });
                };
                for (int row = 0; row < s.T; ++row) {
                    CAPTURE(describe(c), which, row, t);
                    const bool seen = which == 0 ? row == t : row >= t;
                    if (seen) {
                        CHECK(any_nan(r.out, c.q_at(b, row, h)));
                        CHECK(any_nan(r.dq, c.q_at(b, row, h)));
                        if (which < 2) CHECK(std::isnan(r.lse[c.lse_at(b, h, row)]));
                    }
                    const int other = (h + s.H / s.H_kv) % s.H;  // has another key head
                    CHECK_FALSE(any_nan(r.out, c.q_at(b, row, other)));
                    CHECK_FALSE(any_nan(r.dq, c.q_at(b, row, other)));
                }
                CHECK(any_nan(r.dk, c.k_at(b, t, g)));
            }
        }
    }
}

TEST_CASE("attention without lse gives the same output", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : dtypes) {
        Wish wish;
        wish.dtype = dtype;
        wish.aligned = true;
        wish.backward = false;
        const Case c = random_case(wish);
        CHECK(same_bits(run(c, Layout::separate).out, run(c, Layout::separate, false).out));
    }
}

TEST_CASE("the CPU and CUDA compute the same attention", "[cuda]") {
    if (test_devices().size() < 2) return;
    for (DType dtype : dtypes) {
        Wish wish;
        wish.dtype = dtype;
        wish.aligned = true;
        wish.B = 1;
        wish.T = static_cast<int>(random_int(40, 80));
        wish.D = 24;
        Case c = random_case(wish);
        for (int t = 0; t < wish.T; ++t) c.doc_start.push_back(t < wish.T / 3 ? 0 : wish.T / 3);
        const Run cpu = run(c, Layout::packed);
        const DeviceUnderTest gpu(test_devices().back());
        const Run cuda = run(c, Layout::packed);
        // In bf16 one or both round P and dS, and the results.
        const double bound = dtype == DType::bf16 ? 1.0 / 128 : 3e-6;
        const AttentionReference exact = exact_attention(c);
        const auto compare = [&](const Values& ours, const Values& theirs, const Values& terms) {
            CHECK(error_of(ours, theirs, terms).max <= bound);
        };
        compare(cuda.out, cpu.out, exact.out_terms);
        compare(cuda.dq, cpu.dq, exact.dq_terms);
        compare(cuda.dk, cpu.dk, exact.dk_terms);
        compare(cuda.dv, cpu.dv, exact.dv_terms);
    }
}

TEST_CASE("attention refuses what it cannot compute, in a sentence", "[cuda]") {
    ON_EACH_DEVICE();
    Wish wish;
    wish.backward = false;
    wish.T = 8;
    wish.H_kv = 2;
    wish.H = 4;
    wish.D = 8;
    Case c = random_case(wish);
    const auto error = [&] {
        try {
            run(c, Layout::separate);
        } catch (const Error& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    REQUIRE(error().empty());
    SECTION("heads that do not divide") {
        c.shape.H_kv = 3;
        CHECK(error().find("multiple") != std::string::npos);
    }
    SECTION("a document that starts after its token") {
        if (test_device().is_cuda()) return;  // values in device memory are not looked at
        c.doc_start.assign(static_cast<size_t>(c.shape.B) * 8, 0);
        c.doc_start[2] = 3;
        CHECK(error().find("doc_start of sequence 0, token 2 is 3") != std::string::npos);
    }
    SECTION("a dtype that is no floating type") {
        c.shape.dtype = DType::int32;
        CHECK(error().find("int32") != std::string::npos);
    }
    SECTION(
        "a head too large, too little scratch, a missing tensor, a cache in the backward pass") {
        AttentionShape shape = c.shape;
        TestStream scratch(shape);
        const TestMemory memory(4096 * sizeof(float));
        auto* const x = static_cast<float*>(memory.data());
        const HeadsView view{x, 0, 0, 0};
        shape.D = 257;
        CHECK_THROWS_AS(attention_scratch_bytes(test_device(), shape), Error);
        CHECK_THROWS_AS(attention_forward(scratch.stream, {shape, view, view, view, view, nullptr}),
                        Error);
        CHECK_THROWS_AS(attention_forward(scratch.stream, {c.shape, view, {}, view, view, nullptr}),
                        Error);
        scratch.stream.scratch_bytes = 64;
        CHECK_THROWS_AS(attention_backward(scratch.stream, {c.shape, view, view, view, view, view,
                                                            x, view, view, view}),
                        Error);
        CHECK_THROWS_AS(attention_backward(scratch.stream, {c.shape, view, view, view, view, view,
                                                            nullptr, view, view, view}),
                        Error);
        shape = c.shape;
        shape.S = 9;
        CHECK_THROWS_AS(attention_backward(scratch.stream, {shape, view, view, view, view, view, x,
                                                            view, view, view}),
                        Error);
    }
}

}  // namespace train_gpt
