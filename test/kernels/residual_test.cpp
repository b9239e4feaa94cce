#include "kernels/residual.h"

#include "kernels/norm.h"
#include "test/kernels/kernel_test.h"

namespace train_gpt {

TEST_CASE("residual_add makes the sum that a norm makes, to the bit", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const bool with_bias : {false, true}) {
            const int64_t M = random_int(1, 20),
                          C = random_int(0, 1) ? 8 * random_int(1, 60) : random_int(2, 500);
            CAPTURE(M, C, name_of(dtype), with_bias);
            const auto random = [](int64_t n) { return random_normal(static_cast<size_t>(n), 3); };
            const Buffer x(dtype, {M, C}, random(M * C)), residual(dtype, {M, C}, random(M * C)),
                bias(dtype, {C}, random(C)), w(dtype, {C}, random(C)), sum(dtype, {M, C}),
                wanted(dtype, {M, C}), normed(dtype, {M, C});
            TestStream stream;
            const Tensor added = with_bias ? bias.tensor() : Tensor{};
            norm_forward(stream, {.norm = Norm::rms,
                                  .out = normed,
                                  .stats = {},
                                  .x = x,
                                  .w = w,
                                  .residual = residual,
                                  .bias = added,
                                  .x_out = wanted});
            residual_add(stream, {.out = sum, .x = x, .residual = residual, .bias = added});
            CHECK(sum.values() == wanted.values());
            // In place of either operand
            residual_add(stream, {.out = residual, .x = x, .residual = residual, .bias = added});
            CHECK(residual.values() == wanted.values());
        }
}

}  // namespace train_gpt
