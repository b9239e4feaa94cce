#include "kernels/swiglu.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// M rows of random operands, and room for the results.
struct TestedSwiglu {
    int64_t M, F;
    std::optional<ClampedSwiglu> clamped;
    Buffer gate_up, dout, out, dgate_up;

    TestedSwiglu(DType dtype, int64_t M_, int64_t F_,
                 const std::optional<ClampedSwiglu>& clamped_ = {})
        : M(M_),
          F(F_),
          clamped(clamped_),
          gate_up(dtype, {M, 2 * F}, random_normal(static_cast<size_t>(M * 2 * F), 3)),
          dout(dtype, {M, F}, random_normal(static_cast<size_t>(M * F))),
          out(dtype, {M, F}),
          dgate_up(dtype, {M, 2 * F}) {}

    void forward(Stream& stream) const {
        swiglu_forward(stream, {.out = out, .gate_up = gate_up, .clamped = clamped});
    }
    void backward(Stream& stream, Tensor out_again = {}) const {
        swiglu_backward(stream, {.dgate_up = dgate_up,
                                 .dout = dout,
                                 .gate_up = gate_up,
                                 .out = out_again,
                                 .clamped = clamped});
    }
    template <class Real>
    SwigluReference reference() const {
        const DType stored = std::is_same_v<Real, float> ? dout.tensor().dtype : DType::fp32;
        return swiglu_reference<Real>(F, gate_up.values(), dout.values(), stored, clamped);
    }
};

/// gpt-oss's numbers, or others that clamp more of the operands.
ClampedSwiglu random_clamp() {
    if (random_int(0, 1)) return {};
    return {.alpha = static_cast<float>(random_int(20, 300)) / 100,
            .limit = static_cast<float>(random_int(10, 500)) / 100};
}

/// Any shape, both passes.
void check_shapes(const std::function<std::optional<ClampedSwiglu>()>& form) {
    Accuracy accuracy;
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t F :
             {int64_t{1}, int64_t{7}, int64_t{8}, int64_t{40}, int64_t{1024}, int64_t{2056},
              int64_t{8 * random_int(1, 60)}, random_int(2, 500)}) {
            const TestedSwiglu p(dtype, random_int(1, F > 1000 ? 5 : 30), F, form());
            CAPTURE(p.M, p.F, name_of(dtype));
            const ClampedSwiglu numbers = p.clamped.value_or(ClampedSwiglu{});
            CAPTURE(p.clamped.has_value(), numbers.alpha, numbers.limit);
            TestStream stream;
            p.forward(stream);
            p.backward(stream);
            const SwigluReference exact = p.reference<double>(), plain = p.reference<float>();
            accuracy.check("out", dtype, p.out.values(), plain.out, exact.out);
            accuracy.check("dgate_up", dtype, p.dgate_up.values(), plain.dgate_up, exact.dgate_up);
        }
}

}  // namespace

TEST_CASE("swiglu matches float64 for any shape, both passes", "[cuda]") {
    ON_EACH_DEVICE();
    check_shapes([] { return std::optional<ClampedSwiglu>(); });
}

TEST_CASE("clamped swiglu matches float64 for any shape, both passes", "[cuda]") {
    ON_EACH_DEVICE();
    check_shapes([] { return std::optional(random_clamp()); });
}

TEST_CASE("clamped swiglu's gradient passes up to the limits themselves, and not beyond them",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        // Few digits, so that bf16 holds the limit; not 1, where a clamped up makes dgate 0.
        const float limit = static_cast<float>(2 * random_int(1, 30) + 1) / 8,
                    step = dtype == DType::bf16 ? 0x1p-7f : 0x1p-23f, above = limit * (1 + step),
                    inside = limit / 2;
        const std::vector<std::pair<float, float>> gates_and_ups{
            {limit, inside}, {above, inside},  {1e30f, inside},  {inside, limit},
            {inside, above}, {inside, -limit}, {inside, -above}, {inside, -1e30f},
            {-1e30f, 1},     {-above, inside}, {above, above},   {limit, -limit}};
        const auto F = static_cast<int64_t>(gates_and_ups.size());
        TestedSwiglu p(dtype, 1, F, ClampedSwiglu{.alpha = random_clamp().alpha, .limit = limit});
        const size_t n = gates_and_ups.size();
        for (size_t i = 0; i < n; ++i) {
            p.gate_up.set(i, gates_and_ups[i].first);
            p.gate_up.set(n + i, gates_and_ups[i].second);
            p.dout.set(i, 1);
        }
        TestStream stream;
        p.forward(stream);
        p.backward(stream);
        const SwigluReference exact = p.reference<double>();
        const double alpha = p.clamped->alpha;
        for (size_t i = 0; i < n; ++i) {
            const double gate = p.gate_up[i], up = p.gate_up[n + i];
            CAPTURE(name_of(dtype), gate, up, limit, alpha);
            if (gate > -1e20) {
                CHECK((p.dgate_up[i] == 0) == (gate > limit));
                CHECK((p.dgate_up[n + i] == 0) == (std::abs(up) > limit));
            }
            for (const auto& [ours, reference] : {std::pair{p.out[i], exact.out[i]},
                                                  {p.dgate_up[i], exact.dgate_up[i]},
                                                  {p.dgate_up[n + i], exact.dgate_up[n + i]}})
                CHECK(std::abs(ours - reference) <=
                      (dtype == DType::bf16 ? 0x1p-8 : 0x1p-22) * std::abs(reference) + 0x1p-20);
        }
    }
}

TEST_CASE("the gradient of clamped swiglu is the slope of its output") {
    // In float64: the kernels' gradients are compared with it above.
    const ClampedSwiglu form = random_clamp();
    const size_t n = 300;
    constexpr double h = 1e-5;
    std::vector<double> gate_up;
    for (const float x : random_normal(2 * n, 4)) {
        // Not so near to a limit that both sides of it count.
        const double away = std::abs(std::abs(double{x}) - double{form.limit});
        gate_up.push_back(away < 10 * h ? double{x} + 20 * h : double{x});
    }
    const std::vector<double> dout(n, 1.0);
    const auto F = static_cast<int64_t>(n);
    const auto gradient = swiglu_reference<double>(F, gate_up, dout, DType::fp32, form).dgate_up;
    for (size_t i = 0; i < 2 * n; ++i) {
        const auto out_at = [&](double change) {
            std::vector<double> moved = gate_up;
            moved[i] += change;
            return swiglu_reference<double>(F, moved, {}, DType::fp32, form).out[i % n];
        };
        CAPTURE(i, gate_up[i], form.alpha, form.limit);
        CHECK(std::abs((out_at(h) - out_at(-h)) / (2 * h) - gradient[i]) <=
              1e-8 * (1 + std::abs(gate_up[(i + n) % (2 * n)])));
    }
}

TEST_CASE("swiglu's backward pass gives the forward pass's output once more", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t F : {8 * random_int(1, 300), 2 * random_int(1, 300) + 1}) {
            const auto form =
                random_int(0, 1) ? std::optional(random_clamp()) : std::optional<ClampedSwiglu>();
            const TestedSwiglu p(dtype, random_int(1, 9), F, form);
            CAPTURE(p.M, p.F, name_of(dtype));
            const Buffer again(dtype, {p.M, F}), gradient(dtype, {p.M, 2 * F});
            TestStream stream;
            p.forward(stream);
            p.backward(stream);
            swiglu_backward(stream, {.dgate_up = gradient,
                                     .dout = p.dout,
                                     .gate_up = p.gate_up,
                                     .out = again,
                                     .clamped = form});
            CHECK((again.bytes() == p.out.bytes()));
            CHECK((gradient.bytes() == p.dgate_up.bytes()));

            // Both in place.
            swiglu_backward(stream, {.dgate_up = p.gate_up,
                                     .dout = p.dout,
                                     .gate_up = p.gate_up,
                                     .out = p.dout,
                                     .clamped = form});
            CHECK((p.gate_up.bytes() == gradient.bytes()));
            CHECK((p.dout.bytes() == again.bytes()));
        }
}

TEST_CASE("swiglu touches no row beyond the count of rows that the device knows", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t F : {int64_t{5}, int64_t{64}, random_int(1, 1500)}) {
            TestedSwiglu p(dtype, random_int(1, 40), F);
            const int64_t rows = random_int(0, p.M);
            CAPTURE(name_of(dtype), p.M, F, rows);
            SharedArray<int32_t> count(1);
            count.values()[0] = static_cast<int32_t>(rows);
            const Tensor row_count(count.data(), DType::int32, {1});
            TestStream stream;
            p.forward(stream);
            p.backward(stream);
            Buffer out(dtype, {p.M, F}), again(dtype, {p.M, F}), dgate_up(dtype, {p.M, 2 * F});
            for (int64_t i = 0; i < p.M * F; ++i) out.set(i, 7), again.set(i, 7);
            for (int64_t i = 0; i < p.M * 2 * F; ++i) dgate_up.set(i, 7);
            swiglu_forward(stream, {.out = out, .gate_up = p.gate_up, .row_count = row_count});
            swiglu_backward(stream, {.dgate_up = dgate_up,
                                     .dout = p.dout,
                                     .gate_up = p.gate_up,
                                     .out = again,
                                     .row_count = row_count});
            const auto expected = [&](const Buffer& of) {
                std::vector<double> values = of.values();
                std::fill(values.begin() + rows * of.tensor().cols(), values.end(), 7);
                return values;
            };
            CHECK(out.values() == expected(p.out));
            CHECK(again.values() == expected(p.out));
            CHECK(dgate_up.values() == expected(p.dgate_up));
        }
}

TEST_CASE("swiglu takes tensors that begin at any element and writes nothing next to them",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const int64_t M = random_int(1, 5), F = 8 * random_int(1, 20);
        const TestedSwiglu expected(dtype, M, F);
        const auto shifted = [&](const Buffer& memory, int64_t columns) {
            return Tensor(static_cast<char*>(memory.tensor().data) + size_of(dtype), dtype,
                          {M, columns});
        };
        Buffer gate_up(dtype, {M * 2 * F + 1}), dout(dtype, {M * F + 1});
        for (size_t i = 0; i < static_cast<size_t>(M * 2 * F); ++i)
            gate_up.set(i + 1, static_cast<float>(expected.gate_up[i]));
        for (size_t i = 0; i < static_cast<size_t>(M * F); ++i)
            dout.set(i + 1, static_cast<float>(expected.dout[i]));
        const Buffer out(dtype, {M * F + 1}), dgate_up(dtype, {M * 2 * F + 1});
        TestStream stream;
        expected.forward(stream);
        expected.backward(stream);
        swiglu_forward(stream, {.out = shifted(out, F), .gate_up = shifted(gate_up, 2 * F)});
        swiglu_backward(stream, {.dgate_up = shifted(dgate_up, 2 * F),
                                 .dout = shifted(dout, F),
                                 .gate_up = shifted(gate_up, 2 * F)});
        CHECK((out.bytes().substr(size_of(dtype)) == expected.out.bytes()));
        CHECK((dgate_up.bytes().substr(size_of(dtype)) == expected.dgate_up.bytes()));
        CHECK(std::isnan(out[0]));
        CHECK(std::isnan(dgate_up[0]));
    }
}

TEST_CASE("swiglu is exact where silu bends and finite for gates of every size", "[cuda]") {
    ON_EACH_DEVICE();
    std::vector<float> gates = random_normal(2000, 30);
    for (float x : random_normal(500)) gates.push_back(std::exp(8 * x));
    for (float x : random_normal(500)) gates.push_back(-std::exp(8 * x));
    for (float x : {0.0f, -0.0f, 1e-40f, 86.9f, 87.1f, 88.5f, -86.9f, -87.1f, -88.5f, -104.0f,
                    1e30f, -1e30f, -1.2784645f, 2.3993573f})
        gates.push_back(x);
    const auto F = static_cast<int64_t>(gates.size());
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        TestedSwiglu p(dtype, 1, F);
        for (size_t i = 0; i < gates.size(); ++i) {
            p.gate_up.set(i, gates[i]);
            p.gate_up.set(i + gates.size(), 1);
            p.dout.set(i, 1);
        }
        TestStream stream;
        p.forward(stream);
        p.backward(stream);
        const double rounding = dtype == DType::bf16 ? 0x1p-8 : 0x1p-23;
        double value = 0, slope = 0;
        for (size_t i = 0; i < gates.size(); ++i) {
            const double x = p.gate_up[i], sigma = 1 / (1 + std::exp(-x)),
                         derivative = sigma + x * sigma / (1 + std::exp(x));
            value = worse(value, std::abs(p.out[i] - x * sigma) /
                                     (3e-7 * std::abs(x) + rounding * std::abs(x * sigma) + 1e-35));
            slope = worse(slope, std::abs(p.dgate_up[i] - derivative) /
                                     (1e-6 + rounding * std::abs(derivative)));
        }
        CAPTURE(name_of(dtype));
        CHECK(value <= 1);
        CHECK(slope <= 1);
        const Values gradients = p.dgate_up.values();
        CHECK(std::equal(gradients.begin() + F, gradients.end(), p.out.values().begin()));
    }
}

TEST_CASE("swiglu keeps a NaN of the gate", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const auto& form : {std::optional<ClampedSwiglu>(), std::optional(random_clamp())}) {
            TestedSwiglu p(dtype, 1, 8, form);
            p.gate_up.set(3, std::numeric_limits<float>::quiet_NaN());
            TestStream stream;
            p.forward(stream);
            p.backward(stream);
            for (size_t i = 0; i < 8; ++i) {
                CHECK(std::isnan(p.out[i]) == (i == 3));
                CHECK(std::isnan(p.dgate_up[i]) == (i == 3));
                if (!form) CHECK(std::isnan(p.dgate_up[8 + i]) == (i == 3));
            }
        }
}

TEST_CASE("swiglu gives the same bits whatever the number of threads, and in every run", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const auto form =
            random_int(0, 1) ? std::optional(random_clamp()) : std::optional<ClampedSwiglu>();
        const TestedSwiglu p(dtype, random_int(1, 20), random_int(1, 3000));
        check_thread_independence([&] {
            const Buffer out(dtype, {p.M, p.F}), gradient(dtype, {p.M, 2 * p.F});
            TestStream stream;
            swiglu_forward(stream, {.out = out, .gate_up = p.gate_up, .clamped = form});
            swiglu_backward(
                stream,
                {.dgate_up = gradient, .dout = p.dout, .gate_up = p.gate_up, .clamped = form});
            return out.bytes() + gradient.bytes();
        });
    }
}

}  // namespace train_gpt
