// Rounding to fp8, against the list of all numbers of a format.
#include "kernels/fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "kernels/fp8_math.h"
#include "test/kernels/fp8_reference.h"
#include "test/kernels/kernel_test.h"

using namespace train_gpt;
using namespace train_gpt::fp8_reference;

namespace {

constexpr std::array formats = {Fp8Format::e4m3, Fp8Format::e5m2};

float random_number() {
    const float infinity = std::numeric_limits<float>::infinity();
    switch (random_int(0, 9)) {
        case 0:
            return std::array{0.0f,
                              -0.0f,
                              infinity,
                              -infinity,
                              std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::max(),
                              0x1p-149f,
                              -0x1p-126f}[static_cast<size_t>(random_int(0, 7))];
        case 1:  // any bits at all
            return std::bit_cast<float>(static_cast<uint32_t>(test_rng()()));
        default:  // around the numbers of both formats, on and beside the middles between them
            return std::ldexp(static_cast<float>(random_int(-64, 64)),
                              static_cast<int>(random_int(-24, 14))) *
                   (1 + static_cast<float>(random_int(-1, 1)) * 0x1p-23f);
    }
}

/// A random number or other times a tensor's usual contents.
std::vector<float> random_contents(size_t n, bool any) {
    std::vector<float> values =
        random_normal(n, std::ldexp(1.0f, static_cast<int>(random_int(-20, 20))));
    for (float& value : values)
        if (any) value = random_number();
    return values;
}

struct Fp8Case {
    int64_t rows, cols;
    DType dtype;
    Fp8Format format;
};

/// GPUs have other code for multiples of 16.
int64_t random_size() { return random_int(0, 1) ? 16 * random_int(1, 12) : random_int(1, 200); }

Fp8Case random_case() {
    return {random_size(), random_size(), random_int(0, 1) ? DType::bf16 : DType::fp32,
            formats[static_cast<size_t>(random_int(0, 1))]};
}

struct Result {
    std::string codes, transposed;
    float inverse, amax;
};

Result round(const Fp8Case& c, const Buffer& x, const float* scale, float amax_before,
             bool is_set = false) {
    Buffer codes(DType::uint8, {c.rows, c.cols}), transposed(DType::uint8, {c.cols, c.rows}),
        inverse(DType::fp32, {1}), amax(DType::fp32, {1}, {amax_before}),
        given(DType::fp32, {1}, {scale ? *scale : 0});
    TestStream stream(fp8_round_scratch_bytes(planning({})));
    fp8_round(stream, {.codes = codes,
                       .transposed = transposed,
                       .inverse = inverse.as<float>(),
                       .x = x,
                       .format = c.format,
                       .scaling = {.scale = scale ? given.as<float>() : nullptr,
                                   .amax = amax.as<float>(),
                                   .is_set = is_set}});
    return {codes.bytes(), transposed.bytes(), static_cast<float>(inverse[0]),
            static_cast<float>(amax[0])};
}

}  // namespace

TEST_CASE("fp8 codes are the nearest of a format's numbers, with ties to even", "[fp8]") {
    for (const Fp8Format format : formats)
        for (int i = 0; i < 20000; ++i) {
            const float value = random_number();
            const uint8_t code =
                format == Fp8Format::e4m3 ? fp8_code<E4M3>(value) : fp8_code<E5M2>(value);
            CAPTURE(name_of(format), value);
            REQUIRE(int{code} == int{nearest_code(format, value)});
            const float number =
                format == Fp8Format::e4m3 ? fp8_value<E4M3>(code) : fp8_value<E5M2>(code);
            const float rounded =
                format == Fp8Format::e4m3 ? fp8_rounded<E4M3>(value) : fp8_rounded<E5M2>(value);
            REQUIRE(std::bit_cast<uint32_t>(rounded) == std::bit_cast<uint32_t>(number));
            const bool same = number == number_of(format, code) ||
                              (std::isnan(number) && std::isnan(number_of(format, code)));
            REQUIRE(same);
        }
}

TEST_CASE("fp8_round rounds a tensor and its transpose with the scale it is given", "[fp8][cuda]") {
    ON_EACH_DEVICE();
    for (int i = 0; i < 12; ++i) {
        const Fp8Case c = random_case();
        CAPTURE(c.rows, c.cols, name_of(c.dtype), fp8_reference::name_of(c.format));
        const Buffer x(c.dtype, {c.rows, c.cols},
                       random_contents(static_cast<size_t>(c.rows * c.cols), i % 2 == 0));
        const float scale = std::ldexp(1.0f + static_cast<float>(random_int(0, 99)) / 100,
                                       static_cast<int>(random_int(-8, 8)));
        const Result result = round(c, x, &scale, 0.5f, random_int(0, 1) == 1);
        CHECK(result.inverse == 1 / scale);
        float amax = 0.5f;
        size_t wrong = 0;
        for (int64_t r = 0; r < c.rows; ++r)
            for (int64_t k = 0; k < c.cols; ++k) {
                const auto value = static_cast<float>(x[static_cast<size_t>(r * c.cols + k)]);
                amax = std::isnan(value) ? std::numeric_limits<float>::infinity()
                                         : std::max(amax, std::abs(value));
                const auto expected =
                    static_cast<char>(nearest_code(c.format, scaled(value, scale)));
                wrong += result.codes[static_cast<size_t>(r * c.cols + k)] != expected;
                wrong += result.transposed[static_cast<size_t>(k * c.rows + r)] != expected;
            }
        CHECK(wrong == 0);
        CHECK(result.amax == amax);
    }
}

TEST_CASE("a finite number that a scale makes too large for fp32 becomes the largest number",
          "[fp8][cuda]") {
    ON_EACH_DEVICE();
    const float scale = 0x1p55f, most = 0x1p75f;
    for (const Fp8Format format : formats)
        for (const DType dtype : {DType::fp32, DType::bf16})
            for (const int64_t cols : {1, 7, 48}) {  // alone, and in pairs
                const Fp8Case c{16, cols, dtype, format};
                CAPTURE(name_of(format), train_gpt::name_of(dtype), cols);
                std::vector<float> contents;
                for (int64_t i = 0; i < c.rows * cols; ++i)
                    contents.push_back(
                        std::array{most, -most, 0x1p72f, 0x1p-50f,
                                   -0.0f}[static_cast<size_t>(i == 0 ? 0 : random_int(0, 4))]);
                const Buffer x(dtype, {c.rows, cols}, contents);
                const Result result = round(c, x, &scale, 0, random_int(0, 1) == 1);
                CHECK(result.amax == most);
                size_t wrong = 0;
                for (int64_t r = 0; r < c.rows; ++r)
                    for (int64_t k = 0; k < cols; ++k) {
                        const auto value = contents[static_cast<size_t>(r * cols + k)];
                        const auto expected =
                            static_cast<char>(nearest_code(format, scaled(value, scale)));
                        wrong += result.codes[static_cast<size_t>(r * cols + k)] != expected;
                        wrong += result.transposed[static_cast<size_t>(k * c.rows + r)] != expected;
                    }
                CHECK(wrong == 0);
                CHECK(number_of(format, static_cast<uint8_t>(result.codes[0])) ==
                      largest_number(format));
                if (test_device().is_cuda()) continue;
                // The numbers of the codes instead of codes
                const Buffer numbers(dtype, {c.rows, cols}), inverse(DType::fp32, {1});
                TestStream stream;
                fp8_round(stream, {.codes = numbers,
                                   .inverse = inverse.as<float>(),
                                   .x = x,
                                   .format = format,
                                   .scaling = {.scale = &scale}});
                for (size_t i = 0; i < result.codes.size(); ++i)
                    CHECK(numbers[i] == number_of(format, static_cast<uint8_t>(result.codes[i])));
            }
}

TEST_CASE("without a scale fp8_round brings a tensor's largest magnitude to the largest number",
          "[fp8][cuda]") {
    ON_EACH_DEVICE();
    for (int i = 0; i < 12; ++i) {
        const Fp8Case c = random_case();
        CAPTURE(c.rows, c.cols, train_gpt::name_of(c.dtype), fp8_reference::name_of(c.format));
        const Buffer x(c.dtype, {c.rows, c.cols},
                       random_contents(static_cast<size_t>(c.rows * c.cols), false));
        float largest = 0;
        for (const double value : x.values())
            largest = std::max(largest, static_cast<float>(std::abs(value)));
        const float zero = 0, scale = largest_number(c.format) / std::max(largest, 1e-12f);
        // A scale of 0 is none.
        const Result result = round(c, x, i % 2 ? &zero : nullptr, 0);
        CHECK(result.inverse == 1 / scale);
        CHECK(result.amax == largest);
        size_t wrong = 0, at_the_end = 0;
        for (size_t k = 0; k < result.codes.size(); ++k) {
            const uint8_t expected = nearest_code(c.format, static_cast<float>(x[k]) * scale);
            wrong += static_cast<uint8_t>(result.codes[k]) != expected;
            at_the_end += std::abs(number_of(c.format, expected)) == largest_number(c.format);
        }
        CHECK(wrong == 0);
        CHECK(at_the_end > 0);
    }
}

TEST_CASE("fp8_round reads and writes only the rows that there are", "[fp8][cuda]") {
    ON_EACH_DEVICE();
    for (int i = 0; i < 8; ++i) {
        const Fp8Case c = random_case();
        const int64_t rows = random_int(0, c.rows);
        CAPTURE(c.rows, rows, c.cols, train_gpt::name_of(c.dtype), name_of(c.format));
        std::vector<float> contents = random_contents(static_cast<size_t>(c.rows * c.cols), false);
        std::fill(contents.begin() + rows * c.cols, contents.end(),
                  std::numeric_limits<float>::quiet_NaN());
        const Buffer x(c.dtype, {c.rows, c.cols}, contents);
        SharedArray<int32_t> count(1);
        count.data()[0] = static_cast<int32_t>(rows);
        Buffer codes(DType::uint8, {c.rows, c.cols}), inverse(DType::fp32, {1}),
            amax(DType::fp32, {1}, {0});
        TestStream stream(fp8_round_scratch_bytes(planning({})));
        fp8_round(stream, {.codes = codes,
                           .inverse = inverse.as<float>(),
                           .x = x,
                           .format = c.format,
                           .scaling = {.amax = amax.as<float>()},
                           .row_count = Tensor(count.data(), DType::int32, {1})});
        float largest = 0;
        for (int64_t k = 0; k < rows * c.cols; ++k)
            largest = std::max(largest, static_cast<float>(std::abs(x[static_cast<size_t>(k)])));
        const float scale = largest_number(c.format) / std::max(largest, 1e-12f);
        CHECK(amax[0] == largest);
        CHECK(inverse[0] == 1 / scale);
        const std::string found = codes.bytes();
        size_t wrong = 0;
        for (size_t k = 0; k < found.size(); ++k) {
            const bool is_there = static_cast<int64_t>(k) < rows * c.cols;
            const uint8_t expected =
                is_there ? nearest_code(c.format, static_cast<float>(x[k]) * scale) : 0xff;
            wrong += static_cast<uint8_t>(found[k]) != expected;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("fp8_update takes the largest magnitude of the last steps, and says what saturated",
          "[fp8][cuda]") {
    ON_EACH_DEVICE();
    const int64_t n = random_int(4, 400), e4m3_count = random_int(0, n), H = random_int(1, 9);
    CAPTURE(n, e4m3_count, H);
    const auto floats = [](int64_t size) { return std::vector<float>(static_cast<size_t>(size)); };
    Buffer history(DType::fp32, {H, n}), scale(DType::fp32, {n}, floats(n)),
        amax(DType::fp32, {n}, floats(n));
    TestMemory found_memory(sizeof(Fp8Found)), state_memory(sizeof(StepState));
    auto& found = *new (found_memory.data()) Fp8Found;
    auto& state = *new (state_memory.data()) StepState;
    TestStream stream;
    std::deque<std::vector<float>> taken;
    int64_t steps = 0;
    for (int64_t step = 0; step < 25 + H; ++step) {
        CAPTURE(step);
        // Some operands are 0 for longer than the history.
        const bool idle = step >= 8 && step < 12 + H;
        int32_t saturated = 0, not_finite = -1, unset = 0;
        std::vector<float> now = floats(n);
        const std::vector<double> scales = scale.values();
        for (int64_t i = 0; i < n; ++i) {
            const auto at = static_cast<size_t>(i);
            const float largest = i < e4m3_count ? 448.0f : 57344.0f;
            now[at] = std::abs(random_normal(1, 3.0f)[0]);
            if (random_int(0, 9) == 0) now[at] = 0;
            if (!idle && step % 7 == 6 && random_int(0, 99) == 0)
                now[at] = std::numeric_limits<float>::infinity();
            if (scales[at] > 0 && random_int(0, 9) == 0)  // exactly at the end is not beyond it
                now[at] = largest / static_cast<float>(scales[at]);
            if (i % 3 == 0 && (idle || i % 2 == 0)) now[at] = 0;  // every sixth always
            amax.set(at, now[at]);
            if (std::isinf(now[at]) && not_finite < 0) not_finite = static_cast<int32_t>(i);
            saturated += scales[at] > 0 && std::isfinite(now[at]) &&
                         now[at] * scales[at] > largest * (1 + 0x1p-20);
        }
        state = {};
        const int64_t kind = not_finite >= 0 ? 1 : idle ? 0 : random_int(0, 6);
        if (kind == 1) state.stop = 1;
        if (kind == 2) state.skip = 1;
        if (kind == 3) state.overflow = 1;
        fp8_update(stream,
                   {.history = history.as<float>(),
                    .scale = scale.as<float>(),
                    .amax = amax.as<float>(),
                    .found = &found,
                    .H = H,
                    .n = n,
                    .e4m3_count = e4m3_count},
                   &state);
        found_memory.settle();
        CHECK(found.saturated == saturated);
        CHECK(found.not_finite == not_finite);
        if (kind == 1 || kind == 2 || kind == 3) {
            CHECK(found.steps == steps);
            CHECK(scale.values() == scales);
            continue;
        }
        CHECK(found.steps == ++steps);
        taken.push_back(now);
        std::vector<float> before = floats(n);
        if (std::ssize(taken) > H) {
            before = taken.front();
            taken.pop_front();
        }
        size_t wrong = 0;
        for (int64_t i = 0; i < n; ++i) {
            float most = 0;
            for (const auto& row : taken) most = std::max(most, row[static_cast<size_t>(i)]);
            const float largest = i < e4m3_count ? 448.0f : 57344.0f;
            // What was before H zeros counts as the step's.
            if (most == 0)
                most = taken.back()[static_cast<size_t>(i)] = before[static_cast<size_t>(i)];
            const float expected = most > 0 ? largest / std::max(most, 1e-12f) : 0;
            wrong += static_cast<float>(scale[static_cast<size_t>(i)]) != expected;
            unset += most == 0;
        }
        CHECK(wrong == 0);
        CHECK(found.unset == unset);
    }
}
