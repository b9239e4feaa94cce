// Kernels that write their results in fp8: the bits of a separate cast, and no more bytes than
// needed. They are for GPUs.
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/fp8.h"
#include "kernels/fp8_math.h"
#include "kernels/gelu.h"
#include "kernels/norm.h"
#include "kernels/relu_squared.h"
#include "kernels/swiglu.h"
#include "test/kernels/kernel_test.h"
#include "test/parallel/ranks.h"

using namespace train_gpt;

namespace {

/// CastCodes [rows, cols] and their transpose, with everything that a cast writes.
struct CastCodes {
    Buffer codes, transposed, inverse, amax, scale;

    CastCodes(int64_t rows, int64_t cols, float scale_, float amax_before)
        : codes(DType::uint8, {rows, cols}),
          transposed(DType::uint8, {cols, rows}),
          inverse(DType::fp32, {1}),
          amax(DType::fp32, {1}, {amax_before}),
          scale(DType::fp32, {1}, {scale_}) {}

    Fp8Scaling scaling() const {
        return {.scale = scale.as<float>(),
                .amax = amax.as<float>(),
                .is_set = true,
                .inverse = inverse.as<float>()};
    }
    Fp8Output output(bool with_codes = true, bool with_transpose = true) const {
        return {.codes = with_codes ? codes.tensor() : Tensor{},
                .transposed = with_transpose ? transposed.tensor() : Tensor{},
                .scaling = scaling()};
    }
    /// The cast of values that are in memory.
    void round(const Buffer& x) const {
        TestStream stream(fp8_round_scratch_bytes(planning({})));
        fp8_round(stream, {.codes = codes,
                           .transposed = transposed,
                           .inverse = inverse.as<float>(),
                           .x = x,
                           .scaling = scaling()});
    }
    void check_equal(const CastCodes& expected, bool with_codes, bool with_transpose) const {
        if (with_codes) CHECK((codes.bytes() == expected.codes.bytes()));
        if (with_transpose) CHECK((transposed.bytes() == expected.transposed.bytes()));
        CHECK(inverse.bytes() == expected.inverse.bytes());
        CHECK(amax.bytes() == expected.amax.bytes());
    }
};

/// A result [rows, cols] of ordinary size is computed into memory and rounded, and computed
/// rounded.
void check_rounded(DType dtype, int64_t rows, int64_t cols,
                   const std::function<void(Stream&, Tensor, const Fp8Output&)>& compute) {
    // Some numbers are beyond the largest one, or even beyond what fp32 holds.
    const int64_t exponent = random_int(0, 3) == 0 ? 126 : random_int(4, 8);
    const float scale =
        std::ldexp(1.0f + static_cast<float>(random_int(0, 99)) / 100, static_cast<int>(exponent));
    const float before = random_int(0, 1) ? 1e-3f : 100.0f;
    const int64_t what = random_int(0, 3);  // both, or one of both
    const bool with_codes = what != 1, with_transpose = what != 2;
    CAPTURE(name_of(dtype), rows, cols, scale, before, with_codes, with_transpose);
    const Buffer values(dtype, {rows, cols});
    TestStream stream;
    compute(stream, values, {});
    const CastCodes expected(rows, cols, scale, before), found(rows, cols, scale, before);
    expected.round(values);
    const std::string poison = values.bytes();
    compute(stream, values, found.output(with_codes, with_transpose));
    found.check_equal(expected, with_codes, with_transpose);
    CHECK((values.bytes() == poison));  // is not written
}

/// Normal numbers, now and then one that is not finite.
std::vector<float> contents(int64_t n, float stddev) {
    std::vector<float> values = random_normal(static_cast<size_t>(n), stddev);
    if (random_int(0, 3) == 0)
        values[static_cast<size_t>(random_int(0, n - 1))] =
            random_int(0, 1) ? std::numeric_limits<float>::infinity()
                             : std::numeric_limits<float>::quiet_NaN();
    return values;
}

int64_t sixteens(int64_t most) { return 16 * random_int(1, most); }

constexpr DType rounded_dtypes[] = {DType::fp32, DType::bf16};

}  // namespace

namespace {

/// A norm [M, C] of random kind, computed both ways.
void check_norm(DType dtype, int64_t M, int64_t C) {
    const bool rms = random_int(0, 1) == 1, adds = random_int(0, 1) == 1,
               has_b = random_int(0, 1) == 1, has_bias = random_int(0, 1) == 1;
    CAPTURE(rms, adds, has_b, has_bias);
    const Buffer x(dtype, {M, C}, contents(M * C, 2)), residual(dtype, {M, C}, contents(M * C, 1)),
        w(dtype, {C}, contents(C, 1)), b(dtype, {C}, contents(C, 1)),
        bias(dtype, {C}, contents(C, 1));
    std::vector<std::string> beside;  // what else a norm writes
    check_rounded(dtype, M, C, [&](Stream& s, Tensor out, const Fp8Output& rounded) {
        const Buffer stats(DType::fp32, {M, 2}), sum(dtype, {M, C});
        norm_forward(s, {.norm = rms ? Norm::rms : Norm::layer,
                         .out = out,
                         .stats = stats,
                         .x = x,
                         .w = w,
                         .b = has_b ? b.tensor() : Tensor{},
                         .residual = adds ? residual.tensor() : Tensor{},
                         .bias = adds && has_bias ? bias.tensor() : Tensor{},
                         .x_out = adds ? sum.tensor() : Tensor{},
                         .rounded = rounded});
        beside.push_back(stats.bytes() + sum.bytes());
    });
    CHECK((beside.at(0) == beside.at(1)));
}

}  // namespace

TEST_CASE("a norm that rounds its result gives the bits of a norm and a cast",
          "[fp8][norm][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : rounded_dtypes)
        for (int i = 0; i < (device_is_simulated() ? 3 : 8); ++i) {
            const int64_t M = sixteens(6), C = i == 0 ? (dtype == DType::bf16 ? 2048 : 1024)
                                                      : sixteens(device_is_simulated() ? 30 : 64);
            TestStream stream;
            if (norm_rounds(stream, dtype, M, C))
                check_norm(dtype, M, C);
            else
                CHECK(C > 512);  // too wide for the shared memory of this GPU
        }
    TestStream stream;
    CHECK_FALSE(norm_rounds(stream, DType::bf16, 24, 64));
    CHECK_FALSE(norm_rounds(stream, DType::bf16, 32, 72));
    CHECK_FALSE(norm_rounds(stream, DType::bf16, 32, 32768));
    CHECK_FALSE(norm_rounds(stream, DType::fp32, 32, 20496));
    CHECK_FALSE(norm_rounds(planning({}, Device{}), DType::fp32, 32, 64));
}

TEST_CASE("a norm of long rows that rounds its result gives the bits of a norm and a cast",
          "[fp8][norm][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : rounded_dtypes) {
        // The shortest and the longest; in between, blocks take 32, 16 or 8 rows at a time.
        std::vector<int64_t> widths{dtype == DType::bf16 ? 2064 : 1040, 16384};
        for (int i = 0; i < (device_is_simulated() ? 2 : 12); ++i)
            widths.push_back(16 * random_int(65, i % 2 == 0 ? 400 : 1024));
        for (const int64_t C : widths) {
            // Wide ones have few rows, and more than one tile of them.
            const int64_t M = sixteens(C > 4096 ? 2 : 5);
            TestStream stream;
            if (norm_rounds(stream, dtype, M, C))
                check_norm(dtype, M, C);
            else
                CHECK(C > 12624);  // where a block has 99 KB of shared memory
        }
    }
}

TEST_CASE("SwiGLU that rounds its result gives the bits of SwiGLU and a cast",
          "[fp8][swiglu][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : rounded_dtypes)
        for (int i = 0; i < (device_is_simulated() ? 3 : 8); ++i) {
            const int64_t M = sixteens(9), F = i == 0 ? random_int(1, 150) : sixteens(12);
            const bool clamped = random_int(0, 1) == 1;
            CAPTURE(clamped);
            const Buffer gate_up(dtype, {M, 2 * F}, contents(M * 2 * F, 3));
            check_rounded(dtype, M, F, [&](Stream& s, Tensor out, const Fp8Output& rounded) {
                swiglu_forward(s,
                               {.out = out,
                                .gate_up = gate_up,
                                .clamped = clamped ? std::optional(ClampedSwiglu{}) : std::nullopt,
                                .rounded = rounded});
            });
        }
}

TEST_CASE("GELU that rounds its result gives the bits of GELU and a cast", "[fp8][gelu][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : rounded_dtypes)
        for (int i = 0; i < (device_is_simulated() ? 3 : 8); ++i) {
            const int64_t M = sixteens(9), F = i == 0 ? random_int(1, 150) : sixteens(12);
            const Buffer x(dtype, {M, F}, contents(M * F, 3));
            check_rounded(dtype, M, F, [&](Stream& s, Tensor out, const Fp8Output& rounded) {
                if (rounded)
                    gelu_forward_rounded(s, rounded, x);
                else
                    gelu_forward(s, out, x);
            });
        }
}

TEST_CASE("ReLU² that rounds its result gives the bits of ReLU² and a cast", "[fp8][relu][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : rounded_dtypes)
        for (int i = 0; i < (device_is_simulated() ? 3 : 8); ++i) {
            const int64_t M = sixteens(9), F = i == 0 ? random_int(1, 150) : sixteens(12);
            const Buffer x(dtype, {M, F}, contents(M * F, 3));
            check_rounded(dtype, M, F, [&](Stream& s, Tensor out, const Fp8Output& rounded) {
                relu_squared_forward(s, {.out = out, .x = x, .rounded = rounded});
            });
        }
}

// ---- bytes --------------------------------------------------------------------------------------

namespace {

constexpr int64_t byte_rows = 128, byte_cols = 512, long_row = 4096;
/// Of experts: the rows that there are, of byte_rows; weights [experts · expert_rows, expert_cols].
constexpr int64_t rows_of_experts = 96, experts = 4, expert_rows = 64, expert_cols = 256;

/// A kernel's part of the name that the simulator prints, and the least that it must read and
/// write.
struct Moved {
    const char* what;
    std::vector<std::string> names;  // all of them are in the kernel's name
    double least;
    /// Bytes of the sectors that warps asked for, so that what all threads read counts once a warp.
    bool by_sectors = false;
};

/// The bytes that threads of such kernels asked for.
double counted_in(const std::string& output, const Moved& moved) {
    double bytes = 0;
    for (size_t at = output.find("gpusim stats: "); at != std::string::npos;) {
        const size_t next = output.find("gpusim stats: ", at + 1);
        const std::string block = output.substr(at, next - at),
                          name = block.substr(0, block.find('\n'));
        at = next;
        bool is_it = true;
        for (const std::string& part : moved.names)
            is_it = is_it && name.find(part) != std::string::npos;
        if (!is_it) continue;
        for (const std::string what : {"global loads: ", "global stores: "}) {
            const size_t number = block.find(what);
            REQUIRE(number != std::string::npos);
            // "global loads: 8 bytes, 2 requests, 1.00 sectors/request (ideal 1.00)"
            std::istringstream line(block.substr(number + what.size()));
            double asked = 0, requests = 0, sectors = 0;
            std::string word;
            line >> asked >> word >> requests >> word >> sectors;
            REQUIRE_FALSE(line.fail());
            bytes += moved.by_sectors ? 32 * requests * sectors : asked;
        }
    }
    return bytes;
}

}  // namespace

TEST_CASE("bytes: casts to fp8", "[.]") {
    if (test_devices().size() < 2) return;
    const DeviceUnderTest device(test_devices().back());
    const int64_t M = byte_rows, C = byte_cols;
    const DType dtype = DType::bf16;
    const auto numbers = [&](int64_t rows, int64_t cols) {
        return std::make_unique<Buffer>(dtype, std::initializer_list<int64_t>{rows, cols},
                                        random_normal(static_cast<size_t>(rows * cols)));
    };
    const auto x = numbers(M, C), gate_up = numbers(M, 2 * C), w = numbers(1, C), b = numbers(1, C);
    const Buffer stats(DType::fp32, {M, 2}), out(dtype, {M, C});
    const CastCodes of_cast(M, C, 100, 0), of_current(M, C, 0, 0), of_norm(M, C, 100, 0),
        of_long_norm(M, long_row, 100, 0), of_swiglu(M, C, 100, 0), of_gelu(M, C, 100, 0),
        of_relu(M, C, 100, 0);
    TestStream stream(fp8_round_scratch_bytes(planning({})));
    for (const bool delayed : {true, false}) {
        const CastCodes& to = delayed ? of_cast : of_current;
        fp8_round(stream, {.codes = to.codes,
                           .transposed = to.transposed,
                           .inverse = to.inverse.as<float>(),
                           .x = *x,
                           .format = delayed ? Fp8Format::e4m3 : Fp8Format::e5m2,
                           .scaling = delayed ? to.scaling() : Fp8Scaling{}});
    }
    norm_forward(stream, {.out = out,
                          .stats = stats,
                          .x = *x,
                          .w = Tensor(w->tensor().data, dtype, {C}),
                          .b = Tensor(b->tensor().data, dtype, {C}),
                          .rounded = of_norm.output()});
    {
        const auto x_long = numbers(M, long_row), sum = numbers(M, long_row),
                   w_long = numbers(1, long_row);
        const Tensor vector(w_long->tensor().data, dtype, {long_row});
        norm_forward(stream, {.norm = Norm::rms,
                              .out = *sum,
                              .stats = stats,
                              .x = *x_long,
                              .w = vector,
                              .rounded = of_long_norm.output()});
        CHECK(of_long_norm.amax[0] > 0);  // waits
    }
    swiglu_forward(stream, {.out = out, .gate_up = *gate_up, .rounded = of_swiglu.output()});
    relu_squared_forward(stream, {.out = out, .x = *x, .rounded = of_relu.output()});
    gelu_forward_rounded(stream, of_gelu.output(), *x);
    CHECK(of_gelu.amax[0] > 0);  // waits
}

TEST_CASE("bytes: casts of experts to fp8", "[.]") {
    if (test_devices().size() < 2) return;
    const DeviceUnderTest device(test_devices().back());
    const DType dtype = DType::bf16;
    const auto numbers = [&](int64_t rows, int64_t cols) {
        return Buffer(dtype, {rows, cols}, random_normal(static_cast<size_t>(rows * cols)));
    };
    const Buffer dy = numbers(byte_rows, byte_cols),
                 w = numbers(experts * expert_rows, expert_cols);
    const CastCodes of_dy(byte_rows, byte_cols, 100, 0),
        of_w(experts * expert_rows, expert_cols, 100, 0);
    SharedArray<int32_t> count(1);
    count.data()[0] = static_cast<int32_t>(rows_of_experts);
    TestStream stream(fp8_round_scratch_bytes(planning({})));
    fp8_round(stream, {.codes = of_dy.codes,
                       .inverse = of_dy.inverse.as<float>(),
                       .x = dy,
                       .format = Fp8Format::e5m2,
                       .scaling = of_dy.scaling(),
                       .row_count = Tensor(count.data(), DType::int32, {1})});
    fp8_round(stream, {.codes = of_w.codes,
                       .transposed = of_w.transposed,
                       .inverse = of_w.inverse.as<float>(),
                       .x = w,
                       .scaling = of_w.scaling()});
    CHECK(of_w.amax[0] > 0);  // waits
}

namespace {

void check_bytes(const char* program, const std::vector<Moved>& all) {
    const ProgramResult run = run_program({this_program(), program}, {{"GPUSIM_STATS", "1"}});
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    for (const Moved& moved : all) {
        const double bytes = counted_in(run.output, moved);
        CAPTURE(moved.what, bytes, moved.least);
        CHECK(bytes >= moved.least);
        CHECK(bytes <= 1.1 * moved.least);
    }
}

}  // namespace

TEST_CASE("casts to fp8 move at most 1.1 times the bytes that they must", "[fp8][cuda]") {
    if (test_devices().size() < 2) return;
    {
        const DeviceUnderTest device(test_devices().back());
        if (!device_is_simulated()) return;
    }
    const double n = static_cast<double>(byte_rows * byte_cols),
                 n_long = static_cast<double>(byte_rows * long_row);
    // Two bytes of a number of bf16, one of each code
    check_bytes("bytes: casts to fp8",
                {{"a cast", {"round_tile", "E4M3", "Elements"}, 4 * n},
                 {"the largest magnitude", {"find_largest"}, 2 * n},
                 {"a cast of gradients", {"round_tile", "E5M2", "Elements"}, 4 * n},
                 {"a norm", {"forward_codes", "OneWarp"}, 4 * n + 8.0 * byte_rows + 4 * byte_cols},
                 {"a norm of long rows",
                  {"forward_codes", "SeveralWarps"},
                  4 * n_long + 8.0 * byte_rows + 2 * long_row},
                 {"SwiGLU", {"round_tile", "swiglu"}, 6 * n},
                 {"GELU", {"round_tile", "gelu"}, 4 * n},
                 {"ReLU²", {"round_tile", "relu_squared"}, 4 * n}});
    const double of_rows = static_cast<double>(rows_of_experts * byte_cols),
                 of_weights = static_cast<double>(experts * expert_rows * expert_cols);
    check_bytes(
        "bytes: casts of experts to fp8",
        {{"a cast of experts' rows, of as many as there are",
          {"round_tile", "E5M2", "Elements"},
          3 * of_rows,
          true},
         {"a cast of experts' weights", {"round_tile", "E4M3", "Elements"}, 4 * of_weights}});
}
