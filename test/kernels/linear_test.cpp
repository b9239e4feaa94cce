#include "kernels/linear/linear.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>

#include "base/error.h"
#include "kernels/choices.h"
#include "kernels/gelu.h"
#include "kernels/linear/gemm.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/linear_problem.h"
#include "test/kernels/reference.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_queue.h"
#include "kernels/linear/gemm_cublas.h"
#endif

namespace train_gpt {

using namespace linear_problem;

TEST_CASE("linear forward with each epilogue is as accurate as a plain loop", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Layer& p) {
        const Values exact = p.forward<double>(), plain = p.forward<float>();
        for (bool bias : {false, true}) {
            for (bool residual : {false, true}) {
                CAPTURE(bias, residual);
                Values reference = exact, single = plain;
                for (size_t i = 0; i < reference.size(); ++i) {
                    const size_t col = i % static_cast<size_t>(p.N);
                    const double addition =
                        (bias ? p.bias[col] : 0) + (residual ? p.residual[i] : 0);
                    reference[i] += addition;
                    single[i] = static_cast<float>(single[i] + addition);
                }
                single = stored_as(p.dtype, single);
                for_each_product([&](const KernelSettings& settings) {
                    const Buffer out(p.dtype, {p.M, p.N});
                    TestStream stream(p.scratch_bytes(settings), settings);
                    LinearForward args{out, p.x, p.w};
                    if (bias) args.bias = p.bias;
                    if (residual) args.residual = p.residual;
                    linear_forward(stream, args);
                    accuracy.check("out", p.dtype, out.values(), single, reference);
                });
            }
        }
    });
}

TEST_CASE("linear forward gives unrounded results of bf16 operands, as a router needs", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Layer& p) {
        const Values exact = p.forward<double>(), plain = p.forward<float>();
        for (const bool bias : {false, true}) {
            CAPTURE(bias);
            const auto with_bias = [&](Values values) {
                for (size_t i = 0; bias && i < values.size(); ++i)
                    values[i] += p.bias[i % static_cast<size_t>(p.N)];
                return values;
            };
            for_each_product([&](const KernelSettings& settings) {
                const Buffer out(DType::fp32, {p.M, p.N});
                TestStream stream(p.scratch_bytes(settings), settings);
                LinearForward args{out, p.x, p.w};
                if (bias) args.bias = p.bias;
                linear_forward(stream, args);
                accuracy.check("out", DType::fp32, out.values(), rounded_to_float(with_bias(plain)),
                               with_bias(exact), cut_off_sums(p.dtype, p.K));
            });
        }
    });
}

TEST_CASE("linear forward with GELU keeps the preactivation and takes GELU of what it stored",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Layer& p) {
        Values reference = p.forward<double>(), plain = p.forward<float>();
        for (size_t i = 0; i < reference.size(); ++i) {
            const double addition = p.bias[i % static_cast<size_t>(p.N)];
            reference[i] += addition;
            plain[i] = static_cast<float>(plain[i] + addition);
        }
        for_each_product([&](const KernelSettings& settings) {
            const Buffer out(p.dtype, {p.M, p.N}), preact(p.dtype, {p.M, p.N});
            TestStream stream(p.scratch_bytes(settings), settings);
            LinearForward args{out, p.x, p.w, p.bias};
            args.preact = preact;
            linear_forward(stream, args);
            accuracy.check("preact", p.dtype, preact.values(), stored_as(p.dtype, plain),
                           reference);

            // What cuBLASLt takes GELU of is not rounded to bf16 yet, so that `out` is not a
            // function of preact alone.
            if (test_device().is_cuda() && p.dtype == DType::bf16) {
                Values exact = reference, rounded = stored_as(p.dtype, plain);
                for (double& value : exact) value = gelu_reference(value);
                for (double& value : rounded) value = gelu_reference(value);
                accuracy.check("out", p.dtype, out.values(), stored_as(p.dtype, rounded), exact);
                return;
            }
            Values activated = preact.values();
            for (double& value : activated) value = gelu_reference(value);
            const Values stored = out.values();
            const double rounding = p.dtype == DType::bf16 ? 0x1p-8 : 0;
            size_t wrong = 0;
            for (size_t i = 0; i < stored.size(); ++i) {
                const double allowed =
                    rounding * std::abs(activated[i]) + 2e-7 * std::abs(preact[i]) + 1e-38;
                wrong += !(std::abs(stored[i] - activated[i]) <= allowed);
            }
            CHECK(wrong == 0);
        });
    });
}

TEST_CASE("linear forward with gelu_of_preact gives the bits of gelu_forward of the preactivation",
          "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    std::set<DType> compared;
    for_each_layer([&](const Layer& p) {
        if (p.N % 16 != 0) return;
        compared.insert(p.dtype);
        for_each_product([&](const KernelSettings& settings) {
            const Buffer out(p.dtype, {p.M, p.N}), preact(p.dtype, {p.M, p.N}),
                expected(p.dtype, {p.M, p.N});
            TestStream stream(p.scratch_bytes(settings), settings);
            linear_forward(stream, {.out = out,
                                    .x = p.x,
                                    .w = p.w,
                                    .bias = p.bias,
                                    .preact = preact,
                                    .gelu_of_preact = true});
            gelu_forward(stream, expected, preact);
            CHECK((out.bytes() == expected.bytes()));
        });
    });
    CHECK(compared == std::set{DType::fp32, DType::bf16});
}

TEST_CASE(
    "linear backward of the input, with and without GELU's derivative, is as accurate as a plain "
    "loop",
    "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Layer& p) {
        const Values reference = p.backward_input<double>();
        // Where the library has no epilogue for GELU's derivative, the product is rounded before it
        // is multiplied.
        const Values plain = stored_as(p.dtype, p.backward_input<float>());
        Values sloped = reference, sloped_plain = plain;
        for (size_t i = 0; i < reference.size(); ++i) {
            const double slope = gelu_derivative_reference(p.input_preact[i]);
            sloped[i] *= slope;
            // 2.5 times this is what gelu_math.h allows a derivative in fp32.
            sloped_plain[i] *= slope + 1e-7;
        }
        sloped_plain = stored_as(p.dtype, sloped_plain);
        for_each_product([&](const KernelSettings& settings) {
            const Buffer dx(p.dtype, {p.M, p.K}), dpreact(p.dtype, {p.M, p.K});
            TestStream stream(p.scratch_bytes(settings), settings);
            linear_backward_input(stream, {dx, p.dy, p.w});
            accuracy.check("dx", p.dtype, dx.values(), plain, reference);
            linear_backward_input(stream, {dpreact, p.dy, p.w, p.input_preact});
            accuracy.check("dx after GELU", p.dtype, dpreact.values(), sloped_plain, sloped);
        });
    });
}

TEST_CASE("linear backward of weight and bias overwrites or accumulates in fp32", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Layer& p) {
        const Values dw_exact = p.backward_weight<double>(), dw_plain = p.backward_weight<float>();
        Values db_exact(static_cast<size_t>(p.N)), db_terms(static_cast<size_t>(p.N));
        for (size_t j = 0; j < db_exact.size(); ++j) {
            for (size_t i = 0; i < static_cast<size_t>(p.M); ++i) {
                const double value = p.dy[i * static_cast<size_t>(p.N) + j];
                db_exact[j] += value;
                db_terms[j] += std::abs(value);
            }
        }
        // Each term goes through at most this many fp32 additions: 34 in a slab of 128 rows, one
        // for each slab, one to accumulate.
        const double additions = 36.0 + static_cast<double>(p.M) / 128;
        const auto check_sums = [&](const Values& sums, const Values& before) {
            for (size_t j = 0; j < sums.size(); ++j) {
                CAPTURE(j, p.M, p.N);
                CHECK(std::abs(sums[j] - db_exact[j] - before[j]) <=
                      additions * 0x1p-24 * (db_terms[j] + std::abs(before[j])));
            }
        };
        for_each_product([&](const KernelSettings& settings) {
            TestStream stream(p.scratch_bytes(settings), settings);
            const Buffer dw(DType::fp32, {p.N, p.K}), db(DType::fp32, {p.N}),
                db_other(DType::fp32, {p.N}, random_normal(static_cast<size_t>(p.N), 5.0f));
            const Values db_before_other = db_other.values();
            linear_backward_weight(stream, {dw.sink(false), p.x, p.dy, db_other.sink(true)});
            check_sums(db_other.values(), db_before_other);
            linear_backward_weight(stream, {dw.sink(false), p.x, p.dy, db.sink(false)});
            accuracy.check("dw", DType::fp32, dw.values(), rounded_to_float(dw_plain), dw_exact);
            check_sums(db.values(), Values(static_cast<size_t>(p.N)));

            // A product that also sums columns may use another algorithm of a GPU's library.
            const Buffer dw_only(DType::fp32, {p.N, p.K});
            linear_backward_weight(stream, {dw_only.sink(false), p.x, p.dy});
            accuracy.check("dw alone", DType::fp32, dw_only.values(), rounded_to_float(dw_plain),
                           dw_exact);
            if (!test_device().is_cuda()) CHECK((dw_only.bytes() == dw.bytes()));

            // The sums of a later micro-batch are computed as those of the first one.
            const auto zeros = [](int64_t rows, int64_t cols) {
                return std::vector<float>(static_cast<size_t>(rows * cols), 0.0f);
            };
            const Buffer dw_added(DType::fp32, {p.N, p.K}, zeros(p.N, p.K)),
                db_added(DType::fp32, {p.N}, zeros(p.N, 1));
            linear_backward_weight(stream, {dw_added.sink(true), p.x, p.dy, db_added.sink(true)});
            if (test_device().is_cuda()) CHECK(db_added.values() == db.values());

            const auto added = [](Values values, const Values& before, bool single) {
                for (size_t i = 0; i < values.size(); ++i) {
                    values[i] += before[i];
                    if (single) values[i] = static_cast<float>(values[i]);
                }
                return values;
            };
            const Buffer dw_sum(DType::fp32, {p.N, p.K},
                                random_normal(static_cast<size_t>(p.N * p.K), 5.0f));
            const Buffer db_sum(DType::fp32, {p.N}, random_normal(static_cast<size_t>(p.N), 5.0f));
            const Values dw_before = dw_sum.values(), db_before = db_sum.values();
            linear_backward_weight(stream, {dw_sum.sink(true), p.x, p.dy, db_sum.sink(true)});
            accuracy.check("dw accumulated", DType::fp32, dw_sum.values(),
                           added(dw_plain, dw_before, true), added(dw_exact, dw_before, false));
            check_sums(db_sum.values(), db_before);
        });
    });
}

TEST_CASE("two linear layers with GELU between them match their numerical gradient", "[cuda]") {
    ON_EACH_DEVICE();
    // L = Σ g ⊙ (gelu(x·w1ᵀ + b1)·w2ᵀ + b2 + x), differentiated along a random direction of each
    // parameter.
    const int64_t M = random_int(3, 40), C = random_int(3, 40), F = random_int(3, 80);
    for (const auto& [name, settings] : products()) {
        CAPTURE(name, M, C, F);
        const auto make = [](int64_t rows, int64_t cols, float stddev) {
            return std::make_unique<Buffer>(
                DType::fp32, std::initializer_list<int64_t>{rows, cols},
                random_normal(static_cast<size_t>(rows * cols), stddev));
        };
        const float w_stddev = 1.0f / std::sqrt(static_cast<float>(C));
        const auto x = make(M, C, 1), w1 = make(F, C, w_stddev), b1 = make(1, F, 1),
                   w2 = make(C, F, w_stddev), b2 = make(1, C, 1), g = make(M, C, 1);
        const Stream plan = planning(settings);
        TestStream stream(std::max(linear_scratch_bytes(plan, DType::fp32, M, F, C),
                                   linear_scratch_bytes(plan, DType::fp32, M, C, F)),
                          settings);
        const Buffer preact(DType::fp32, {M, F}), hidden(DType::fp32, {M, F}),
            out(DType::fp32, {M, C});
        const auto loss = [&] {
            linear_forward(stream, {hidden, *x, *w1, *b1, {}, preact});
            linear_forward(stream, {out, hidden, *w2, *b2, *x, {}});
            double sum = 0;
            for (size_t i = 0; i < static_cast<size_t>(M * C); ++i) sum += (*g)[i] * out[i];
            return sum;
        };
        loss();
        Buffer dx(DType::fp32, {M, C});
        const Buffer dhidden(DType::fp32, {M, F}), dw1(DType::fp32, {F, C}), db1(DType::fp32, {F}),
            dw2(DType::fp32, {C, F}), db2(DType::fp32, {C});
        linear_backward_weight(stream, {dw2.sink(false), hidden, *g, db2.sink(false)});
        linear_backward_input(stream, {dhidden, *g, *w2, preact});
        linear_backward_weight(stream, {dw1.sink(false), *x, dhidden, db1.sink(false)});
        linear_backward_input(stream, {dx, dhidden, *w1});
        for (size_t i = 0; i < static_cast<size_t>(M * C); ++i)
            dx.set(i, static_cast<float>(dx[i] + (*g)[i]));

        const auto check_direction = [&](const std::string& what, Buffer& parameter,
                                         const Buffer& gradient) {
            const std::vector<float> direction =
                random_normal(static_cast<size_t>(parameter.tensor().numel()));
            const Values before = parameter.values();
            double expected = 0, scale = 0;
            for (size_t i = 0; i < direction.size(); ++i) {
                expected += direction[i] * gradient[i];
                scale += direction[i] * gradient[i] * direction[i] * gradient[i];
            }
            const double step = 1e-3;
            double difference = 0;
            for (double sign : {1.0, -1.0}) {
                for (size_t i = 0; i < direction.size(); ++i) {
                    parameter.set(i, static_cast<float>(before[i] + sign * step * direction[i]));
                }
                difference += sign * loss();
            }
            for (size_t i = 0; i < direction.size(); ++i)
                parameter.set(i, static_cast<float>(before[i]));
            const double quotient = difference / (2 * step);
            CAPTURE(what, quotient, expected);
            // The quotient's own error: rounding of out (2⁻²⁴ over the step) and the third
            // derivative.
            CHECK(std::abs(quotient - expected) <= 0.01 * std::sqrt(scale) + 0.02);
        };
        check_direction("x", *x, dx);
        check_direction("w1", *w1, dw1);
        check_direction("b1", *b1, db1);
        check_direction("w2", *w2, dw2);
        check_direction("b2", *b2, db2);
    }
}

TEST_CASE("a linear layer gives the same bits when it is run again", "[cuda]") {
    ON_EACH_DEVICE();
    for (const auto& [name, settings] : products()) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            const Layer p(dtype, random_int(1, 300), random_int(1, 300), random_int(1, 300));
            CAPTURE(name, name_of(dtype), p.M, p.N, p.K);
            std::string choices;  // made by timing, which may decide otherwise in the next run
            const auto run = [&] {
                TestStream stream(p.scratch_bytes(settings), settings);
                if (!choices.empty()) set_kernel_choices(stream, choices);
                const Buffer out(dtype, {p.M, p.N}), preact(dtype, {p.M, p.N}),
                    dx(dtype, {p.M, p.K});
                const Buffer dw(DType::fp32, {p.N, p.K}), db(DType::fp32, {p.N});
                linear_forward(stream, {out, p.x, p.w, p.bias, {}, preact});
                linear_backward_input(stream, {dx, p.dy, p.w, p.input_preact});
                linear_backward_weight(stream, {dw.sink(false), p.x, p.dy, db.sink(false)});
                choices = kernel_choices(stream);
                return out.bytes() + preact.bytes() + dx.bytes() + dw.bytes() + db.bytes();
            };
            const std::string first = run();
            CHECK((run() == first));
            if (name != "onednn") check_thread_independence(run);
        }
    }
}

TEST_CASE(
    "the own matrix product gives each row the same bits in whatever company it is computed") {
    const KernelSettings settings{.gemm = KernelSettings::Gemm::own};
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const Layer p(dtype, random_int(2, 300), random_int(1, 300), random_int(300, 900));
        const int64_t cut = random_int(1, p.M - 1);
        CAPTURE(name_of(dtype), p.M, p.N, p.K, cut);
        TestStream stream(p.scratch_bytes(settings), settings);
        const Buffer whole(dtype, {p.M, p.N}), parts(dtype, {p.M, p.N});
        linear_forward(stream, {whole, p.x, p.w, p.bias, p.residual, {}});
        for (const auto& [first, count] : {std::pair{int64_t{0}, cut}, std::pair{cut, p.M - cut}}) {
            linear_forward(stream, {parts.tensor().row_range(first, count),
                                    p.x.tensor().row_range(first, count),
                                    p.w,
                                    p.bias,
                                    p.residual.tensor().row_range(first, count),
                                    {}});
        }
        CHECK((whole.bytes() == parts.bytes()));
    }
}

TEST_CASE("scratch for M rows serves every smaller number of rows", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const auto& [name, settings] : products()) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            const int64_t most = random_int(1025, 1100), N = random_int(1, 40),
                          K = random_int(1, 40);
            TestStream stream(linear_scratch_bytes(planning(settings), dtype, most, N, K),
                              settings);
            for (int64_t M :
                 {most, int64_t{1025}, int64_t{1024}, random_int(1, 1024), int64_t{1}}) {
                const Layer p(dtype, M, N, K);
                CAPTURE(name, name_of(dtype), M, N, K);
                const Buffer out(dtype, {M, N}), dw(DType::fp32, {N, K}), dx(dtype, {M, K});
                linear_forward(stream, {out, p.x, p.w, p.bias, p.residual, {}});
                linear_backward_input(stream, {dx, p.dy, p.w});
                linear_backward_weight(stream, {dw.sink(false), p.x, p.dy});
                const Values exact = p.backward_weight<double>();
                const Values plain = p.backward_weight<float>();
                // A tensor core adds 16 products at a time to its sum.
                const int64_t cut_off = cut_off_sums(dtype, M);
                accuracy.check("dw", DType::fp32, dw.values(), plain, exact, cut_off);
            }
        }
    }
}

TEST_CASE("the automatic choice of a matrix product serves rows a page apart") {
    Accuracy accuracy;
    const Layer p(DType::fp32, random_int(1, 40), random_int(1, 40), 1024);
    TestStream stream(p.scratch_bytes());
    const Buffer dx(p.dtype, {p.M, p.K}), dw(p.dtype, {p.N, p.K});
    linear_backward_input(stream, {dx, p.dy, p.w});
    accuracy.check("dx", p.dtype, dx.values(), p.backward_input<float>(),
                   p.backward_input<double>());
    linear_backward_weight(stream, {dw.sink(false), p.x, p.dy});
    accuracy.check("dw", p.dtype, dw.values(), p.backward_weight<float>(),
                   p.backward_weight<double>());
}

TEST_CASE("a linear layer on a GPU is as accurate as on the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    if (!test_device().is_cuda()) return;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (const auto& [M, N, K] : {Extent{24, 40, 72}, Extent{19, 37, 50}}) {
            const Layer p(dtype, M, N, K);
            CAPTURE(name_of(dtype), M, N, K);
            struct Results {
                Buffer out, preact, gelu, dx, dpreact, dw, db;
                explicit Results(const Layer& p)
                    : out(p.dtype, {p.M, p.N}),
                      preact(p.dtype, {p.M, p.N}),
                      gelu(p.dtype, {p.M, p.N}),
                      dx(p.dtype, {p.M, p.K}),
                      dpreact(p.dtype, {p.M, p.K}),
                      dw(DType::fp32, {p.N, p.K}),
                      db(DType::fp32, {p.N}) {}
            };
            const auto run = [&](Stream& stream, const Results& r) {
                linear_forward(stream, {r.out, p.x, p.w, p.bias, p.residual, {}});
                linear_forward(stream, {r.gelu, p.x, p.w, p.bias, {}, r.preact});
                linear_backward_input(stream, {r.dx, p.dy, p.w});
                linear_backward_input(stream, {r.dpreact, p.dy, p.w, p.input_preact});
                linear_backward_weight(stream, {r.dw.sink(false), p.x, p.dy, r.db.sink(false)});
                linear_backward_weight(stream, {r.dw.sink(true), p.x, p.dy, r.db.sink(true)});
            };
            const Results ours(p), cpu(p);
            TestStream stream(p.scratch_bytes());
            HostStream host(linear_scratch_bytes(planning({}, Device{}), dtype, M, N, K));
            run(stream, ours);
            run(host, cpu);

            Values product = p.forward<double>(), sum, activated;
            for (size_t i = 0; i < product.size(); ++i) {
                product[i] += p.bias[i % static_cast<size_t>(N)];
                sum.push_back(product[i] + p.residual[i]);
                activated.push_back(gelu_reference(product[i]));
            }
            Values dx = p.backward_input<double>(), dpreact;
            for (size_t i = 0; i < dx.size(); ++i)
                dpreact.push_back(dx[i] * gelu_derivative_reference(p.input_preact[i]));
            Values dw = p.backward_weight<double>(), db(static_cast<size_t>(N));
            for (double& value : dw) value *= 2;
            for (size_t i = 0; i < product.size(); ++i)
                db[i % static_cast<size_t>(N)] += 2 * p.dy[i];
            accuracy.check("out", dtype, ours.out.values(), cpu.out.values(), sum);
            accuracy.check("preact", dtype, ours.preact.values(), cpu.preact.values(), product);
            accuracy.check("gelu", dtype, ours.gelu.values(), cpu.gelu.values(), activated);
            accuracy.check("dx", dtype, ours.dx.values(), cpu.dx.values(), dx);
            accuracy.check("dpreact", dtype, ours.dpreact.values(), cpu.dpreact.values(), dpreact);
            accuracy.check("dw", DType::fp32, ours.dw.values(), cpu.dw.values(), dw);
            accuracy.check("db", DType::fp32, ours.db.values(), cpu.db.values(), db);
        }
    }
}

TEST_CASE("linear layers take rows of larger matrices, which begin at any element", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (const Extent& e : {Extent{9, 17, 23}, Extent{9, 16, 24}, Extent{5, 12, 3}}) {
            const int64_t M = e.M, N = e.N, K = e.K;
            const Layer p(dtype, M, N, K);
            CAPTURE(name_of(dtype), M, N, K);
            const Buffer out(dtype, {M, N}), preact(dtype, {M, N}), gelu(dtype, {M, N}),
                dx(dtype, {M, K}), dw(DType::fp32, {N, K}), db(DType::fp32, {N});
            TestStream stream(p.scratch_bytes());
            const int64_t rows = M - 1;
            const auto tail = [&](const Buffer& matrix) {
                return matrix.tensor().row_range(1, rows);
            };
            linear_forward(stream, {tail(out), tail(p.x), p.w, p.bias, tail(p.residual), {}});
            linear_forward(stream, {tail(gelu), tail(p.x), p.w, p.bias, {}, tail(preact)});
            linear_backward_input(stream, {tail(dx), tail(p.dy), p.w, tail(p.input_preact)});
            linear_backward_weight(stream, {dw.sink(false), tail(p.x), tail(p.dy), db.sink(false)});

            const auto last_rows = [&](Values values) {
                values.erase(values.begin(),
                             values.begin() + static_cast<std::ptrdiff_t>(values.size()) / M);
                return values;
            };
            const auto untouched = [&](const Buffer& matrix) {
                for (int64_t i = 0; i < matrix.tensor().cols(); ++i)
                    CHECK(std::isnan(matrix[static_cast<size_t>(i)]));
            };
            // Plain results are rounded before and after what an epilogue would add.
            const Values product = p.forward<double>(),
                         plain_product = stored_as(dtype, p.forward<float>()),
                         gradient = p.backward_input<double>(),
                         plain_gradient = stored_as(dtype, p.backward_input<float>());
            const auto check = [&](const char* what, const Buffer& ours, const Values& exact,
                                   const Values& plain,
                                   const std::function<double(size_t, double)>& epilogue) {
                Values finished_exact, finished_plain;
                for (size_t i = 0; i < exact.size(); ++i) {
                    finished_exact.push_back(epilogue(i, exact[i]));
                    finished_plain.push_back(epilogue(i, plain[i]));
                }
                accuracy.check(what, dtype, last_rows(ours.values()),
                               last_rows(stored_as(dtype, finished_plain)),
                               last_rows(finished_exact));
                untouched(ours);
            };
            const auto bias = [&](size_t i) { return p.bias[i % static_cast<size_t>(N)]; };
            check("out", out, product, plain_product,
                  [&](size_t i, double value) { return value + bias(i) + p.residual[i]; });
            check("preact", preact, product, plain_product,
                  [&](size_t i, double value) { return value + bias(i); });
            check("gelu", gelu, product, plain_product,
                  [&](size_t i, double value) { return gelu_reference(value + bias(i)); });
            check("dx", dx, gradient, plain_gradient, [&](size_t i, double value) {
                return value * gelu_derivative_reference(p.input_preact[i]);
            });

            const Values dw_whole = p.backward_weight<double>();
            Values dw_exact = dw_whole;
            for (int64_t j = 0; j < N; ++j) {
                for (int64_t c = 0; c < K; ++c)
                    dw_exact[static_cast<size_t>(j * K + c)] -=
                        p.dy[static_cast<size_t>(j)] * p.x[static_cast<size_t>(c)];
                double column = 0;
                for (int64_t i = 1; i < M; ++i) column += p.dy[static_cast<size_t>(i * N + j)];
                CHECK(std::abs(db[static_cast<size_t>(j)] - column) <= 1e-5);
            }
            accuracy.check("dw", DType::fp32, dw.values(), rounded_to_float(dw_exact), dw_exact);
        }
    }
}

#ifdef TRAIN_GPT_CUDA
namespace {

/// The lines of kernel_choices().
std::vector<std::vector<std::string>> words_of(const std::string& choices) {
    std::vector<std::vector<std::string>> words;
    std::istringstream lines(choices);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream from(line);
        words.emplace_back(std::istream_iterator<std::string>(from),
                           std::istream_iterator<std::string>());
    }
    return words;
}

std::string text_of(const std::vector<std::vector<std::string>>& words) {
    std::string text;
    for (const auto& line : words)
        for (const std::string& word : line) text += word + (&word == &line.back() ? "\n" : " ");
    return text;
}

}  // namespace

TEST_CASE("matrix algorithms that a run has chosen are used again", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const Layer p(DType::bf16, 64, 128, 144), small(DType::bf16, 8, 16, 24);
    const auto run = [&](Stream& stream) {
        std::string bytes;
        for (const Layer* layer : {&p, &small}) {
            const Buffer out(DType::bf16, {layer->M, layer->N}),
                preact(DType::bf16, {layer->M, layer->N}), dx(DType::bf16, {layer->M, layer->K}),
                dw(DType::fp32, {layer->N, layer->K}), db(DType::fp32, {layer->N});
            linear_forward(stream, {out, layer->x, layer->w, layer->bias, {}, preact});
            linear_forward(stream, {out, layer->x, layer->w, layer->bias, layer->residual, {}});
            linear_backward_input(stream, {dx, layer->dy, layer->w, layer->input_preact});
            linear_backward_weight(stream, {dw.sink(false), layer->x, layer->dy, db.sink(false)});
            linear_backward_weight(stream, {dw.sink(true), layer->x, layer->dy, db.sink(true)});
            bytes += out.bytes() + preact.bytes() + dx.bytes() + dw.bytes() + db.bytes();
        }
        return bytes;
    };

    TestStream first(p.scratch_bytes(), {.autotune = true});
    CHECK(kernel_choices(first).empty());
    const std::string results = run(first), choices = kernel_choices(first);
    // Of each layer four products, with their epilogues and, since those were timed, without.
    CHECK(std::count(choices.begin(), choices.end(), '\n') == 14);
    CHECK((run(first) == results));
    CHECK(kernel_choices(first) == choices);

    TestStream again(p.scratch_bytes(), {.autotune = true});
    set_kernel_choices(again, choices);
    CHECK(kernel_choices(again) == choices);
    CHECK((run(again) == results));
    CHECK(kernel_choices(again) == choices);

    // The simulated library takes a small product's algorithm, which needs no workspace, for a
    // large one too.
    TestStream other(p.scratch_bytes());
    run(other);
    const std::string untimed = kernel_choices(other);
    const size_t algorithm_word = 15;
    std::vector<std::vector<std::string>> words = words_of(untimed);
    REQUIRE(text_of(words) == untimed);
    if (device_is_simulated()) {
        std::vector<size_t> forward;
        for (size_t i = 0; i < words.size(); ++i)
            if (words[i][3] == "bias_gelu") forward.push_back(i);
        REQUIRE(forward.size() == 2);
        std::swap_ranges(words[forward[0]].begin() + algorithm_word, words[forward[0]].end(),
                         words[forward[1]].begin() + algorithm_word);
        REQUIRE(text_of(words) != untimed);
        set_kernel_choices(other, text_of(words));
        run(other);
        CHECK(kernel_choices(other) == text_of(words));
    }
    // What is no algorithm is passed over.
    for (auto& line : words)
        for (size_t i = algorithm_word; i < line.size(); ++i) line[i] = "1";
    set_kernel_choices(other, text_of(words));
    run(other);
    CHECK(kernel_choices(other) == untimed);

    size_t cut = 0;  // within a line; fewer whole lines are no damage
    do {
        cut = static_cast<size_t>(random_int(1, static_cast<int64_t>(choices.size()) - 1));
    } while (choices[cut - 1] == '\n');
    CAPTURE(cut);
    for (const std::string& damaged :
         {std::string("nonsense\n"), choices.substr(0, cut), choices + "nt\n"})
        CHECK_THROWS_AS(set_kernel_choices(other, damaged), Error);
}

TEST_CASE("a product and what follows it are computed together or separately, as chosen",
          "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    using Epilogues = KernelSettings::Epilogues;
    Layer p(DType::bf16, 8 * random_int(8, 20), 8 * random_int(2, 9), 8 * random_int(2, 9));
    CAPTURE(p.M, p.N, p.K);
    // Of such different sizes that each order of a sum is rounded differently.
    for (size_t i = 0; i < static_cast<size_t>(p.M * p.N); ++i)
        p.dy.set(i, static_cast<float>(std::pow(p.dy[i], 5)));
    const auto run = [&](Stream& stream) {
        const Buffer out(DType::bf16, {p.M, p.N}), preact(DType::bf16, {p.M, p.N}),
            dx(DType::bf16, {p.M, p.K}), dw(DType::fp32, {p.N, p.K}), db(DType::fp32, {p.N});
        linear_forward(stream, {out, p.x, p.w, p.bias, {}, preact});
        linear_backward_input(stream, {dx, p.dy, p.w, p.input_preact});
        linear_backward_weight(stream, {dw.sink(false), p.x, p.dy, db.sink(false)});
        linear_backward_weight(stream, {dw.sink(true), p.x, p.dy, db.sink(true)});
        return std::vector{out.bytes() + preact.bytes(), dx.bytes(), dw.bytes() + db.bytes()};
    };
    const auto run_with = [&](const std::string& choices) {
        TestStream stream(p.scratch_bytes(), {.autotune = true});
        set_kernel_choices(stream, choices);
        return run(stream);
    };
    TestStream fused(p.scratch_bytes(), {.epilogues = Epilogues::fused}),
        separate(p.scratch_bytes(), {.epilogues = Epilogues::separate});
    const std::vector<std::string> together = run(fused), apart = run(separate);
    for (size_t i = 0; i < together.size(); ++i) {  // they round differently
        CAPTURE(i);
        CHECK(together[i] != apart[i]);
    }
    // With the simulated library all algorithms of a product give the same bits.
    if (!device_is_simulated()) return;
    std::vector<std::vector<std::string>> words = words_of(kernel_choices(fused));
    REQUIRE(words.size() == 3);
    CHECK((run_with(text_of(words)) == together));
    for (auto& line : words) {
        REQUIRE(line[14] == "product");
        line.resize(15);
        line[14] = "separate";
    }
    CHECK((run_with(text_of(words)) == apart));
    const std::vector<std::string> chosen = run_with("");
    for (size_t i = 0; i < chosen.size(); ++i)
        CHECK((chosen[i] == together[i] || chosen[i] == apart[i]));
    // Without timing: bias gradients separately, the others together.
    TestStream untimed(p.scratch_bytes());
    const std::vector<std::string> usual = run(untimed);
    CHECK((usual == std::vector{together[0], together[1], apart[2]}));
}

TEST_CASE("products get up to 128 MiB of workspace, which the plan counts", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    constexpr size_t MiB = size_t{1} << 20;
    CHECK(cuda::gemm_workspace_bytes(1, 1) == 32 * MiB);
    CHECK(cuda::gemm_workspace_bytes(512, 1024) == 64 * MiB);
    CHECK(cuda::gemm_workspace_bytes(50304, 50304) == 128 * MiB);
    for (int i = 0; i < 20; ++i) {
        const int64_t M = random_int(1, 4000), N = random_int(1, 4000), K = random_int(1, 4000);
        const size_t scratch = linear_scratch_bytes(planning(), DType::bf16, M, N, K);
        for (const size_t product :
             {cuda::gemm_workspace_bytes(M, N), cuda::gemm_workspace_bytes(M, K),
              cuda::gemm_workspace_bytes(N, K) + static_cast<size_t>(N) * sizeof(float)})
            CHECK(scratch >= product);
    }
}

TEST_CASE("TF32 is used for fp32 matrices where it is asked for, and only there", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const Layer p(DType::fp32, 32, 40, 64);
    const Buffer out(DType::fp32, {32, 40});
    const Values exact = p.forward<double>();
    const auto worst_error = [&](bool tf32) {
        TestStream stream(p.scratch_bytes(), {.tf32 = tf32});
        linear_forward(stream, {out, p.x, p.w});
        double worst = 0;
        for (size_t i = 0; i < exact.size(); ++i) worst = worse(worst, std::abs(out[i] - exact[i]));
        return worst;
    };
    CHECK(worst_error(false) < 1e-5);
    const double with_tf32 = worst_error(true);
    CHECK(with_tf32 > 2e-5);
    CHECK(with_tf32 < 1e-2);
}
#endif

}  // namespace train_gpt
