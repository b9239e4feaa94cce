#include "kernels/gelu.h"

#include "kernels/gelu_math.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// Values where GELU bends, where it is nearly 0 or x, and of every magnitude.
std::vector<float> interesting_values() {
    std::vector<float> values = random_normal(20000, 3.0f);
    for (float x : random_normal(2000)) values.push_back(std::exp(10 * x));
    for (float x : random_normal(2000)) values.push_back(-std::exp(10 * x));
    for (float x : {0.0f, -0.0f, 1e-40f, -1e-40f, 10.0f, -10.0f, 1e30f, -1e30f})
        values.push_back(x);
    return values;
}

}  // namespace

TEST_CASE("gelu in fp32 is within 1.5e-7 of |x|", "[cuda]") {
    ON_EACH_DEVICE();
    const std::vector<float> values = interesting_values();
    const Buffer x(DType::fp32, {static_cast<int64_t>(values.size())}, values);
    const Buffer out(DType::fp32, {static_cast<int64_t>(values.size())});
    TestStream stream;
    gelu_forward(stream, out, x);
    double worst = 0;
    bool finite = true;
    for (size_t i = 0; i < values.size(); ++i) {
        const double error = std::abs(out[i] - gelu_reference(x[i]));
        finite = finite && std::isfinite(out[i]);
        worst = worse(worst, error / std::max(std::abs(x[i]), 1e-37));
    }
    CHECK(finite);
    CHECK(worst < 1.5e-7);
}

TEST_CASE("gelu of every finite bf16 is rounded correctly up to the fp32 error", "[cuda]") {
    ON_EACH_DEVICE();
    std::vector<float> values;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float value = std::bit_cast<float>(bits << 16);
        if (std::isfinite(value)) values.push_back(value);
    }
    const Buffer x(DType::bf16, {static_cast<int64_t>(values.size())}, values);
    const Buffer out(DType::bf16, {static_cast<int64_t>(values.size())});
    TestStream stream;
    gelu_forward(stream, out, x);
    int wrong = 0;
    for (size_t i = 0; i < values.size(); ++i) {
        const double reference = gelu_reference(x[i]);
        const double bound = 0x1p-8 * std::abs(reference) + 2e-7 * std::abs(x[i]) + 1e-38;
        if (!(std::abs(out[i] - reference) <= bound)) ++wrong;
    }
    CHECK(wrong == 0);
}

TEST_CASE("gelu may overwrite its input, for any number of elements", "[cuda]") {
    ON_EACH_DEVICE();
    for (int64_t n : {1, 2, 15, 16, 17, 31, 33, 255, 1001, 8192, 8193}) {
        CAPTURE(n);
        for (DType dtype : {DType::fp32, DType::bf16}) {
            const std::vector<float> values = random_normal(static_cast<size_t>(n), 2.0f);
            const Buffer x(dtype, {n}, values), out(dtype, {n});
            TestStream stream;
            gelu_forward(stream, out, x);
            gelu_forward(stream, x, x);
            CHECK((x.bytes() == out.bytes()));
        }
    }
}

TEST_CASE("gelu takes tensors that begin at any element and writes nothing next to them",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const int64_t n = random_int(1, 5000);
        const std::vector<float> values = random_normal(static_cast<size_t>(n) + 2, 2.0f);
        for (int64_t shift : {0, 1}) {
            const Buffer x(dtype, {n + 2}, values), out(dtype, {n + 2});
            const auto view = [&](const Buffer& memory, int64_t first) {
                return memory.tensor().reshaped({n + 2, 1}).row_range(first, n);
            };
            TestStream stream;
            gelu_forward(stream, view(out, 1), view(x, shift));
            double worst = 0;
            for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
                const double input = x[i + static_cast<size_t>(shift)],
                             reference = gelu_reference(input);
                worst = worse(worst, std::abs(out[i + 1] - reference) / (std::abs(input) + 1e-30));
            }
            CAPTURE(n, shift, name_of(dtype));
            CHECK(worst <= (dtype == DType::bf16 ? 0x1p-8 : 2e-7));
            CHECK(std::isnan(out[0]));
            CHECK(std::isnan(out[static_cast<size_t>(n) + 1]));
        }
    }
}

TEST_CASE("gelu on the GPU agrees with the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const std::vector<float> values = random_normal(3000, 3.0f);
        const Buffer x(dtype, {3000}, values), ours(dtype, {3000}), expected(dtype, {3000});
        TestStream gpu;
        Stream cpu;
        gelu_forward(gpu, ours, x);
        gelu_forward(cpu, expected, x);
        double worst = 0;
        for (size_t i = 0; i < values.size(); ++i)
            worst = worse(worst, (std::abs(ours[i] - expected[i]) - 1e-6) / std::abs(expected[i]));
        CHECK(worst <= (dtype == DType::bf16 ? 0x1p-7 : 1e-6));
    }
}

TEST_CASE("gelu and its derivative keep a NaN") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::isnan(gelu(nan)));
    CHECK(std::isnan(gelu_derivative(nan)));
}

TEST_CASE(
    "the derivative of gelu is within 2.5e-7 of the exact one and matches its difference "
    "quotient") {
    double worst = 0, worst_quotient = 0;
    for (float x : interesting_values()) {
        const double reference =
            gelu_derivative_reference(std::clamp(static_cast<double>(x), -1e3, 1e3));
        worst = worse(worst, std::abs(gelu_derivative(x) - reference));
        if (!(std::isfinite(gelu_derivative(x)))) worst = INFINITY;
        if (std::abs(x) > 20) continue;
        const double step = 1e-5;
        const double quotient = (gelu_reference(x + step) - gelu_reference(x - step)) / (2 * step);
        worst_quotient = worse(worst_quotient, std::abs(gelu_derivative(x) - quotient));
    }
    CHECK(worst < 2.5e-7);
    CHECK(worst_quotient < 1e-6);
}

}  // namespace train_gpt
