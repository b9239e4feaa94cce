#include "kernels/relu_squared.h"

#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// Random operands of n elements, which begin at the element `shift`, and room for the results. The
/// elements around the results stay as they are.
struct TestedReluSquared {
    DType dtype;
    int64_t n, shift;
    Buffer x, dout, out, dx;

    TestedReluSquared(DType dtype_, int64_t n_, int64_t shift_ = 0)
        : dtype(dtype_),
          n(n_),
          shift(shift_),
          x(dtype, {n + 2}, random_normal(static_cast<size_t>(n) + 2, 2)),
          dout(dtype, {n + 2}, random_normal(static_cast<size_t>(n) + 2)),
          out(dtype, {n + 2}),
          dx(dtype, {n + 2}) {}

    Tensor view(const Buffer& memory) const {
        return memory.tensor().reshaped({n + 2, 1}).row_range(shift, n);
    }
    void forward(Stream& stream) const {
        relu_squared_forward(stream, {.out = view(out), .x = view(x)});
    }
    void backward(Stream& stream, const Buffer* again = nullptr) const {
        relu_squared_backward(stream, {.dx = view(dx),
                                       .dout = view(dout),
                                       .x = view(x),
                                       .out = again ? view(*again) : Tensor{}});
    }
};

double rounding(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 0x1p-23; }

}  // namespace

TEST_CASE("relu squared and its gradient are float64's, rounded once, for any number of elements",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t n :
             {int64_t{1}, int64_t{7}, int64_t{16}, int64_t{33}, int64_t{8193}, random_int(2, 5000)})
            for (const int64_t shift : {0, 1}) {
                const TestedReluSquared p(dtype, n, shift);
                CAPTURE(name_of(dtype), n, shift);
                TestStream stream;
                p.forward(stream);
                p.backward(stream);
                double worst = 0;
                for (int64_t k = 0; k < n; ++k) {
                    const auto i = static_cast<size_t>(k + shift);
                    const double positive = std::max(p.x[i], 0.0),
                                 gradient = p.dout[i] * 2 * positive;
                    worst = worse(worst, std::abs(p.out[i] - positive * positive) -
                                             rounding(dtype) * positive * positive);
                    worst = worse(
                        worst, std::abs(p.dx[i] - gradient) - rounding(dtype) * std::abs(gradient));
                }
                CHECK(worst <= 0);
                for (const Buffer* result : {&p.out, &p.dx})
                    for (int64_t k = 0; k < n + 2; ++k)
                        if (k < shift || k >= shift + n)
                            CHECK(std::isnan((*result)[static_cast<size_t>(k)]));
            }
}

TEST_CASE("relu squared's backward pass gives the forward pass's output once more", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const TestedReluSquared p(dtype, random_int(1, 9000));
        CAPTURE(name_of(dtype), p.n);
        const Buffer again(dtype, {p.n + 2});
        TestStream stream;
        p.forward(stream);
        p.backward(stream, &again);
        CHECK((again.bytes() == p.out.bytes()));
        // The gradient may overwrite its input, and the output its own.
        relu_squared_backward(
            stream,
            {.dx = p.view(p.dout), .dout = p.view(p.dout), .x = p.view(p.x), .out = p.view(p.x)});
        for (int64_t k = 0; k < p.n; ++k) {
            const auto i = static_cast<size_t>(k);
            REQUIRE(p.dout[i] == p.dx[i]);
            REQUIRE(p.x[i] == p.out[i]);
        }
    }
}

TEST_CASE("relu squared keeps a NaN, and its gradient too", "[cuda]") {
    ON_EACH_DEVICE();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        TestedReluSquared p(dtype, 20);
        p.x.set(3, nan);
        p.dout.set(5, nan);
        p.x.set(5, 1.0f);
        TestStream stream;
        p.forward(stream);
        p.backward(stream);
        for (size_t i = 0; i < 20; ++i) {
            CHECK(std::isnan(p.out[i]) == (i == 3));
            CHECK(std::isnan(p.dx[i]) == (i == 3 || i == 5));
        }
    }
}

}  // namespace train_gpt
