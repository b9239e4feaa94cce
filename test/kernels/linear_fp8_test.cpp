// Linear layers in fp8: products of rounded operands, against float64.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/architecture.h"
#include "kernels/linear/fp8_layout.h"
#include "test/kernels/fp8_reference.h"
#include "test/kernels/linear_problem.h"
#include "test/kernels/refused_launches.h"
#include "test/text.h"
#include "training/plan/datasheet.h"
#ifdef TRAIN_GPT_CUDA
#include "kernels/linear/gemm_cublas.h"
#endif

using namespace train_gpt;
using namespace train_gpt::linear_problem;

namespace {

/// An operand as the products see it: the numbers of its codes over its scale.
Values rounded(const Buffer& x, Fp8Format format, float scale) {
    static_assert(sizeof(double) == 8);
    std::vector<double> numbers;
    for (int code = 0; code < 256; ++code)
        numbers.push_back(fp8_reference::number_of(format, code));
    Values values = x.values();
    for (double& value : values)
        value = numbers[fp8_reference::nearest_code(format, static_cast<float>(value) * scale)] /
                static_cast<double>(scale);
    return values;
}

float largest_of(const Buffer& x) {
    double largest = 0;
    for (const double value : x.values()) largest = std::max(largest, std::abs(value));
    return static_cast<float>(largest);
}

/// A layer whose scales are its own amax or given ones, with which some elements saturate.
struct Fp8Layer : Layer {
    bool given;
    float x_scale, w_scale, dy_scale;
    Buffer scales, amax;
    ProductScales products;

    explicit Fp8Layer(DType dtype)
        : Fp8Layer(dtype, 16 * random_int(1, 6), 16 * random_int(1, 8), 16 * random_int(1, 8)) {}
    Fp8Layer(DType dtype, int64_t M, int64_t N, int64_t K)
        : Layer(dtype, M, N, K),
          given(random_int(0, 1) == 1),
          x_scale(scale(x, 448)),
          w_scale(scale(w, 448)),
          dy_scale(scale(dy, 57344)),
          scales(DType::fp32, {3}, {x_scale, w_scale, dy_scale}),
          amax(DType::fp32, {3}, {0, 0, 0}) {
        const auto scaling = [&](int i) {
            return Fp8Scaling{.scale = given ? scales.as<float>() + i : nullptr,
                              .amax = amax.as<float>() + i,
                              .is_set = given};
        };
        products = {.x = scaling(0), .w = scaling(1), .dy = scaling(2), .name = "3.down"};
    }
    Operand weight() const { return {w, &products}; }
    size_t scratch(KernelSettings settings) const {
        settings.fp8 = true;
        return scratch_bytes(settings);
    }

    Values x8() const { return rounded(x, Fp8Format::e4m3, x_scale); }
    Values w8() const { return rounded(w, Fp8Format::e4m3, w_scale); }
    Values dy8() const { return rounded(dy, Fp8Format::e5m2, dy_scale); }

  private:
    float scale(const Buffer& of, float largest) const {
        const float own = largest / largest_of(of);
        return given ? own * static_cast<float>(random_int(50, 200)) / 100 : own;
    }
};

void for_each_fp8_layer(const std::function<void(const Fp8Layer&, const KernelSettings&)>& check) {
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (int i = 0; i < (device_is_simulated() ? 2 : 5); ++i) {
            const Fp8Layer layer(dtype);
            CAPTURE(name_of(dtype), layer.M, layer.N, layer.K, layer.given);
            for_each_product([&](KernelSettings settings) {
                settings.fp8 = true;
                check(layer, settings);
            });
        }
}

/// What a plain computation in fp32 of the same rounded operands gives.
template <class Real>
Values with_addends(Values sums, const Values& bias, const Values& residual) {
    for (size_t i = 0; i < sums.size(); ++i) {
        Real value = static_cast<Real>(sums[i]);
        if (!bias.empty()) value += static_cast<Real>(bias[i % bias.size()]);
        if (!residual.empty()) value += static_cast<Real>(residual[i]);
        sums[i] = static_cast<double>(value);
    }
    return sums;
}

}  // namespace

TEST_CASE("linear_forward in fp8 multiplies rounded operands", "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    for_each_fp8_layer([](const Fp8Layer& l, const KernelSettings& settings) {
        const bool has_bias = random_int(0, 1) == 1, has_preact = random_int(0, 2) == 0,
                   has_residual = !has_preact && random_int(0, 1) == 1;
        CAPTURE(has_bias, has_residual, has_preact);
        Buffer out(l.dtype, {l.M, l.N}), preact(l.dtype, {l.M, l.N});
        TestStream stream(l.scratch(settings), settings);
        linear_forward(stream, {.out = out,
                                .x = l.x,
                                .w = l.weight(),
                                .bias = has_bias ? l.bias.tensor() : Tensor{},
                                .residual = has_residual ? l.residual.tensor() : Tensor{},
                                .preact = has_preact ? preact.tensor() : Tensor{}});
        const Values bias = has_bias ? l.bias.values() : Values(),
                     residual = has_residual ? l.residual.values() : Values();
        const auto sums = [&](auto real) {
            using Real = decltype(real);
            return with_addends<Real>(
                product_reference<Real>(GemmOp::nt, l.x8(), l.w8(), l.M, l.N, l.K), bias, residual);
        };
        check_accuracy("out", l.dtype, (has_preact ? preact : out).values(),
                       stored_as(l.dtype, sums(float{})), sums(double{}),
                       fp8_reference::cut_off_of_sums(l.K));
        if (has_preact) {
            Values activated = preact.values();
            for (double& value : activated) value = gelu_reference(value);
            check_accuracy("gelu", l.dtype, out.values(), stored_as(l.dtype, activated), activated);
        }
        CHECK(l.amax[0] == largest_of(l.x));
        CHECK(l.amax[1] == largest_of(l.w));
        CHECK(l.amax[2] == 0);
    });
}

TEST_CASE("linear_backward_input in fp8 multiplies rounded operands", "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    for_each_fp8_layer([](const Fp8Layer& l, const KernelSettings& settings) {
        const bool has_preact = random_int(0, 1) == 1;
        CAPTURE(has_preact);
        Buffer dx(l.dtype, {l.M, l.K});
        TestStream stream(l.scratch(settings), settings);
        linear_backward_input(stream, {.dx = dx,
                                       .dy = l.dy,
                                       .w = l.weight(),
                                       .preact = has_preact ? l.input_preact.tensor() : Tensor{}});
        const auto gradient = [&](auto real) {
            using Real = decltype(real);
            Values values = product_reference<Real>(GemmOp::nn, l.dy8(), l.w8(), l.M, l.K, l.N);
            const Values at = l.input_preact.values();
            for (size_t i = 0; has_preact && i < values.size(); ++i)
                values[i] =
                    static_cast<double>(static_cast<Real>(values[i]) *
                                        static_cast<Real>(gelu_derivative_reference(at[i])));
            return values;
        };
        check_accuracy("dx", l.dtype, dx.values(), stored_as(l.dtype, gradient(float{})),
                       gradient(double{}), fp8_reference::cut_off_of_sums(l.N));
        CHECK(l.amax[2] == largest_of(l.dy));
        CHECK(l.amax[0] == 0);
    });
}

TEST_CASE(
    "linear_backward_weight in fp8 multiplies rounded operands, and sums columns of dy itself",
    "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    for_each_fp8_layer([](const Fp8Layer& l, const KernelSettings& settings) {
        const bool accumulate = random_int(0, 1) == 1, in_fp8 = random_int(0, 2) > 0;
        CAPTURE(accumulate, in_fp8);
        const std::vector<float> before = random_normal(static_cast<size_t>(l.N * l.K)),
                                 bias_before = random_normal(static_cast<size_t>(l.N));
        Buffer dw(DType::fp32, {l.N, l.K}), dbias(DType::fp32, {l.N});
        for (size_t i = 0; accumulate && i < before.size(); ++i) dw.set(i, before[i]);
        for (size_t i = 0; accumulate && i < bias_before.size(); ++i) dbias.set(i, bias_before[i]);
        ProductScales scales = l.products;
        scales.weight_gradient = in_fp8;
        TestStream stream(l.scratch(settings), settings);
        linear_backward_weight(stream, {.dw = dw.sink(accumulate),
                                        .x = l.x,
                                        .dy = l.dy,
                                        .dbias = dbias.sink(accumulate),
                                        .scales = &scales});
        const auto gradient = [&](auto real) {
            using Real = decltype(real);
            Values values = product_reference<Real>(GemmOp::tn, in_fp8 ? l.dy8() : l.dy.values(),
                                                    in_fp8 ? l.x8() : l.x.values(), l.N, l.K, l.M);
            for (size_t i = 0; accumulate && i < values.size(); ++i)
                values[i] = static_cast<double>(static_cast<Real>(values[i]) + before[i]);
            return values;
        };
        check_accuracy("dw", DType::fp32, dw.values(), rounded_to_float(gradient(float{})),
                       gradient(double{}),
                       std::max(cut_off_sums(l.dtype, l.M), fp8_reference::cut_off_of_sums(l.M)));
        Values sums(static_cast<size_t>(l.N)), plain(sums.size());
        const Values dy = l.dy.values();
        for (size_t i = 0; i < dy.size(); ++i) sums[i % sums.size()] += dy[i];
        for (size_t i = 0; accumulate && i < sums.size(); ++i) sums[i] += bias_before[i];
        for (size_t i = 0; i < sums.size(); ++i) plain[i] = static_cast<float>(sums[i]);
        for (size_t i = 0; i < sums.size(); ++i)
            CHECK(std::abs(dbias[i] - sums[i]) <= 1e-4 * std::sqrt(static_cast<double>(l.M)));
    });
}

TEST_CASE("a weight that has been rounded once gives the bits of one that each product rounds",
          "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    for_each_fp8_layer([](const Fp8Layer& l, const KernelSettings& settings) {
        const bool gpu = test_device().is_cuda();
        Buffer codes(gpu ? DType::uint8 : l.dtype, {l.N, l.K}),
            transposed(DType::uint8, {l.K, l.N}), inverse(DType::fp32, {1});
        TestStream stream(l.scratch(settings), settings);
        const Fp8Matrix rounded{.codes = codes,
                                .transposed = gpu ? transposed.tensor() : Tensor{},
                                .inverse = inverse.as<float>()};
        fp8_round(stream, {.codes = rounded.codes,
                           .transposed = rounded.transposed,
                           .inverse = inverse.as<float>(),
                           .x = l.w,
                           .scaling = l.products.w});
        const auto results = [&](const Operand& w) {
            Buffer out(l.dtype, {l.M, l.N}), dx(l.dtype, {l.M, l.K});
            linear_forward(stream, {.out = out, .x = l.x, .w = w, .bias = l.bias});
            linear_backward_input(stream, {.dx = dx, .dy = l.dy, .w = w});
            return out.bytes() + dx.bytes();
        };
        const std::string expected = results(l.weight());
        CHECK((results({l.w, &l.products, rounded}) == expected));
        // It reads the rounded weight alone.
        const Buffer nothing(l.dtype, {l.N, l.K});
        CHECK((results({nothing, &l.products, rounded}) == expected));
    });
}

TEST_CASE("an input that has been rounded by the kernel that computed it gives the same bits",
          "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for_each_fp8_layer([](const Fp8Layer& l, const KernelSettings& settings) {
        Buffer codes(DType::uint8, {l.M, l.K}), transposed(DType::uint8, {l.K, l.M}),
            inverse(DType::fp32, {1});
        TestStream stream(l.scratch(settings), settings);
        fp8_round(stream, {.codes = codes,
                           .transposed = transposed,
                           .inverse = inverse.as<float>(),
                           .x = l.x,
                           .scaling = l.products.x});
        const auto results = [&](const Tensor& x, const Fp8Matrix& rounded) {
            Buffer out(l.dtype, {l.M, l.N}), dw(DType::fp32, {l.N, l.K}), dbias(DType::fp32, {l.N});
            linear_forward(stream, {.out = out,
                                    .x = x,
                                    .w = l.weight(),
                                    .residual = l.residual,
                                    .rounded_x = rounded});
            linear_backward_weight(stream, {.dw = dw.sink(false),
                                            .x = x,
                                            .dy = l.dy,
                                            .dbias = dbias.sink(false),
                                            .scales = &l.products,
                                            .rounded_x = rounded});
            return out.bytes() + dw.bytes() + dbias.bytes();
        };
        CHECK_FALSE(fp8_was_refused(stream));
        const Buffer nothing(l.dtype, {l.M, l.K});
        CHECK((results(nothing, {codes, transposed, inverse.as<float>()}) == results(l.x, {})));
    });
}

TEST_CASE("a gradient that has been rounded once for both products gives the same bits",
          "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for_each_fp8_layer([](const Fp8Layer& l, const KernelSettings& settings) {
        Buffer codes(DType::uint8, {l.M, l.N}), transposed(DType::uint8, {l.N, l.M}),
            inverse(DType::fp32, {1});
        TestStream stream(l.scratch(settings), settings);
        fp8_round(stream, {.codes = codes,
                           .transposed = transposed,
                           .inverse = inverse.as<float>(),
                           .x = l.dy,
                           .format = Fp8Format::e5m2,
                           .scaling = l.products.dy});
        const auto results = [&](const Fp8Matrix& rounded) {
            Buffer dx(l.dtype, {l.M, l.K}), dw(DType::fp32, {l.N, l.K}), dbias(DType::fp32, {l.N});
            linear_backward_input(stream,
                                  {.dx = dx, .dy = l.dy, .w = l.weight(), .rounded_dy = rounded});
            linear_backward_weight(stream, {.dw = dw.sink(false),
                                            .x = l.x,
                                            .dy = l.dy,
                                            .dbias = dbias.sink(false),
                                            .scales = &l.products,
                                            .rounded_dy = rounded});
            return dx.bytes() + dw.bytes() + dbias.bytes();
        };
        CHECK((results({codes, transposed, inverse.as<float>()}) == results({})));
    });
}

TEST_CASE("products that cuBLASLt refuses in fp8 are computed in the layer's dtype",
          "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        // Rows of 8 or 24 codes are not aligned, along N, K and M.
        const auto size = [] { return 16 * random_int(0, 3) + 8; };
        Fp8Layer l(dtype, size(), size(), size());
        CAPTURE(name_of(dtype), l.M, l.N, l.K);
        std::string refused;  // the sentence about the first product
        const auto results = [&](bool fp8) {
            KernelSettings settings;
            settings.fp8 = true;
            const Operand w = fp8 ? l.weight() : Operand(l.w);
            Buffer out(dtype, {l.M, l.N}), preact(dtype, {l.M, l.N}), dx(dtype, {l.M, l.K}),
                dw(DType::fp32, {l.N, l.K}), dbias(DType::fp32, {l.N});
            TestStream stream(l.scratch(settings), settings);
            linear_forward(stream,
                           {.out = out, .x = l.x, .w = w, .bias = l.bias, .preact = preact});
            if (fp8) {
                REQUIRE(fp8_refusals(stream).size() == 1);
                refused = fp8_refusals(stream)[0];
                refused = refused.substr(0, refused.find(", for which"));
            }
            linear_backward_input(stream, {.dx = dx, .dy = l.dy, .w = w, .preact = l.input_preact});
            linear_backward_weight(stream, {.dw = dw.sink(false),
                                            .x = l.x,
                                            .dy = l.dy,
                                            .dbias = dbias.sink(false),
                                            .scales = fp8 ? &l.products : nullptr});
            return std::vector{out.bytes(), preact.bytes(), dx.bytes(), dw.bytes(), dbias.bytes()};
        };
        CHECK(results(true) == results(false));
        CHECK(refused == concat("matrix products of ", l.M, "×", l.K, " by ", l.K, "×", l.N,
                                " (3.down) run in ", name_of(dtype), " instead of fp8"));
        CHECK(l.amax[0] == largest_of(l.x));  // the scales of later steps follow from them
        CHECK(l.amax[2] == largest_of(l.dy));
    }
}

TEST_CASE("products in fp8 do not depend on the number of threads", "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    const Fp8Layer l(random_int(0, 1) ? DType::bf16 : DType::fp32);
    KernelSettings settings{.gemm = KernelSettings::Gemm::own};
    settings.fp8 = true;
    check_thread_independence([&] {
        Buffer out(l.dtype, {l.M, l.N}), dx(l.dtype, {l.M, l.K}), dw(DType::fp32, {l.N, l.K});
        TestStream stream(l.scratch(settings), settings);
        linear_forward(stream, {.out = out, .x = l.x, .w = l.weight()});
        linear_backward_input(stream, {.dx = dx, .dy = l.dy, .w = l.weight()});
        linear_backward_weight(stream,
                               {.dw = dw.sink(false), .x = l.x, .dy = l.dy, .scales = &l.products});
        return out.bytes() + dx.bytes() + dw.bytes();
    });
}

TEST_CASE("GPUs multiply fp8 in the layouts of their architecture", "[fp8]") {
    using enum Fp8Layouts;
    for (const std::string& key : gpu_keys()) {
        const Gpu& gpu = gpu_named(key);
        CAPTURE(key, gpu.architecture);
        // Ampere; Ada and Hopper; Blackwell of data centres, and of GeForce
        const bool is_known = (std::set{80, 86, 89, 90, 100, 103, 120}).contains(gpu.architecture);
        CHECK(is_known);
        CHECK(fp8_layouts(gpu.architecture) == (gpu.architecture < 89    ? none
                                                : gpu.architecture < 100 ? tn
                                                : gpu.architecture < 120 ? all
                                                                         : tn));
        CHECK((gpu.fp8_teraflops() > 0) == (fp8_layouts(gpu.architecture) != none));
    }
    CHECK(first_with_fp8 == 89);
    CHECK(fp8_layouts(119) == all);
    CHECK(fp8_layouts(121) == tn);
    CHECK(fp8_layouts(130) == all);
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("a GPU that takes fp8 along k alone refuses other layouts", "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const bool takes_all = fp8_layouts(architecture(test_device())) == Fp8Layouts::all;
    const auto size = [] { return 16 * random_int(1, 8); };
    const int64_t m = size(), n = size(), k = size();
    CAPTURE(m, n, k, takes_all);
    const Buffer a(DType::uint8, {m, k}), b(DType::uint8, {n, k}), d(DType::fp32, {m, n}),
        inverses(DType::fp32, {2, fp8_inverse_stride});
    TestStream stream(cuda::gemm_workspace_bytes(m, n), {.autotune = false, .fp8 = true});
    for (const auto format : {cuda::Fp8Operands::e4m3, cuda::Fp8Operands::e5m2})
        for (const GemmOp op : {GemmOp::nt, GemmOp::nn, GemmOp::tn}) {
            CAPTURE(static_cast<int>(format), static_cast<int>(op));
            CHECK(cuda::can_multiply(stream,
                                     {.op = op,
                                      .in = DType::bf16,
                                      .m = m,
                                      .n = n,
                                      .k = k,
                                      .d = d.tensor().data,
                                      .a = a.tensor().data,
                                      .b = b.tensor().data,
                                      .fp8 = format,
                                      .a_inverse = inverses.as<float>(),
                                      .b_inverse = inverses.as<float>() + fp8_inverse_stride}) ==
                  (op == GemmOp::nt || takes_all));
        }
}

TEST_CASE("an algorithm that is refused when it is launched is passed over in fp8",
          "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    if (!device_is_simulated()) return;  // whose library offers two or three that give the same
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const Fp8Layer l(dtype);
        CAPTURE(name_of(dtype), l.M, l.N, l.K);
        const KernelSettings settings{.autotune = false, .fp8 = true};
        const auto results = [&](int refused, bool fp8, size_t refusals, bool accumulates_first) {
            CAPTURE(refused, fp8, accumulates_first);
            const RefusedLaunches launches(refused);
            const Operand w = fp8 ? l.weight() : Operand(l.w);
            const Buffer out(dtype, {l.M, l.N}), dx(dtype, {l.M, l.K}), dw(DType::fp32, {l.N, l.K}),
                first(DType::fp32, {l.N, l.K}),
                sum(DType::fp32, {l.N, l.K}, std::vector<float>(static_cast<size_t>(l.N * l.K)));
            TestStream stream(l.scratch(settings), settings);
            const auto backward_weight = [&](const GradientSink& to) {
                linear_backward_weight(
                    stream,
                    {.dw = to, .x = l.x, .dy = l.dy, .scales = fp8 ? &l.products : nullptr});
            };
            // So that the weight's gradient is the first product that is refused
            if (accumulates_first)
                for (int i = 0; i < 2; ++i) backward_weight(sum.sink(true));
            if (refused == 1 && accumulates_first) CHECK(RefusedLaunches::left() == 0);
            CHECK(fp8_refusals(stream).size() == (accumulates_first ? refusals : 0));
            linear_forward(stream, {.out = out, .x = l.x, .w = w, .bias = l.bias});
            if (!accumulates_first) CHECK(fp8_refusals(stream).size() == refusals);
            linear_backward_input(stream, {.dx = dx, .dy = l.dy, .w = w});
            for (const bool accumulate : {false, true}) backward_weight(dw.sink(accumulate));
            if (refused == 1) CHECK(RefusedLaunches::left() == 0);
            if (!accumulates_first)
                for (int i = 0; i < 2; ++i) backward_weight(sum.sink(true));
            backward_weight(first.sink(false));
            CHECK((sum.bytes() == dw.bytes()));  // twice the gradient, whatever was tried
            return std::vector{out.bytes(), dx.bytes(), dw.bytes(), first.bytes()};
        };
        const std::vector<std::string> in_fp8 = results(0, true, 0, false),
                                       in_dtype = results(0, false, 0, false);
        CHECK((in_dtype != in_fp8));
        for (const bool accumulates_first : {false, true}) {
            CHECK((results(0, true, 0, accumulates_first) == in_fp8));
            CHECK((results(1, true, 0, accumulates_first) == in_fp8));
            CHECK((results(RefusedLaunches::all, true, 1, accumulates_first) == in_dtype));
        }
    }
}

TEST_CASE("a product that is refused in fp8 needs the values of both operands",
          "[fp8][linear][cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const Fp8Layer l(DType::bf16);
    const KernelSettings settings{.autotune = false, .fp8 = true};
    TestStream stream(l.scratch(settings), settings);
    const Buffer codes(DType::uint8, {l.M, l.K}), transposed(DType::uint8, {l.K, l.M}),
        inverse(DType::fp32, {1}), out(l.dtype, {l.M, l.N});
    const RefusedLaunches launches(RefusedLaunches::all);
    std::string refusal;
    try {
        linear_forward(stream, {.out = out,
                                .x = l.x,
                                .w = l.weight(),
                                .rounded_x = {codes, transposed, inverse.as<float>()}});
    } catch (const Error& error) {
        refusal = error.what();
    }
    CAPTURE(refusal);
    CHECK(contains(refusal, "an operand is in fp8 alone"));
    CHECK(contains(refusal, "precision.fp8_skip"));
}

#endif  // TRAIN_GPT_CUDA
