#include "kernels/swiglu.h"

#include <algorithm>

#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// M rows of random operands, and room for the results.
struct Problem {
    int64_t M, F;
    Buffer gate_up, dout, out, dgate_up;

    Problem(DType dtype, int64_t M_, int64_t F_)
        : M(M_),
          F(F_),
          gate_up(dtype, {M, 2 * F}, random_normal(static_cast<size_t>(M * 2 * F), 3)),
          dout(dtype, {M, F}, random_normal(static_cast<size_t>(M * F))),
          out(dtype, {M, F}),
          dgate_up(dtype, {M, 2 * F}) {}

    void forward(Stream& stream) const { swiglu_forward(stream, {.out = out, .gate_up = gate_up}); }
    void backward(Stream& stream, Tensor out_again = {}) const {
        swiglu_backward(stream,
                        {.dgate_up = dgate_up, .dout = dout, .gate_up = gate_up, .out = out_again});
    }
    template <class Real>
    SwigluReference reference() const {
        const DType stored = std::is_same_v<Real, float> ? dout.tensor().dtype : DType::fp32;
        return swiglu_reference<Real>(F, gate_up.values(), dout.values(), stored);
    }
};

}  // namespace

TEST_CASE("swiglu matches float64 for any shape, both passes", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t F :
             {int64_t{1}, int64_t{7}, int64_t{8}, int64_t{40}, int64_t{1024}, int64_t{2056},
              int64_t{8 * random_int(1, 60)}, random_int(2, 500)}) {
            const Problem p(dtype, random_int(1, F > 1000 ? 5 : 30), F);
            CAPTURE(p.M, p.F, name_of(dtype));
            TestStream stream;
            p.forward(stream);
            p.backward(stream);
            const SwigluReference exact = p.reference<double>(), plain = p.reference<float>();
            accuracy.check("out", dtype, p.out.values(), plain.out, exact.out);
            accuracy.check("dgate_up", dtype, p.dgate_up.values(), plain.dgate_up, exact.dgate_up);
        }
}

TEST_CASE("swiglu's backward pass gives the forward pass's output once more", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t F : {8 * random_int(1, 300), 2 * random_int(1, 300) + 1}) {
            const Problem p(dtype, random_int(1, 9), F);
            CAPTURE(p.M, p.F, name_of(dtype));
            const Buffer again(dtype, {p.M, F}), gradient(dtype, {p.M, 2 * F});
            TestStream stream;
            p.forward(stream);
            p.backward(stream);
            swiglu_backward(
                stream, {.dgate_up = gradient, .dout = p.dout, .gate_up = p.gate_up, .out = again});
            CHECK((again.bytes() == p.out.bytes()));
            CHECK((gradient.bytes() == p.dgate_up.bytes()));

            // Both in place.
            swiglu_backward(
                stream,
                {.dgate_up = p.gate_up, .dout = p.dout, .gate_up = p.gate_up, .out = p.dout});
            CHECK((p.gate_up.bytes() == gradient.bytes()));
            CHECK((p.dout.bytes() == again.bytes()));
        }
}

TEST_CASE("swiglu takes tensors that begin at any element and writes nothing next to them",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const int64_t M = random_int(1, 5), F = 8 * random_int(1, 20);
        const Problem expected(dtype, M, F);
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
        Problem p(dtype, 1, F);
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
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        Problem p(dtype, 1, 8);
        p.gate_up.set(3, std::numeric_limits<float>::quiet_NaN());
        TestStream stream;
        p.forward(stream);
        p.backward(stream);
        for (size_t i = 0; i < 8; ++i) {
            CHECK(std::isnan(p.out[i]) == (i == 3));
            CHECK(std::isnan(p.dgate_up[i]) == (i == 3));
            CHECK(std::isnan(p.dgate_up[8 + i]) == (i == 3));
        }
    }
}

TEST_CASE("swiglu gives the same bits whatever the number of threads, and in every run", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const Problem p(dtype, random_int(1, 20), random_int(1, 3000));
        check_thread_independence([&] {
            const Buffer out(dtype, {p.M, p.F}), gradient(dtype, {p.M, 2 * p.F});
            TestStream stream;
            swiglu_forward(stream, {.out = out, .gate_up = p.gate_up});
            swiglu_backward(stream, {.dgate_up = gradient, .dout = p.dout, .gate_up = p.gate_up});
            return out.bytes() + gradient.bytes();
        });
    }
}

}  // namespace train_gpt
