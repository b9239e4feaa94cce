#include "kernels/convert.h"

#include "test/kernels/kernel_test.h"

using namespace train_gpt;

TEST_CASE("conversions round to nearest, widen exactly and add in fp32", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 6; ++repeat) {
        const int64_t n = random_int(0, 5000);
        const size_t count = static_cast<size_t>(n);
        CAPTURE(n);
        const std::vector<float> values = random_normal(count, 3.0f), sums = random_normal(count);
        const Buffer wide(DType::fp32, {n + 1}),
            narrow(DType::bf16, {n + 1});  // one element more, which must not change
        for (size_t i = 0; i < count; ++i) wide.as<float>()[i] = values[i];
        TestStream stream;
        round_to_bf16(stream, narrow.as<bf16>(), wide.as<float>(), n);
        for (size_t i = 0; i < count; ++i) REQUIRE(narrow[i] == to_float(bf16(values[i])));
        CHECK(std::isnan(narrow[count]));

        for (const Buffer* from : {&wide, &narrow}) {
            const std::vector<double> elements = from->values();
            for (bool accumulate : {false, true}) {
                const Buffer to(DType::fp32, {n + 1});
                if (accumulate)
                    for (size_t i = 0; i < count; ++i) to.as<float>()[i] = sums[i];
                widen(stream, to.as<float>(), from->tensor().data, from->tensor().dtype, n,
                      accumulate);
                for (size_t i = 0; i < count; ++i) {
                    const float element = static_cast<float>(elements[i]);
                    REQUIRE(to[i] == (accumulate ? sums[i] + element : element));
                }
                CHECK(std::isnan(to[count]));
            }
        }
    }
}
