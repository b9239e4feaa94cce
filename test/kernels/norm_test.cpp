#include "kernels/layernorm.h"

#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

struct Problem {
    DType dtype;
    int64_t M, C;
    Buffer x, w, b, dy, dres;
    bool overwrite_dres = false;
    float epsilon = 1e-5f;

    static std::vector<float> around(size_t n, float centre, float stddev) {
        std::vector<float> values = random_normal(n, stddev);
        for (float& value : values) value += centre;
        return values;
    }
    Problem(DType dtype_, int64_t M_, int64_t C_)
        : dtype(dtype_),
          M(M_),
          C(C_),
          x(dtype, {M, C}, around(static_cast<size_t>(M * C), 0.5f, 2.0f)),
          w(dtype, {C}, around(static_cast<size_t>(C), 1.0f, 0.3f)),
          b(dtype, {C}, random_normal(static_cast<size_t>(C))),
          dy(dtype, {M, C}, random_normal(static_cast<size_t>(M * C))),
          dres(dtype, {M, C}, random_normal(static_cast<size_t>(M * C))) {}
};

/// The formulas of layernorm.h in Real; with `store`, stored values are rounded to the dtype.
template <class Real>
LayerNormReference textbook(const Problem& p, bool store) {
    return layernorm_reference<Real>({.M = p.M,
                                      .C = p.C,
                                      .x = p.x.values(),
                                      .w = p.w.values(),
                                      .b = p.b.values(),
                                      .dy = p.dy.values(),
                                      .dres = p.overwrite_dres ? Values() : p.dres.values(),
                                      .epsilon = static_cast<double>(p.epsilon)},
                                     store ? p.dtype : DType::fp32);
}

void run_forward(const Problem& p, const Buffer& out, const Buffer& stats) {
    TestStream stream;
    layernorm_forward(
        stream, {.out = out, .stats = stats, .x = p.x, .w = p.w, .b = p.b, .epsilon = p.epsilon});
}

Problem random_problem(DType dtype) {
    return {dtype, random_int(1, device_is_simulated() ? 30 : 150), random_int(8, 400)};
}

/// Runs the backward pass of p, adding to every sink or overwriting it, and judges all its results.
void check_backward(Accuracy& accuracy, const Problem& p, bool accumulate) {
    const DType dtype = p.dtype;
    CAPTURE(name_of(dtype), p.M, p.C, p.overwrite_dres, accumulate);
    const Buffer out(dtype, {p.M, p.C}), stats(DType::fp32, {p.M, 2});
    run_forward(p, out, stats);
    LayerNormReference reference = textbook<double>(p, false), plain = textbook<float>(p, true);

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
    TestStream stream(layernorm_scratch_bytes(planning(), p.M, p.C));
    layernorm_backward(stream, {.dres = dres,
                                .dw = dw->sink(accumulate),
                                .db = db->sink(accumulate),
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
    accuracy.check("db", DType::fp32, db->values(), plain.db, reference.db);
    accuracy.check("dbias", DType::fp32, dbias->values(), dbias_plain, dbias_reference);
}

}  // namespace

TEST_CASE("layernorm forward matches the formula in float64", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 8; ++repeat) {
            const Problem p = random_problem(dtype);
            CAPTURE(name_of(dtype), p.M, p.C);
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
        Problem p(DType::fp32, 3, C);
        for (size_t i = 0; i < static_cast<size_t>(3 * C); ++i) p.x.set(i, 0.75f);
        const Buffer out(DType::fp32, {3, C}), stats(DType::fp32, {3, 2});
        run_forward(p, out, stats);
        for (size_t i = 0; i < static_cast<size_t>(3 * C); ++i)
            CHECK(out[i] == p.b[i % static_cast<size_t>(C)]);
        CHECK(stats[0] == 0.75);
        CHECK(std::abs(stats[1] - 1 / std::sqrt(1e-5)) < 1e-4);
    }
}

TEST_CASE("layernorm forward without statistics gives the same output", "[cuda]") {
    ON_EACH_DEVICE();
    const Problem p = random_problem(DType::bf16);
    const Buffer with(p.dtype, {p.M, p.C}), without(p.dtype, {p.M, p.C}),
        stats(DType::fp32, {p.M, 2});
    run_forward(p, with, stats);
    TestStream stream;
    layernorm_forward(
        stream, {.out = without, .stats = {}, .x = p.x, .w = p.w, .b = p.b, .epsilon = p.epsilon});
    CHECK((with.bytes() == without.bytes()));
}

TEST_CASE(
    "layernorm backward matches the formula in float64, writing or adding to every output as "
    "asked",
    "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 12; ++repeat) {
            Problem p = random_problem(dtype);
            p.overwrite_dres = repeat % 3 == 0;
            check_backward(accuracy, p, repeat % 2 == 0);
        }
    }
}

TEST_CASE("layernorm takes rows of any length", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    // Lengths around the limits where the CUDA kernels take another path: a warp or a block per
    // row, in registers or not.
    for (int64_t C : {5, 7, 8, 33, 255, 264, 768, 1001, 1600, 2048, 2056, 3072, 3080, 8192, 8200,
                      16384, 32776}) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            Problem p(dtype, C < 3000 ? random_int(1, 9) : 2, C);
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

TEST_CASE("layernorm backward adds up more rows than fit into one round of thread blocks",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    // About ten thousand rows, so that a group of threads reaches its fourth row even on the
    // largest GPU; and rows so long that few fit.
    for (const auto& [dtype, M, C] :
         {std::tuple{DType::bf16, random_int(10000, 11000), 8 * random_int(2, 5)},
          {DType::fp32, random_int(10000, 11000), 4 * random_int(2, 9)},
          {DType::fp32, random_int(1100, 1500), 25},
          {DType::bf16, random_int(800, 900), 3080}}) {
        Problem p(dtype, M, C);
        p.overwrite_dres = random_int(0, 1) == 1;
        check_backward(accuracy, p, random_int(0, 1) == 1);
    }
}

TEST_CASE("layernorm takes views that begin at any element", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const Problem p(dtype, random_int(1, 9), 8 * random_int(1, 40));
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
        TestStream stream(layernorm_scratch_bytes(planning(), p.M, p.C));
        layernorm_forward(stream, {.out = shifted(out, p.x.values()),
                                   .stats = stats,
                                   .x = x_view,
                                   .w = w_view,
                                   .b = p.b});
        layernorm_backward(stream, {.dres = shifted(dres, p.dres.values()),
                                    .dw = dw.sink(false),
                                    .db = db.sink(false),
                                    .dy = shifted(dy, p.dy.values()),
                                    .x = x_view,
                                    .w = w_view,
                                    .stats = stats});
        const LayerNormReference reference = textbook<double>(p, false),
                                 plain = textbook<float>(p, true);
        accuracy.check("out", dtype, behind_first(out), plain.out, reference.out);
        accuracy.check("dres", dtype, behind_first(dres), plain.dres, reference.dres);
        accuracy.check("dw", DType::fp32, dw.values(), plain.dw, reference.dw);
        accuracy.check("db", DType::fp32, db.values(), plain.db, reference.db);
        CHECK(std::isnan(out[0]));
        CHECK(std::isnan(dres[0]));
    }
}

TEST_CASE("layernorm on the GPU agrees with the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const Problem p(dtype, random_int(1, 30), 8 * random_int(1, 100));
        const std::vector<double> dres_values = p.dres.values();
        const std::vector<float> dres_before(dres_values.begin(), dres_values.end());
        const auto run = [&](Stream& stream) {
            const Buffer out(dtype, {p.M, p.C}), stats(DType::fp32, {p.M, 2}),
                dres(dtype, {p.M, p.C}, dres_before);
            const Buffer dw(DType::fp32, {p.C}), db(DType::fp32, {p.C}), dbias(DType::fp32, {p.C});
            layernorm_forward(stream, {.out = out, .stats = stats, .x = p.x, .w = p.w, .b = p.b});
            layernorm_backward(stream, {.dres = dres,
                                        .dw = dw.sink(false),
                                        .db = db.sink(false),
                                        .dy = p.dy,
                                        .x = p.x,
                                        .w = p.w,
                                        .stats = stats,
                                        .dbias = dbias.sink(false)});
            return std::vector{out.values(), dres.values(), stats.values(),
                               dw.values(),  db.values(),   dbias.values()};
        };
        std::vector<char> scratch(layernorm_scratch_bytes(planning({}, Device{}), p.M, p.C));
        Stream cpu;
        cpu.scratch = scratch.data();
        cpu.scratch_bytes = scratch.size();
        TestStream gpu(layernorm_scratch_bytes(planning(), p.M, p.C));
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

TEST_CASE("layernorm backward matches the numerical gradient along random directions", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        const int64_t M = random_int(1, device_is_simulated() ? 10 : 40), C = random_int(8, 200);
        Problem p(DType::fp32, M, C);
        const Buffer out(DType::fp32, {M, C}), stats(DType::fp32, {M, 2});
        run_forward(p, out, stats);
        const Buffer dx(DType::fp32, {M, C}), dw(DType::fp32, {C}), db(DType::fp32, {C});
        TestStream stream(layernorm_scratch_bytes(planning(), M, C));
        layernorm_backward(stream, {.dres = dx,
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
        check(p.b, db);
    }
}

TEST_CASE("layernorm gives the same bits whatever the number of threads, and in every run",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const bool small = device_is_simulated();
        const Problem p(dtype, small ? 40 : random_int(100, 500),
                        small ? 8 * random_int(1, 40) : random_int(65, 300));
        const std::vector<double> dres_before = p.dres.values();
        const std::vector<float> before(dres_before.begin(), dres_before.end());
        check_thread_independence([&] {
            const Buffer out(dtype, {p.M, p.C}), stats(DType::fp32, {p.M, 2}),
                dres(dtype, {p.M, p.C}, before);
            const Buffer dw(DType::fp32, {p.C}), db(DType::fp32, {p.C}), dbias(DType::fp32, {p.C});
            run_forward(p, out, stats);
            TestStream stream(layernorm_scratch_bytes(planning(), p.M, p.C));
            layernorm_backward(stream, {.dres = dres,
                                        .dw = dw.sink(false),
                                        .db = db.sink(false),
                                        .dy = p.dy,
                                        .x = p.x,
                                        .w = p.w,
                                        .stats = stats,
                                        .dbias = dbias.sink(false)});
            return out.bytes() + stats.bytes() + dres.bytes() + dw.bytes() + db.bytes() +
                   dbias.bytes();
        });
    }
}

}  // namespace train_gpt
