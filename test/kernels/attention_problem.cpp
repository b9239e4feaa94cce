#include "test/kernels/attention_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "device/processor.h"

namespace train_gpt::attention_problem {

namespace {

/// Matrix units take bf16 operands: where there are some, a plain implementation rounds P and dS
/// too.
AttentionReference plain_attention(const Case& c) {
    const bool matrix_units = test_device().is_cuda() || cpu_info().native_bf16();
    return attention_reference<float>(c, c.shape.dtype, matrix_units ? c.shape.dtype : DType::fp32);
}

/// A tensor of its own: [B, T or more, heads, D] or, as a cache, [B, heads, T or more, D], with
/// random gaps and a margin.
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
        batch = (T + random_int(0, 2)) * token;
    }
    auto memory = std::make_shared<Memory>(s.dtype, static_cast<size_t>(2 * margin + s.B * batch));
    const auto origin = static_cast<size_t>(margin);
    return {memory, origin, {memory->at(origin), batch, token, head}, s.B, T, heads, s.D};
}

/// Packed: q, k and v in one tensor or, with T < S, k and v.
std::vector<Placed> place_qkv(const Case& c, Layout layout) {
    const AttentionShape& s = c.shape;
    if (layout == Layout::packed && s.T == s.S) return place_packed(c, s.T, {s.H, s.H_kv, s.H_kv});
    const Placed q = place_alone(c, s.T, s.H, Layout::separate);
    if (layout == Layout::packed) {
        const auto kv = place_packed(c, s.S, {s.H_kv, s.H_kv});
        return {q, kv[0], kv[1]};
    }
    return {q, place_alone(c, s.S, s.H_kv, layout), place_alone(c, s.S, s.H_kv, layout)};
}

/// dq, dk and dv of a case where the request wants them, poisoned or as they are before the call.
std::vector<Placed> place_gradients(const Case& c, Layout layout, const Request& request) {
    auto grads = place_qkv(c, layout);
    if (request.key_gradients != KeyGradients::write) {
        Case in_fp32 = c;
        in_fp32.shape.dtype = DType::fp32;
        const auto sums = place_qkv(in_fp32, layout);
        grads = {grads[0], sums[1], sums[2]};
    }
    for (const Placed& g : grads) g.poison();
    if (request.key_gradients == KeyGradients::add_fp32) {
        grads[1].fill(request.dk);
        grads[2].fill(request.dv);
    }
    return grads;
}

double root_mean_square(const Values& a) {
    double sum = 0;
    for (double x : a) sum += x * x;
    return a.empty() ? 0 : std::sqrt(sum / static_cast<double>(a.size()));
}

struct Compared {
    const Values &ours, &plain, &exact, &terms;
};

/// Errors may be twice (root mean square) or three times (largest) the errors of a plain
/// implementation with the same storage and fp32 arithmetic, and some roundings of the terms that
/// are summed. The backward pass computes probabilities from scores of its own and lse: their
/// roundings are relative to the scores' terms.
void check_tensor(const std::string& name, const Case& c, const Compared& of, double score_terms) {
    const auto& [ours, plain, exact, terms] = of;
    const ErrorSize error = error_of(ours, exact, terms), usual = error_of(plain, exact, terms);
    const double terms_rms = root_mean_square(terms);
    CAPTURE(name, describe(c), terms_rms, score_terms, error.rms, error.max, usual.rms, usual.max);
    // bf16: P and dS may be rounded too. Where few elements make no statistics, and in a single
    // element, one such rounding can outweigh all roundings of the result; the bound is then the
    // rounding itself.
    const bool half = c.shape.dtype == DType::bf16;
    // All elements of a key's gradient share the rounding of each query's P and dS.
    const bool few_queries = score_terms > 0 && c.shape.T < 8;
    const bool few = half && (exact.size() < 2000 || c.shape.D < 8 || few_queries);
    // These roundings do not average out over few queries: the score's and lse's may add up.
    const double recomputed = (few_queries ? 2 : 1) * 0x1p-24 * score_terms;
    CHECK(error.rms <= 2 * usual.rms + (few ? 1.0 / 256 : 3e-7 + recomputed) * terms_rms);
    CHECK(error.max <= 3 * usual.max + (half ? 1.0 / 256 : 1e-6 + recomputed));
}

/// What the roundings of sinks are relative to. exp(sink − lse) has those of the sink and of lse in
/// units of log 2 and those of lse itself; all rows of a head share the sink's.
double sink_terms(const Case& c, const AttentionReference& exact) {
    if (c.sinks.empty()) return 0;
    double largest = exact.score_terms;
    for (const Values* values : {&c.sinks, &exact.lse})
        for (const double x : *values) largest = std::max(largest, std::abs(x));
    return 4 * std::min(largest, 1e6);
}

/// Whether the kernels for sm_90a compute a case; else others do, which tests see without them.
bool wgmma_computes(const Case& c) {
    const AttentionShape& s = c.shape;
    return s.dtype == DType::bf16 && c.aligned && s.D % 8 == 0 && s.D <= 128 && s.T >= 16;
}

}  // namespace

const std::vector<Kernels>& test_kernels() {
    static const std::vector<Kernels> kernels = [] {
        std::vector<Kernels> found;
        for (const Device& device : test_devices()) found.push_back({device});
        for (const Device& device : test_devices())
            if (has_wgmma(device)) found.push_back({device, KernelSettings::Attention::wgmma});
        return found;
    }();
    return kernels;
}

KernelSettings::Attention& attention_under_test() {
    static auto attention = KernelSettings::Attention::automatic;
    return attention;
}

KernelsUnderTest::KernelsUnderTest(const Kernels& kernels) : device_(kernels.device) {
    attention_under_test() = kernels.attention;
}

Memory::Memory(DType dtype, size_t elements)
    : dtype_(dtype), memory_(elements * size_of(dtype)), owned_(elements, false) {
    for (size_t i = 0; i < elements * size_of(dtype); ++i)
        data()[i] = static_cast<unsigned char>(random_int(0, 255));
}

std::vector<unsigned char> Memory::bytes() const {
    settle();
    return {data(), data() + owned_.size() * size_of(dtype_)};
}

bool Memory::others_unchanged(const std::vector<unsigned char>& before) const {
    const size_t size = size_of(dtype_);
    settle();
    for (size_t i = 0; i < owned_.size(); ++i) {
        if (!owned_[i] && std::memcmp(at(i), &before[i * size], size) != 0) return false;
    }
    return true;
}

void Placed::fill(const Values& values) const {
    each([&](size_t at, size_t i) { memory->set(at, values[i]); });
}

Values Placed::read() const {
    Values values;
    memory->settle();
    each([&](size_t at, size_t) { values.push_back(memory->get(at)); });
    return values;
}

void Placed::poison() const {
    each([&](size_t at, size_t) {
        memory->set(at, std::numeric_limits<double>::quiet_NaN());
        memory->own(at);
    });
}

std::vector<Placed> place_packed(const Case& c, int T, const std::vector<int>& heads) {
    const AttentionShape& s = c.shape;
    const int64_t margin = (c.aligned ? 8 : 1) * random_int(0, 40);
    const int64_t token =
        static_cast<int64_t>(std::accumulate(heads.begin(), heads.end(), 0)) * s.D;
    auto memory =
        std::make_shared<Memory>(s.dtype, static_cast<size_t>(2 * margin + s.B * T * token));
    std::vector<Placed> parts;
    int64_t first = margin;
    for (const int n : heads) {
        const auto origin = static_cast<size_t>(first);
        parts.push_back(
            {memory, origin, {memory->at(origin), T * token, token, s.D}, s.B, T, n, s.D});
        first += static_cast<int64_t>(n) * s.D;
    }
    return parts;
}

AttentionStream::AttentionStream(const AttentionShape& shape)
    : bytes(attention_scratch_bytes(planning(), shape)),
      memory(bytes + guard()),
      stream(test_device()) {
    stream.settings.attention = attention_under_test();
    // Blocks that stay on the GPU then process several tiles, also where there are few.
    if (tests_wgmma())
        stream.settings.reserved_sms =
            multiprocessors(test_device()) - static_cast<int>(random_int(1, 4));
    stream.scratch = memory.data();
    stream.scratch_bytes = bytes;
}

bool AttentionStream::within_bounds() const {
    memory.settle();
    const auto* end = static_cast<const unsigned char*>(memory.data()) + bytes;
    return std::all_of(end, end + guard(), [](unsigned char byte) { return byte == 0xff; });
}

Sinks::Sinks(const Case& c, const Request& request)
    : H_(c.sinks.size()),
      dtype_(c.sinks_dtype),
      sinks_(H_ * sizeof(float)),
      gradients_((H_ + 2) * sizeof(float)),
      accumulate_(!request.dsinks.empty()) {
    for (size_t h = 0; h < H_; ++h) {
        const auto x = static_cast<float>(c.sinks[h]);
        if (dtype_ == DType::bf16)
            static_cast<bf16*>(sinks_.data())[h] = bf16(x);
        else
            static_cast<float*>(sinks_.data())[h] = x;
    }
    std::fill_n(gradients(), H_ + 2, mark);
    for (size_t h = 0; h < H_; ++h)
        gradients()[1 + h] = accumulate_ ? static_cast<float>(request.dsinks[h])
                                         : std::numeric_limits<float>::quiet_NaN();
}

Tensor Sinks::tensor() const {
    if (H_ == 0) return {};
    return {sinks_.data(), dtype_, {static_cast<int64_t>(H_)}};
}

GradientSink Sinks::sink() const {
    if (H_ == 0) return {};
    return {gradients() + 1, DType::fp32, accumulate_};
}

std::vector<float> Sinks::read() const {
    gradients_.settle();
    REQUIRE(gradients()[0] == mark);
    REQUIRE(gradients()[H_ + 1] == mark);
    return {gradients() + 1, gradients() + 1 + H_};
}

Run run(const Case& c, Layout layout, const Request& request) {
    AttentionShape shape = c.shape;
    const TestMemory documents(c.doc_start.size() * sizeof(int32_t));
    if (!c.doc_start.empty()) {
        std::memcpy(documents.data(), c.doc_start.data(), c.doc_start.size() * sizeof(int32_t));
        shape.doc_start = static_cast<const int32_t*>(documents.data());
    }
    const bool backward = !c.dout.empty();
    AttentionStream scratch(shape);
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
    const Sinks sinks(c, request);
    AttentionForward forward{shape,         qkv[0].view, qkv[1].view,
                             qkv[2].view,   out.view,    request.lse ? lse + guard : nullptr,
                             sinks.tensor()};
    attention_forward(scratch.stream, forward);
    result.out = out.read();
    result.lse.assign(lse + guard, lse + guard + rows);
    REQUIRE(out.memory->others_unchanged(out_before));
    REQUIRE(scratch.within_bounds());
    for (size_t i = 0; i < guard; ++i) REQUIRE((lse[i] == mark && lse[guard + rows + i] == mark));

    if (backward) {
        const Placed dout = place_alone(c, shape.T, shape.H, Layout::separate);
        dout.fill(c.dout);
        const auto grads = place_gradients(c, layout, request);
        std::vector<std::vector<unsigned char>> before;
        for (const Placed& g : grads) before.push_back(g.memory->bytes());
        AttentionStream fresh(shape);
        attention_backward(fresh.stream,
                           {shape, qkv[0].view, qkv[1].view, qkv[2].view, out.view, dout.view,
                            lse + guard, grads[0].view, grads[1].view, grads[2].view,
                            request.key_gradients, sinks.tensor(), sinks.sink()});
        for (size_t i = 0; i < grads.size(); ++i)
            REQUIRE(grads[i].memory->others_unchanged(before[i]));
        REQUIRE(fresh.within_bounds());
        result.dq = grads[0].read();
        result.dk = grads[1].read();
        result.dv = grads[2].read();
        result.dsinks = sinks.read();
    }
    REQUIRE(qkv[0].memory->bytes() == qkv_before);
    REQUIRE(qkv[1].memory->bytes() == k_before);
    REQUIRE(qkv[2].memory->bytes() == v_before);
    return result;
}

Values random_values(size_t n, DType dtype, float stddev) {
    Values values;
    for (float x : random_normal(n, stddev)) values.push_back(rounded(x, dtype));
    return values;
}

void add_sinks(Case& c) {
    c.sinks_dtype = random_int(0, 1) ? c.shape.dtype : DType::fp32;
    c.sinks = random_values(static_cast<size_t>(c.shape.H), c.sinks_dtype,
                            random_int(0, 3) ? 1.5f : 8.0f);
}

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
    if (random_int(0, 2) == 0) s.softcap = 0.5f * static_cast<float>(random_int(1, 16));
    if (wish.windows && random_int(0, 3) > 0)
        s.window = static_cast<int>(random_int(1, random_int(0, 2) ? std::min(s.S, 40) : s.S + 5));
    if (wish.windows && random_int(0, 2) > 0) add_sinks(c);
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
    if (wish.backward) c.dout = random_values(q_size, s.dtype);
    return c;
}

std::string describe(const Case& c) {
    const AttentionShape& s = c.shape;
    return concat(name_of(s.dtype), " B", s.B, " T", s.T, " S", s.S, " H", s.H, " H_kv", s.H_kv,
                  " D", s.D, s.softcap == 0 ? "" : concat(" softcap ", s.softcap),
                  s.window == 0 ? "" : concat(" window ", s.window),
                  c.sinks.empty() ? "" : concat(" sinks ", name_of(c.sinks_dtype)),
                  c.doc_start.empty() ? "" : " documents", c.aligned ? " aligned" : "");
}

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

void check_run(const Case& c, const Run& ours) {
    const AttentionReference exact = exact_attention(c), plain = plain_attention(c);
    const double sinks = sink_terms(c, exact), recomputed = exact.score_terms + sinks;
    check_tensor("out", c, {ours.out, plain.out, exact.out, exact.out_terms}, sinks);
    for (size_t i = 0; i < ours.lse.size(); ++i) {
        CAPTURE(describe(c), i);
        REQUIRE(std::abs(ours.lse[i] - exact.lse[i]) <= 3e-6 * (1 + std::abs(exact.lse[i])));
    }
    if (c.dout.empty()) return;
    check_tensor("dq", c, {ours.dq, plain.dq, exact.dq, exact.dq_terms}, recomputed);
    check_tensor("dk", c, {ours.dk, plain.dk, exact.dk, exact.dk_terms}, recomputed);
    check_tensor("dv", c, {ours.dv, plain.dv, exact.dv, exact.dv_terms}, recomputed);
    if (c.sinks.empty()) return;
    const Values dsinks(ours.dsinks.begin(), ours.dsinks.end());
    check_tensor("dsinks", c, {dsinks, plain.dsinks, exact.dsinks, exact.dsinks_terms}, recomputed);
}

void check_case(const Case& c, Layout layout) {
    if (tests_wgmma() && !wgmma_computes(c)) return;
    const Run ours = run(c, layout);
    check_run(c, ours);
}

bool same_bits(const Run& a, const Run& b) {
    return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) &&
           same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv) && same_bits(a.dsinks, b.dsinks);
}

}  // namespace train_gpt::attention_problem
