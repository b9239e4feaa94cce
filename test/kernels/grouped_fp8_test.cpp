// Products of experts in fp8, against float64.
#include "kernels/experts/grouped_fp8.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "test/kernels/experts_reference.h"
#include "test/kernels/fp8_reference.h"
#include "test/kernels/linear_problem.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_queue.h"
#include "kernels/experts/grouped_ways.h"
#endif

using namespace train_gpt;
using fp8_reference::rounded;

namespace {

/// All ways to multiply matrices; on a GPU, all kernels for experts.
void for_each_fp8_product(const std::function<void(const KernelSettings&)>& check) {
    using Grouped = KernelSettings::Grouped;
    if (!test_device().is_cuda()) return linear_problem::for_each_product(check);
    for (const Grouped grouped : {Grouped::own, Grouped::wgmma}) {
        if (grouped == Grouped::wgmma && !has_wgmma(test_device())) continue;
        INFO((grouped == Grouped::own ? "mma" : "wgmma"));
        // Blocks that stay on the GPU then process several tiles.
        const int blocks = static_cast<int>(random_int(1, 4));
        check({.grouped = grouped, .reserved_sms = multiprocessors(test_device()) - blocks});
    }
}

float largest_of(const Values& x) {
    double largest = 0;
    for (const double value : x) largest = std::max(largest, std::abs(value));
    return static_cast<float>(largest);
}

struct GroupedFp8Extent {
    std::vector<int64_t> counts;
    int64_t N, K;
};

/// Some experts have no rows, but not all.
GroupedFp8Extent random_extent() {
    const auto width = [] { return 16 * random_int(1, device_is_simulated() ? 9 : 20); };
    GroupedFp8Extent extent{{}, width(), width()};
    for (int64_t e = random_int(1, 5); e > 0; --e)
        extent.counts.push_back(random_int(0, 3) ? random_int(0, 170) : random_int(0, 1));
    if (std::ranges::count(extent.counts, 0) == std::ssize(extent.counts)) extent.counts.back() = 1;
    return extent;
}

/// Experts, and rows at the end that no expert has, which are NaN. Half of the layers gather their
/// rows from tokens.
struct ExpertLayer {
    DType dtype;
    int64_t E, R, more, N, K;
    bool gathers, given;
    int64_t tokens;
    std::vector<int32_t> offsets, tokens_of_rows;
    Buffer x, w, bias, dy;
    SharedArray<int32_t> offset_memory, token_memory;
    Buffer scales, amax;
    ProductScales products;

    explicit ExpertLayer(DType dtype_, const GroupedFp8Extent& extent = random_extent())
        : dtype(dtype_),
          E(std::ssize(extent.counts)),
          R(std::accumulate(extent.counts.begin(), extent.counts.end(), int64_t{0})),
          more(random_int(0, 40)),
          N(extent.N),
          K(extent.K),
          gathers(random_int(0, 1) == 1),
          given(random_int(0, 1) == 1),
          tokens(gathers ? random_int(1, R) : R + more),
          offsets(offsets_of(extent.counts)),
          x(dtype, {tokens, K}, filled(gathers ? tokens : R, tokens, K, 1)),
          w(dtype, {E, N, K},
            random_normal(static_cast<size_t>(E * N * K), 1 / std::sqrt(static_cast<float>(K)))),
          bias(dtype, {E, N}, random_normal(static_cast<size_t>(E * N))),
          dy(dtype, {R + more, N}, filled(R, R + more, N, 1)),
          offset_memory(static_cast<size_t>(E) + 1),
          token_memory(static_cast<size_t>(R + more)),
          scales(DType::fp32, {3}),
          amax(DType::fp32, {3}, {0, 0, 0}) {
        std::ranges::copy(offsets, offset_memory.data());
        for (int64_t r = 0; r < R; ++r)
            tokens_of_rows.push_back(static_cast<int32_t>(gathers ? random_int(0, tokens - 1) : r));
        std::ranges::copy(tokens_of_rows, token_memory.data());
        for (int i = 0; i < 3; ++i) {
            const Values of = i == 0 ? x_rows() : i == 1 ? w.values() : dy_rows();
            const float own = (i == 2 ? 57344 : 448) / std::max(largest_of(of), 1e-12f);
            scales.set(static_cast<size_t>(i),
                       given ? own * static_cast<float>(random_int(50, 200)) / 100 : own);
        }
        const auto scaling = [&](int i) {
            return Fp8Scaling{.scale = given ? scales.as<float>() + i : nullptr,
                              .amax = amax.as<float>() + i,
                              .is_set = given};
        };
        products = {.x = scaling(0), .w = scaling(1), .dy = scaling(2)};
    }

    Values x_rows() const {  // all that are rounded
        Values all = x.values();
        all.resize(static_cast<size_t>((gathers ? tokens : R) * K));
        return all;
    }
    Values dy_rows() const {
        Values all = dy.values();
        all.resize(static_cast<size_t>(R * N));
        return all;
    }
    float scale(int i) const { return static_cast<float>(scales[static_cast<size_t>(i)]); }
    /// Of rounded operands.
    GroupedProblem problem() const {
        const Values x8 = rounded(x_rows(), Fp8Format::e4m3, scale(0));
        return {N,
                K,
                offsets,
                gathered_reference(x8, tokens_of_rows, K),
                rounded(dy_rows(), Fp8Format::e5m2, scale(2)),
                rounded(w.values(), Fp8Format::e4m3, scale(1))};
    }
    Tensor offset_tensor() const { return {offset_memory.data(), DType::int32, {E + 1}}; }
    Tensor row_token() const {
        return gathers ? Tensor(token_memory.data(), DType::int32, {R + more}) : Tensor{};
    }
    size_t scratch(KernelSettings settings) const {
        settings.fp8 = true;
        return grouped_linear_scratch_bytes(planning(settings), {dtype, E, R + more, N, K});
    }
    void forward(Stream& stream, const Buffer& out, Tensor weight, const Fp8Matrix& of_w) const {
        grouped_linear_forward(stream, {.out = out,
                                        .x = x,
                                        .w = {weight, &products, of_w},
                                        .offsets = offset_tensor(),
                                        .row_token = row_token(),
                                        .bias = bias});
    }
    void backward_input(Stream& stream, const Buffer& dx, Tensor weight,
                        const Fp8Matrix& of_w) const {
        grouped_linear_backward_input(
            stream,
            {.dx = dx, .dy = dy, .w = {weight, &products, of_w}, .offsets = offset_tensor()});
    }
    Values with_bias(Values out) const {
        for (int64_t e = 0; e < E; ++e)
            for (int64_t i = offsets[static_cast<size_t>(e)] * N;
                 i < offsets[static_cast<size_t>(e) + 1] * N; ++i)
                out[static_cast<size_t>(i)] += bias[static_cast<size_t>(e * N + i % N)];
        return out;
    }

    /// All operands become their magnitudes.
    void make_positive() {
        for (Buffer* of : {&x, &w, &bias, &dy})
            for (size_t i = 0; i < static_cast<size_t>(of->tensor().numel()); ++i)
                of->set(i, std::abs(static_cast<float>((*of)[i])));
    }

  private:
    static std::vector<int32_t> offsets_of(const std::vector<int64_t>& counts) {
        std::vector<int32_t> all{0};
        for (const int64_t count : counts) all.push_back(all.back() + static_cast<int32_t>(count));
        return all;
    }
    static std::vector<float> filled(int64_t known, int64_t rows, int64_t cols, float stddev) {
        std::vector<float> values = random_normal(static_cast<size_t>(rows * cols), stddev);
        std::fill(values.begin() + known * cols, values.end(),
                  std::numeric_limits<float>::quiet_NaN());
        return values;
    }
};

void for_each_layer(const std::function<void(const ExpertLayer&, const KernelSettings&)>& check) {
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (int i = 0; i < (device_is_simulated() ? 3 : 6); ++i) {
            const ExpertLayer layer(dtype);
            CAPTURE(name_of(dtype), layer.E, layer.R, layer.more, layer.N, layer.K, layer.gathers,
                    layer.given);
            for_each_fp8_product([&](KernelSettings settings) {
                settings.fp8 = true;
                check(layer, settings);
            });
        }
}

/// The first elements; the others are as they were.
Values first_of(const Buffer& buffer, int64_t n) {
    Values values = buffer.values();
    for (size_t i = static_cast<size_t>(n); i < values.size(); ++i) CHECK(std::isnan(values[i]));
    values.resize(static_cast<size_t>(n));
    return values;
}

}  // namespace

TEST_CASE("products of experts in fp8 multiply rounded operands, whatever rows the experts have",
          "[fp8][cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const ExpertLayer& l, const KernelSettings& settings) {
        const Buffer out(l.dtype, {l.R + l.more, l.N}), dx(l.dtype, {l.R + l.more, l.K});
        TestStream stream(l.scratch(settings), settings);
        l.forward(stream, out, l.w, {});
        l.backward_input(stream, dx, l.w, {});
        const GroupedProblem problem = l.problem();
        accuracy.check("out", l.dtype, first_of(out, l.R * l.N),
                       stored_as(l.dtype, l.with_bias(problem.product<float>(GemmOp::nt))),
                       l.with_bias(problem.product<double>(GemmOp::nt)),
                       fp8_reference::cut_off_of_slices(l.K));
        accuracy.check("dx", l.dtype, first_of(dx, l.R * l.K),
                       stored_as(l.dtype, problem.product<float>(GemmOp::nn)),
                       problem.product<double>(GemmOp::nn), fp8_reference::cut_off_of_slices(l.N));
        CHECK(l.amax[0] == largest_of(l.x_rows()));
        CHECK(l.amax[1] == largest_of(l.w.values()));
        CHECK(l.amax[2] == largest_of(l.dy_rows()));
    });
}

TEST_CASE("products of experts in fp8 over many slices and rows give the same bits again",
          "[fp8][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    Accuracy accuracy;
    // Slices of 128 codes and a part of one; more rows of an expert than a band of tiles has.
    for (const GroupedFp8Extent& extent :
         {GroupedFp8Extent{{random_int(1, 40), 0, 3}, 48, 7 * 128 + 16},
          GroupedFp8Extent{{random_int(1, 40), 0, 3}, 7 * 128 + 16, 48},
          GroupedFp8Extent{{2100, 1, 0}, 272, 16}})
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            const ExpertLayer l(dtype, extent);
            CAPTURE(name_of(dtype), l.R, l.N, l.K, l.gathers, l.given);
            const GroupedProblem problem = l.problem();
            for_each_fp8_product([&](KernelSettings settings) {
                settings.fp8 = true;
                TestStream stream(l.scratch(settings), settings);
                const auto results = [&] {
                    auto both =
                        std::pair{std::make_unique<Buffer>(
                                      dtype, std::initializer_list<int64_t>{l.R + l.more, l.N}),
                                  std::make_unique<Buffer>(
                                      dtype, std::initializer_list<int64_t>{l.R + l.more, l.K})};
                    l.forward(stream, *both.first, l.w, {});
                    l.backward_input(stream, *both.second, l.w, {});
                    return both;
                };
                const auto [out, dx] = results();
                const auto [out_again, dx_again] = results();
                CHECK((out->bytes() == out_again->bytes()));
                CHECK((dx->bytes() == dx_again->bytes()));
                accuracy.check("out", dtype, first_of(*out, l.R * l.N),
                               stored_as(dtype, l.with_bias(problem.product<float>(GemmOp::nt))),
                               l.with_bias(problem.product<double>(GemmOp::nt)),
                               fp8_reference::cut_off_of_slices(l.K));
                accuracy.check("dx", dtype, first_of(*dx, l.R * l.K),
                               stored_as(dtype, problem.product<float>(GemmOp::nn)),
                               problem.product<double>(GemmOp::nn),
                               fp8_reference::cut_off_of_slices(l.N));
            });
        }
}

TEST_CASE("deep products of experts in fp8 are as exact as their slices' sums", "[fp8][cuda]") {
    ON_EACH_DEVICE();
    // Where all terms are positive, sums that tensor cores keep are cut off most.
    const int64_t deep = 128 * random_int(25, 32) + 16 * random_int(0, 7), narrow = 48;
    const int64_t cut_off = fp8_reference::cut_off_of_positive_slices();
    for (const bool forward : {true, false}) {
        ExpertLayer l(
            DType::fp32,
            {{random_int(1, 40), 0, 3}, forward ? narrow : deep, forward ? deep : narrow});
        l.make_positive();
        CAPTURE(forward, deep, l.R, l.gathers, l.given);
        const GroupedProblem problem = l.problem();
        for_each_fp8_product([&](KernelSettings settings) {
            settings.fp8 = true;
            TestStream stream(l.scratch(settings), settings);
            const Buffer result(l.dtype, {l.R + l.more, narrow});
            if (forward) {
                l.forward(stream, result, l.w, {});
                check_accuracy("out", l.dtype, first_of(result, l.R * narrow),
                               l.with_bias(problem.product<float>(GemmOp::nt)),
                               l.with_bias(problem.product<double>(GemmOp::nt)), cut_off);
            } else {
                l.backward_input(stream, result, l.w, {});
                check_accuracy("dx", l.dtype, first_of(result, l.R * narrow),
                               problem.product<float>(GemmOp::nn),
                               problem.product<double>(GemmOp::nn), cut_off);
            }
        });
    }
}

#ifdef TRAIN_GPT_CUDA
TEST_CASE("experts' products in fp8 that are not timed go to the kernel for sm_90", "[fp8][cuda]") {
    ON_EACH_DEVICE();
    if (!has_wgmma(test_device())) return;
    const ExpertLayer l(random_int(0, 1) ? DType::fp32 : DType::bf16);
    for (const bool forward : {true, false}) {
        CAPTURE(forward, l.gathers);
        const Buffer result(l.dtype, {l.R + l.more, forward ? l.N : l.K});
        TestStream owner(l.scratch({}), {.fp8 = true});
        Stream& stream = owner;
        if (forward)
            l.forward(stream, result, l.w, {});
        else
            l.backward_input(stream, result, l.w, {});
        CHECK(stream.queue->kept<cuda::GroupedWays>().last() == cuda::GroupedWay::wgmma_128);
    }
}
#endif

TEST_CASE(
    "experts' weights that have been rounded once give the bits of those that each product "
    "rounds",
    "[fp8][cuda]") {
    ON_EACH_DEVICE();
    for_each_layer([](const ExpertLayer& l, const KernelSettings& settings) {
        const bool gpu = test_device().is_cuda();
        const int64_t rows = l.E * l.N;
        const Buffer codes(gpu ? DType::uint8 : l.dtype, {rows, l.K}),
            transposed(DType::uint8, {l.K, rows}), inverse(DType::fp32, {1});
        const Fp8Matrix once{.codes = codes,
                             .transposed = gpu ? transposed.tensor() : Tensor{},
                             .inverse = inverse.as<float>()};
        TestStream stream(l.scratch(settings), settings);
        fp8_round(stream, {.codes = once.codes,
                           .transposed = once.transposed,
                           .inverse = inverse.as<float>(),
                           .x = l.w.tensor().reshaped({rows, l.K}),
                           .scaling = l.products.w});
        const auto results = [&](const Tensor& weight, const Fp8Matrix& of_w) {
            const Buffer out(l.dtype, {l.R + l.more, l.N}), dx(l.dtype, {l.R + l.more, l.K});
            l.forward(stream, out, weight, of_w);
            l.backward_input(stream, dx, weight, of_w);
            return out.bytes() + dx.bytes();
        };
        const Buffer nothing(l.dtype, {l.E, l.N, l.K});
        CHECK((results(nothing, once) == results(l.w, {})));
    });
}
