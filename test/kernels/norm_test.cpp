#include "kernels/norm.h"

#include "base/error.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

struct TestedNorm {
    DType dtype;
    int64_t M, C;
    Buffer x, w, b, dy, dres;
    // Any norm; RMSNorm mostly has no b.
    Norm norm = random_int(0, 1) ? Norm::rms : Norm::layer;
    bool has_b = random_int(0, 3) < (norm == Norm::rms ? 1 : 3), overwrite_dres = false;
    float epsilon = random_int(0, 1) ? 1e-5f : 1e-6f;

    static std::vector<float> around(size_t n, float centre, float stddev) {
        std::vector<float> values = random_normal(n, stddev);
        for (float& value : values) value += centre;
        return values;
    }
    TestedNorm(DType dtype_, int64_t M_, int64_t C_)
        : dtype(dtype_),
          M(M_),
          C(C_),
          x(dtype, {M, C}, around(static_cast<size_t>(M * C), 0.5f, 2.0f)),
          w(dtype, {C}, around(static_cast<size_t>(C), 1.0f, 0.3f)),
          b(dtype, {C}, random_normal(static_cast<size_t>(C))),
          dy(dtype, {M, C}, random_normal(static_cast<size_t>(M * C))),
          dres(dtype, {M, C}, random_normal(static_cast<size_t>(M * C))) {}
};

/// The formulas of norm.h in Real; with `store`, stored values are rounded to the dtype.
template <class Real>
NormReference textbook(const TestedNorm& p, bool store) {
    return norm_reference<Real>({.norm = p.norm,
                                 .M = p.M,
                                 .C = p.C,
                                 .x = p.x.values(),
                                 .w = p.w.values(),
                                 .b = p.has_b ? p.b.values() : Values(),
                                 .dy = p.dy.values(),
                                 .dres = p.overwrite_dres ? Values() : p.dres.values(),
                                 .epsilon = static_cast<double>(p.epsilon)},
                                store ? p.dtype : DType::fp32);
}

void run_forward(const TestedNorm& p, const Buffer& out, const Tensor& stats) {
    TestStream stream;
    norm_forward(stream, {.norm = p.norm,
                          .out = out,
                          .stats = stats,
                          .x = p.x,
                          .w = p.w,
                          .b = p.has_b ? p.b.tensor() : Tensor{},
                          .epsilon = p.epsilon});
}

TestedNorm random_problem(DType dtype) {
    return {dtype, random_int(1, device_is_simulated() ? 30 : 150), random_int(8, 400)};
}

std::string described(const TestedNorm& p) {
    return concat(p.norm == Norm::rms ? "rms" : "layer", p.has_b ? "" : " without b", " in ",
                  name_of(p.dtype), ", ", p.M, " rows of ", p.C);
}

/// Runs the backward pass of p, adding to every sink or overwriting it, and judges all its results.
void check_backward(Accuracy& accuracy, const TestedNorm& p, bool accumulate) {
    const DType dtype = p.dtype;
    CAPTURE(described(p), p.overwrite_dres, accumulate);
    const Buffer out(dtype, {p.M, p.C}), stats(DType::fp32, {p.M, 2});
    run_forward(p, out, stats);
    NormReference reference = textbook<double>(p, false), plain = textbook<float>(p, true);

    const std::vector<float> before = random_normal(static_cast<size_t>(p.C));
    const auto gradient = [&] {
        return accumulate
                   ? std::make_unique<Buffer>(DType::fp32, std::initializer_list<int64_t>{p.C},
                                              before)
                   : std::make_unique<Buffer>(DType::fp32, std::initializer_list<int64_t>{p.C});
    };
    const auto dw = gradient(), db = gradient(), dbias = gradient();
    const Buffer poisoned(dtype, {p.M, p.C});
    const Tensor dres = p.overwrite_dres ? poisoned : p.dres;
    TestStream stream(norm_scratch_bytes(planning(), p.M, p.C));
    norm_backward(stream, {.norm = p.norm,
                           .dres = dres,
                           .dw = dw->sink(accumulate),
                           .db = p.has_b ? db->sink(accumulate) : GradientSink{},
                           .dy = p.dy,
                           .x = p.x,
                           .w = p.w,
                           .stats = stats,
                           .dbias = dbias->sink(accumulate),
                           .overwrite_dres = p.overwrite_dres});

    // The bias gradient is a sum of what was stored.
    const std::vector<double> stored = (p.overwrite_dres ? poisoned : p.dres).values();
    const size_t C = static_cast<size_t>(p.C);
    std::vector<double> dbias_reference(C);
    std::vector<float> dbias_float(C);
    for (size_t i = 0; i < stored.size(); ++i) {
        dbias_reference[i % C] += stored[i];
        dbias_float[i % C] += static_cast<float>(stored[i]);
    }
    std::vector<double> dbias_plain(dbias_float.begin(), dbias_float.end());
    if (accumulate) {
        for (auto* sum :
             {&reference.dw, &plain.dw, &reference.db, &plain.db, &dbias_reference, &dbias_plain}) {
            for (size_t c = 0; c < C; ++c) (*sum)[c] += static_cast<double>(before[c]);
        }
    }
    accuracy.check("dres", dtype, stored, plain.dres, reference.dres);
    accuracy.check("dw", DType::fp32, dw->values(), plain.dw, reference.dw);
    if (p.has_b) accuracy.check("db", DType::fp32, db->values(), plain.db, reference.db);
    accuracy.check("dbias", DType::fp32, dbias->values(), dbias_plain, dbias_reference);
}

/// The results of both passes of p on a stream; dres begins as p's.
struct BothPasses {
    Buffer out, stats, dres, dw, db, dbias;

    BothPasses(const TestedNorm& p, Stream& stream)
        : out(p.dtype, {p.M, p.C}),
          stats(DType::fp32, {p.M, 2}),
          dres(p.dtype, {p.M, p.C}, floats(p.dres.values())),
          dw(DType::fp32, {p.C}),
          db(DType::fp32, {p.C}),
          dbias(DType::fp32, {p.C}) {
        norm_forward(stream, {.norm = p.norm,
                              .out = out,
                              .stats = stats,
                              .x = p.x,
                              .w = p.w,
                              .b = p.has_b ? p.b.tensor() : Tensor{},
                              .epsilon = p.epsilon});
        norm_backward(stream, {.norm = p.norm,
                               .dres = dres,
                               .dw = dw.sink(false),
                               .db = db.sink(false),
                               .dy = p.dy,
                               .x = p.x,
                               .w = p.w,
                               .stats = stats,
                               .dbias = dbias.sink(false)});
    }

  private:
    static std::vector<float> floats(const std::vector<double>& values) {
        return {values.begin(), values.end()};
    }
};

}  // namespace

TEST_CASE("norm forward matches the formula in float64", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 8; ++repeat) {
            const TestedNorm p = random_problem(dtype);
            CAPTURE(described(p));
            const Buffer out(dtype, {p.M, p.C}), stats(DType::fp32, {p.M, 2});
            run_forward(p, out, stats);
            accuracy.check("out", dtype, out.values(), textbook<float>(p, true).out,
                           textbook<double>(p, false).out);
        }
    }
}

TEST_CASE("layernorm of a constant row is the bias, also with one channel", "[cuda]") {
    ON_EACH_DEVICE();
    for (int64_t C : {int64_t{1}, random_int(2, 100)}) {
        TestedNorm p(DType::fp32, 3, C);
        p.norm = Norm::layer, p.has_b = true, p.epsilon = 1e-5f;
        for (size_t i = 0; i < static_cast<size_t>(3 * C); ++i) p.x.set(i, 0.75f);
        const Buffer out(DType::fp32, {3, C}), stats(DType::fp32, {3, 2});
        run_forward(p, out, stats);
        for (size_t i = 0; i < static_cast<size_t>(3 * C); ++i)
            CHECK(out[i] == p.b[i % static_cast<size_t>(C)]);
        CHECK(stats[0] == 0.75);
        CHECK(std::abs(stats[1] - 1 / std::sqrt(1e-5)) < 1e-4);
    }
}

TEST_CASE("norm forward without statistics gives the same output", "[cuda]") {
    ON_EACH_DEVICE();
    const TestedNorm p = random_problem(DType::bf16);
    const Buffer with(p.dtype, {p.M, p.C}), without(p.dtype, {p.M, p.C}),
        stats(DType::fp32, {p.M, 2});
    run_forward(p, with, stats);
    run_forward(p, without, {});
    CHECK((with.bytes() == without.bytes()));
}

TEST_CASE("norm forward that first adds is the sum, rounded, and the norm of that", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t C :
             {random_int(8, 400), 8 * random_int(1, 60), int64_t{2056}, 8 * random_int(1025, 4096),
              8 * random_int(1025, 2560) + 1, int64_t{32776}}) {
            TestedNorm p(dtype, C > 1000 ? 2 : random_int(1, 40), C);
            const auto n = static_cast<size_t>(p.M * C);
            const Buffer residual(dtype, {p.M, C}, random_normal(n)),
                bias(dtype, {C}, random_normal(static_cast<size_t>(C)));
            const bool has_bias = random_int(0, 1) == 1;
            CAPTURE(described(p), has_bias);
            TestedNorm sum(dtype, p.M, C);  // a norm of what was stored
            sum.norm = p.norm, sum.has_b = p.has_b, sum.epsilon = p.epsilon;
            for (size_t c = 0; c < static_cast<size_t>(C); ++c) {
                sum.w.set(c, static_cast<float>(p.w[c]));
                sum.b.set(c, static_cast<float>(p.b[c]));
            }
            for (size_t i = 0; i < n; ++i) {
                const float added = static_cast<float>(p.x[i]) + static_cast<float>(residual[i]);
                sum.x.set(i, has_bias ? added + static_cast<float>(bias[i % static_cast<size_t>(C)])
                                      : added);
            }
            const Buffer expected(dtype, {p.M, C}), expected_stats(DType::fp32, {p.M, 2});
            run_forward(sum, expected, expected_stats);

            // x_out may be a buffer of its own, x or the residual.
            for (int place = 0; place < 3; ++place) {
                const std::vector<double> x = p.x.values(), r = residual.values();
                const Buffer x_in(dtype, {p.M, C}, std::vector<float>(x.begin(), x.end())),
                    residual_in(dtype, {p.M, C}, std::vector<float>(r.begin(), r.end())),
                    own(dtype, {p.M, C}), out(dtype, {p.M, C}), stats(DType::fp32, {p.M, 2});
                const Buffer& x_out = place == 0 ? own : place == 1 ? x_in : residual_in;
                TestStream stream;
                norm_forward(stream, {.norm = p.norm,
                                      .out = out,
                                      .stats = stats,
                                      .x = x_in,
                                      .w = p.w,
                                      .b = p.has_b ? p.b.tensor() : Tensor{},
                                      .residual = residual_in,
                                      .bias = has_bias ? bias.tensor() : Tensor{},
                                      .x_out = x_out,
                                      .epsilon = p.epsilon});
                CAPTURE(place);
                CHECK((x_out.bytes() == sum.x.bytes()));
                CHECK((out.bytes() == expected.bytes()));
                CHECK((stats.bytes() == expected_stats.bytes()));
            }
        }
}

TEST_CASE(
    "norm backward matches the formula in float64, writing or adding to every output as "
    "asked",
    "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 12; ++repeat) {
            TestedNorm p = random_problem(dtype);
            p.overwrite_dres = repeat % 3 == 0;
            check_backward(accuracy, p, repeat % 2 == 0);
        }
    }
}

TEST_CASE("norms take rows of any length", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    // Lengths around the limits where the CUDA kernels take another path: a warp, a block or a
    // cluster of blocks per row, on chip or not.
    for (int64_t C :
         {5,    7,    8,     33,    255,   264,   768,   1001,  1600,  2048,  2056,  3072, 3080,
          8192, 8200, 12288, 12289, 16384, 16392, 20480, 20484, 32768, 32776, 65536, 65544}) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            TestedNorm p(dtype, C < 3000 ? random_int(1, 9) : 2, C);
            p.overwrite_dres = random_int(0, 1) == 1;
            const Buffer out(dtype, {p.M, p.C}), stats(DType::fp32, {p.M, 2});
            run_forward(p, out, stats);
            CAPTURE(C, p.M);
            accuracy.check("out", dtype, out.values(), textbook<float>(p, true).out,
                           textbook<double>(p, false).out);
            check_backward(accuracy, p, random_int(0, 1) == 1);
        }
    }
}

TEST_CASE("norm backward adds up more rows than fit into one round of thread blocks", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    // About ten thousand rows, so that a group of threads reaches its fourth row even on the
    // largest GPU; rows so long that few fit; and rows for clusters of blocks.
    for (const auto& [dtype, M, C] :
         {std::tuple{DType::bf16, random_int(10000, 11000), 8 * random_int(2, 5)},
          {DType::fp32, random_int(10000, 11000), 4 * random_int(2, 9)},
          {DType::fp32, random_int(1100, 1500), 25},
          {DType::bf16, random_int(800, 900), 3080},
          {DType::bf16, random_int(600, 700), 8 * random_int(1025, 1100)},
          {DType::fp32, random_int(280, 300), 4 * random_int(2560, 5120)}}) {
        TestedNorm p(dtype, M, C);
        p.overwrite_dres = random_int(0, 1) == 1;
        check_backward(accuracy, p, random_int(0, 1) == 1);
    }
}

TEST_CASE("norm forward takes many wide rows", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    // On a GPU, a block keeps w and b, and goes from row to row.
    TestedNorm p(DType::fp32, random_int(270, 300), 4 * random_int(3300, 4096));
    p.has_b = true;
    CAPTURE(described(p));
    const Buffer out(p.dtype, {p.M, p.C}), stats(DType::fp32, {p.M, 2});
    run_forward(p, out, stats);
    const NormReference reference = textbook<double>(p, false);
    accuracy.check("out", p.dtype, out.values(), textbook<float>(p, true).out, reference.out);

    // What is added is in the sum of every row, with the same bits as in a pass of its own.
    const auto n = static_cast<size_t>(p.M * p.C);
    const Buffer bias(p.dtype, {p.C}, random_normal(static_cast<size_t>(p.C))),
        x_out(p.dtype, {p.M, p.C}), added_out(p.dtype, {p.M, p.C}),
        added_stats(DType::fp32, {p.M, 2});
    TestStream stream;
    norm_forward(stream, {.norm = p.norm,
                          .out = added_out,
                          .stats = added_stats,
                          .x = p.x,
                          .w = p.w,
                          .b = p.b,
                          .residual = p.dres,
                          .bias = bias,
                          .x_out = x_out,
                          .epsilon = p.epsilon});
    const std::vector<double> x = p.x.values(), residual = p.dres.values(), b = bias.values(),
                              sum = x_out.values();
    size_t wrong = 0;
    for (size_t i = 0; i < n; ++i) {
        const float added = static_cast<float>(x[i]) + static_cast<float>(residual[i]);
        const float expected = added + static_cast<float>(b[i % static_cast<size_t>(p.C)]);
        wrong += static_cast<float>(sum[i]) != expected;
        p.x.set(i, expected);
    }
    CHECK(wrong == 0);
    run_forward(p, out, stats);
    CHECK((added_out.bytes() == out.bytes()));
    CHECK((added_stats.bytes() == stats.bytes()));
}

TEST_CASE("norms take views that begin at any element", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const bool wide = random_int(0, 2) == 0;
        const TestedNorm p(dtype, wide ? 2 : random_int(1, 9),
                           8 * (wide ? random_int(1025, 2560) : random_int(1, 40)));
        CAPTURE(described(p));
        const int64_t n = p.M * p.C;
        const auto shifted = [&](Buffer& memory, const std::vector<double>& values) {
            for (size_t i = 0; i < values.size(); ++i)
                memory.set(i + 1, static_cast<float>(values[i]));
            return Tensor(static_cast<char*>(memory.tensor().data) + size_of(dtype), dtype,
                          {static_cast<int64_t>(values.size()) / p.C, p.C});
        };
        const auto behind_first = [](const Buffer& memory) {
            std::vector<double> values = memory.values();
            values.erase(values.begin());
            return values;
        };
        Buffer x(dtype, {n + 1}), w(dtype, {p.C + 1}), dy(dtype, {n + 1}), out(dtype, {n + 1}),
            dres(dtype, {n + 1});
        const Buffer stats(DType::fp32, {p.M, 2}), dw(DType::fp32, {p.C}), db(DType::fp32, {p.C});
        const Tensor x_view = shifted(x, p.x.values()), w_view = shifted(w, p.w.values());
        TestStream stream(norm_scratch_bytes(planning(), p.M, p.C));
        norm_forward(stream, {.norm = p.norm,
                              .out = shifted(out, p.x.values()),
                              .stats = stats,
                              .x = x_view,
                              .w = w_view,
                              .b = p.has_b ? p.b.tensor() : Tensor{},
                              .epsilon = p.epsilon});
        norm_backward(stream, {.norm = p.norm,
                               .dres = shifted(dres, p.dres.values()),
                               .dw = dw.sink(false),
                               .db = db.sink(false),
                               .dy = shifted(dy, p.dy.values()),
                               .x = x_view,
                               .w = w_view,
                               .stats = stats});
        const NormReference reference = textbook<double>(p, false),
                            plain = textbook<float>(p, true);
        accuracy.check("out", dtype, behind_first(out), plain.out, reference.out);
        accuracy.check("dres", dtype, behind_first(dres), plain.dres, reference.dres);
        accuracy.check("dw", DType::fp32, dw.values(), plain.dw, reference.dw);
        accuracy.check("db", DType::fp32, db.values(), plain.db, reference.db);
        CHECK(std::isnan(out[0]));
        CHECK(std::isnan(dres[0]));
    }
}

TEST_CASE("norms on the GPU agree with the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        TestedNorm p(dtype, random_int(1, 30), 8 * random_int(1, 100));
        const auto run = [&](Stream& stream) {
            const BothPasses r(p, stream);
            return std::vector{r.out.values(), r.dres.values(), r.stats.values(),
                               r.dw.values(),  r.db.values(),   r.dbias.values()};
        };
        std::vector<char> scratch(norm_scratch_bytes(planning({}, Device{}), p.M, p.C));
        Stream cpu;
        cpu.scratch = scratch.data();
        cpu.scratch_bytes = scratch.size();
        TestStream gpu(norm_scratch_bytes(planning(), p.M, p.C));
        const auto expected = run(cpu), ours = run(gpu);
        for (size_t result = 0; result < ours.size(); ++result) {
            // Where fp32 sums differ by a few roundings, bf16 may round to the neighbouring value;
            // the bias gradient sums such values.
            const double rounding =
                dtype == DType::bf16 && (result < 2 || result == 5) ? 0x1p-7 : 0x1p-18;
            double worst = 0;
            for (size_t i = 0; i < ours[result].size(); ++i) {
                const double terms = result < 3 ? 1.0 : 4 * std::sqrt(static_cast<double>(p.M));
                worst = worse(worst, std::abs(ours[result][i] - expected[result][i]) /
                                         (std::abs(expected[result][i]) + terms));
            }
            CAPTURE(name_of(dtype), p.M, p.C, result);
            CHECK(worst <= rounding);
        }
    }
}

TEST_CASE("norm backward matches the numerical gradient along random directions", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        const int64_t M = random_int(1, device_is_simulated() ? 10 : 40), C = random_int(8, 200);
        TestedNorm p(DType::fp32, M, C);
        const Buffer out(DType::fp32, {M, C}), stats(DType::fp32, {M, 2});
        run_forward(p, out, stats);
        const Buffer dx(DType::fp32, {M, C}), dw(DType::fp32, {C}), db(DType::fp32, {C});
        TestStream stream(norm_scratch_bytes(planning(), M, C));
        norm_backward(stream, {.norm = p.norm,
                               .dres = dx,
                               .dw = dw.sink(false),
                               .db = db.sink(false),
                               .dy = p.dy,
                               .x = p.x,
                               .w = p.w,
                               .stats = stats,
                               .overwrite_dres = true});

        const auto objective = [&] {
            run_forward(p, out, stats);
            double sum = 0;
            for (size_t i = 0; i < static_cast<size_t>(M * C); ++i) sum += p.dy[i] * out[i];
            return sum;
        };
        const auto check = [&](Buffer& input, const Buffer& gradient) {
            const std::vector<double> at = input.values();
            const std::vector<float> direction = random_normal(at.size());
            const double h = 1e-2;
            double expected = 0, norm = 0, difference = 0;
            for (int sign : {1, -1}) {
                for (size_t i = 0; i < at.size(); ++i)
                    input.set(i, static_cast<float>(at[i] + sign * h * direction[i]));
                difference += sign * objective() / (2 * h);
            }
            for (size_t i = 0; i < at.size(); ++i) {
                input.set(i, static_cast<float>(at[i]));
                expected += gradient[i] * direction[i];
                norm += gradient[i] * gradient[i];
            }
            CAPTURE(M, C, expected, difference);
            CHECK(std::abs(expected - difference) <= 5e-3 * std::sqrt(norm));
        };
        check(p.x, dx);
        check(p.w, dw);
        if (p.has_b) check(p.b, db);
    }
}

TEST_CASE("norms give the same bits whatever the number of threads, and in every run", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const bool small = device_is_simulated();
        for (const auto& [M, C] : {std::pair{small ? 40 : random_int(100, 500),
                                             small ? 8 * random_int(1, 40) : random_int(65, 300)},
                                   {random_int(5, 10), 8 * random_int(1025, 2560)}}) {
            const TestedNorm p(dtype, M, C);
            CAPTURE(described(p));
            check_thread_independence([&] {
                TestStream stream(norm_scratch_bytes(planning(), p.M, p.C));
                const BothPasses r(p, stream);
                return r.out.bytes() + r.stats.bytes() + r.dres.bytes() + r.dw.bytes() +
                       r.db.bytes() + r.dbias.bytes();
            });
        }
    }
}

}  // namespace train_gpt
