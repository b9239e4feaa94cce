#include "kernels/linear.h"

#include "kernels/error.h"
#include "kernels/gemm.h"
#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

std::vector<std::string> libraries() {
#ifdef TRAIN_GPT_ONEDNN
    return {"own", "onednn"};
#else
    return {"own"};
#endif
}

/// Chooses a matrix product while it lives.
struct Library {
    explicit Library(const std::string& name) { select_cpu_gemm(name); }
    ~Library() { select_cpu_gemm("auto"); }
};

double gelu_reference(double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

double derivative_reference(double x) {
    const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), t = std::tanh(u);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

using Values = std::vector<double>;

/// c[i, j] = Σ_k a(i, k)·b(k, j), summed one after the other in Real.
template <class Real>
Values textbook_product(const Buffer& a, bool a_transposed, const Buffer& b, bool b_transposed,
                        int64_t m, int64_t n, int64_t k) {
    const Values a_values = a.values(), b_values = b.values();
    std::vector<Real> left(static_cast<size_t>(m * k)), right(static_cast<size_t>(n * k));
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t d = 0; d < k; ++d) {
            left[static_cast<size_t>(i * k + d)] = static_cast<Real>(
                a_values[static_cast<size_t>(a_transposed ? d * m + i : i * k + d)]);
        }
    }
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t d = 0; d < k; ++d) {
            right[static_cast<size_t>(j * k + d)] = static_cast<Real>(
                b_values[static_cast<size_t>(b_transposed ? j * k + d : d * n + j)]);
        }
    }
    Values c(static_cast<size_t>(m * n));
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            const Real *x = &left[static_cast<size_t>(i * k)],
                       *y = &right[static_cast<size_t>(j * k)];
            Real sum = 0;
            for (int64_t d = 0; d < k; ++d) sum += x[d] * y[d];
            c[static_cast<size_t>(i * n + j)] = sum;
        }
    }
    return c;
}

Values rounded_to_float(Values values) { return stored_as(DType::fp32, std::move(values)); }

/// One layer with random contents: x [M, K], w [N, K], dy [M, N].
struct Layer {
    DType dtype;
    int64_t M, N, K;
    Buffer x, w, bias, residual, dy, input_preact;

    Layer(DType dtype_, int64_t M_, int64_t N_, int64_t K_)
        : dtype(dtype_),
          M(M_),
          N(N_),
          K(K_),
          x(dtype, {M, K}, random_normal(static_cast<size_t>(M * K))),
          w(dtype, {N, K},
            random_normal(static_cast<size_t>(N * K), 1.0f / std::sqrt(static_cast<float>(K)))),
          bias(dtype, {N}, random_normal(static_cast<size_t>(N))),
          residual(dtype, {M, N}, random_normal(static_cast<size_t>(M * N))),
          dy(dtype, {M, N}, random_normal(static_cast<size_t>(M * N))),
          input_preact(dtype, {M, K}, random_normal(static_cast<size_t>(M * K), 2.0f)) {}

    size_t scratch_bytes() const { return linear_scratch_bytes({}, dtype, M, N, K); }
};

struct Extent {
    int64_t M, N, K;
};

/// Odd sizes, sizes around the tiles, and the shapes of small transformers.
std::vector<Extent> extents() {
    std::vector<Extent> result{{1, 1, 1},      {1, 300, 7},   {300, 1, 65},   {2, 33, 300},
                               {15, 31, 17},   {64, 192, 64}, {13, 1024, 40}, {50, 48, 1024},
                               {129, 96, 768}, {520, 64, 33}};
    for (int i = 0; i < 6; ++i)
        result.push_back({random_int(1, 300), random_int(1, 300), random_int(1, 300)});
    return result;
}

void for_each_layer(const std::function<void(const Layer&)>& check) {
    for (const Extent& e : extents()) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            CAPTURE(name_of(dtype), e.M, e.N, e.K);
            check(Layer(dtype, e.M, e.N, e.K));
        }
    }
}

void for_each_library(const std::function<void()>& check) {
    for (const std::string& name : libraries()) {
        const Library library(name);
        CAPTURE(name);
        check();
    }
}

}  // namespace

TEST_CASE("linear forward with each epilogue is as accurate as a plain loop") {
    for_each_layer([](const Layer& p) {
        const Values exact = textbook_product<double>(p.x, false, p.w, true, p.M, p.N, p.K);
        const Values plain = textbook_product<float>(p.x, false, p.w, true, p.M, p.N, p.K);
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
                for_each_library([&] {
                    const Buffer out(p.dtype, {p.M, p.N});
                    TestStream stream(p.scratch_bytes());
                    LinearForward args{out, p.x, p.w};
                    if (bias) args.bias = p.bias;
                    if (residual) args.residual = p.residual;
                    linear_forward(stream, args);
                    check_accuracy("out", p.dtype, out.values(), single, reference);
                });
            }
        }
    });
}

TEST_CASE("linear forward with GELU keeps the preactivation and takes GELU of what it stored") {
    for_each_layer([](const Layer& p) {
        Values reference = textbook_product<double>(p.x, false, p.w, true, p.M, p.N, p.K);
        Values plain = textbook_product<float>(p.x, false, p.w, true, p.M, p.N, p.K);
        for (size_t i = 0; i < reference.size(); ++i) {
            const double addition = p.bias[i % static_cast<size_t>(p.N)];
            reference[i] += addition;
            plain[i] = static_cast<float>(plain[i] + addition);
        }
        for_each_library([&] {
            const Buffer out(p.dtype, {p.M, p.N}), preact(p.dtype, {p.M, p.N});
            TestStream stream(p.scratch_bytes());
            LinearForward args{out, p.x, p.w, p.bias};
            args.preact = preact;
            linear_forward(stream, args);
            check_accuracy("preact", p.dtype, preact.values(), stored_as(p.dtype, plain),
                           reference);

            Values activated = preact.values();
            for (double& value : activated) value = gelu_reference(value);
            const Values stored = out.values();
            const double rounding = p.dtype == DType::bf16 ? 0x1p-8 : 0;
            double worst = 0;
            for (size_t i = 0; i < stored.size(); ++i) {
                const double allowed =
                    rounding * std::abs(activated[i]) + 2e-7 * std::abs(preact[i]) + 1e-38;
                const double excess = std::abs(stored[i] - activated[i]) / allowed;
                worst = excess <= worst ? worst : excess;  // a NaN stays
            }
            CHECK(worst <= 1);
        });
    });
}

TEST_CASE(
    "linear backward of the input, with and without GELU's derivative, is as accurate as a plain "
    "loop") {
    for_each_layer([](const Layer& p) {
        const Values reference = textbook_product<double>(p.dy, false, p.w, false, p.M, p.K, p.N);
        Values plain = textbook_product<float>(p.dy, false, p.w, false, p.M, p.K, p.N);
        Values sloped = reference, sloped_plain = plain;
        for (size_t i = 0; i < reference.size(); ++i) {
            const double slope = derivative_reference(p.input_preact[i]);
            sloped[i] *= slope;
            sloped_plain[i] = static_cast<float>(plain[i] * slope);
        }
        plain = stored_as(p.dtype, plain);
        sloped_plain = stored_as(p.dtype, sloped_plain);
        for_each_library([&] {
            const Buffer dx(p.dtype, {p.M, p.K}), dpreact(p.dtype, {p.M, p.K});
            TestStream stream(p.scratch_bytes());
            linear_backward_input(stream, {dx, p.dy, p.w});
            check_accuracy("dx", p.dtype, dx.values(), plain, reference);
            linear_backward_input(stream, {dpreact, p.dy, p.w, p.input_preact});
            check_accuracy("dx behind GELU", p.dtype, dpreact.values(), sloped_plain, sloped);
        });
    });
}

TEST_CASE("linear backward of weight and bias overwrites or accumulates in fp32") {
    for_each_layer([](const Layer& p) {
        const Values dw_exact = textbook_product<double>(p.dy, true, p.x, false, p.N, p.K, p.M);
        const Values dw_plain = textbook_product<float>(p.dy, true, p.x, false, p.N, p.K, p.M);
        Values db_exact(static_cast<size_t>(p.N)), db_terms(static_cast<size_t>(p.N));
        for (size_t j = 0; j < db_exact.size(); ++j) {
            for (size_t i = 0; i < static_cast<size_t>(p.M); ++i) {
                const double value = p.dy[i * static_cast<size_t>(p.N) + j];
                db_exact[j] += value;
                db_terms[j] += std::abs(value);
            }
        }
        // Each term goes through at most this many fp32 additions: 34 in a slab of 128 rows, one for each slab, one to accumulate.
        const double additions = 36.0 + static_cast<double>(p.M) / 128;
        const auto check_sums = [&](const Values& sums, const Values& before) {
            for (size_t j = 0; j < sums.size(); ++j) {
                CAPTURE(j, p.M, p.N);
                CHECK(std::abs(sums[j] - db_exact[j] - before[j]) <=
                      additions * 0x1p-24 * (db_terms[j] + std::abs(before[j])));
            }
        };
        for_each_library([&] {
            TestStream stream(p.scratch_bytes());
            const Buffer dw(DType::fp32, {p.N, p.K}), db(DType::fp32, {p.N});
            linear_backward_weight(stream, {dw.sink(false), p.x, p.dy, db.sink(false)});
            check_accuracy("dw", DType::fp32, dw.values(), rounded_to_float(dw_plain), dw_exact);
            check_sums(db.values(), Values(static_cast<size_t>(p.N)));

            const Buffer dw_only(DType::fp32, {p.N, p.K});
            linear_backward_weight(stream, {dw_only.sink(false), p.x, p.dy});
            CHECK((dw_only.bytes() == dw.bytes()));

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
            check_accuracy("dw accumulated", DType::fp32, dw_sum.values(),
                           added(dw_plain, dw_before, true), added(dw_exact, dw_before, false));
            check_sums(db_sum.values(), db_before);
        });
    });
}

TEST_CASE("two linear layers with GELU between them match their numerical gradient") {
    // L = Σ g ⊙ (gelu(x·w1ᵀ + b1)·w2ᵀ + b2 + x), differentiated along a random direction of each
    // parameter.
    const int64_t M = random_int(3, 40), C = random_int(3, 40), F = random_int(3, 80);
    for (const std::string& name : libraries()) {
        const Library library(name);
        CAPTURE(name, M, C, F);
        const auto make = [](int64_t rows, int64_t cols, float stddev) {
            return std::make_unique<Buffer>(
                DType::fp32, std::initializer_list<int64_t>{rows, cols},
                random_normal(static_cast<size_t>(rows * cols), stddev));
        };
        const float w_stddev = 1.0f / std::sqrt(static_cast<float>(C));
        const auto x = make(M, C, 1), w1 = make(F, C, w_stddev), b1 = make(1, F, 1),
                   w2 = make(C, F, w_stddev), b2 = make(1, C, 1), g = make(M, C, 1);
        TestStream stream(std::max(linear_scratch_bytes({}, DType::fp32, M, F, C),
                                  linear_scratch_bytes({}, DType::fp32, M, C, F)));
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

TEST_CASE("a linear layer gives the same bits when it is run again") {
    for (const std::string& name : libraries()) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            const Library library(name);
            const Layer p(dtype, random_int(1, 300), random_int(1, 300), random_int(1, 300));
            CAPTURE(name, name_of(dtype), p.M, p.N, p.K);
            const auto run = [&] {
                TestStream stream(p.scratch_bytes());
                const Buffer out(dtype, {p.M, p.N}), preact(dtype, {p.M, p.N}),
                    dx(dtype, {p.M, p.K});
                const Buffer dw(DType::fp32, {p.N, p.K}), db(DType::fp32, {p.N});
                linear_forward(stream, {out, p.x, p.w, p.bias, {}, preact});
                linear_backward_input(stream, {dx, p.dy, p.w, p.input_preact});
                linear_backward_weight(stream, {dw.sink(false), p.x, p.dy, db.sink(false)});
                return out.bytes() + preact.bytes() + dx.bytes() + dw.bytes() + db.bytes();
            };
            const std::string first = run();
            CHECK((run() == first));
            if (name == "own") check_thread_independence(run);
        }
    }
}

TEST_CASE(
    "the own matrix product gives each row the same bits in whatever company it is computed") {
    const Library library("own");
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const Layer p(dtype, random_int(2, 300), random_int(1, 300), random_int(300, 900));
        const int64_t cut = random_int(1, p.M - 1);
        CAPTURE(name_of(dtype), p.M, p.N, p.K, cut);
        TestStream stream(p.scratch_bytes());
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

TEST_CASE("scratch for M rows serves every smaller number of rows") {
    for (const std::string& name : libraries()) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            const Library library(name);
            const int64_t most = random_int(1025, 1100), N = random_int(1, 40),
                          K = random_int(1, 40);
            TestStream stream(linear_scratch_bytes({}, dtype, most, N, K));
            for (int64_t M :
                 {most, int64_t{1025}, int64_t{1024}, random_int(1, 1024), int64_t{1}}) {
                const Layer p(dtype, M, N, K);
                CAPTURE(name, name_of(dtype), M, N, K);
                const Buffer out(dtype, {M, N}), dw(DType::fp32, {N, K}), dx(dtype, {M, K});
                linear_forward(stream, {out, p.x, p.w, p.bias, p.residual, {}});
                linear_backward_input(stream, {dx, p.dy, p.w});
                linear_backward_weight(stream, {dw.sink(false), p.x, p.dy});
                const Values exact = textbook_product<double>(p.dy, true, p.x, false, N, K, M);
                const Values plain = textbook_product<float>(p.dy, true, p.x, false, N, K, M);
                check_accuracy("dw", DType::fp32, dw.values(), plain, exact);
            }
        }
    }
}

TEST_CASE("the automatic choice of a matrix product serves rows a page apart") {
    const Layer p(DType::fp32, random_int(1, 40), random_int(1, 40), 1024);
    TestStream stream(p.scratch_bytes());
    const Buffer dx(p.dtype, {p.M, p.K}), dw(p.dtype, {p.N, p.K});
    linear_backward_input(stream, {dx, p.dy, p.w});
    check_accuracy("dx", p.dtype, dx.values(),
                   textbook_product<float>(p.dy, false, p.w, false, p.M, p.K, p.N),
                   textbook_product<double>(p.dy, false, p.w, false, p.M, p.K, p.N));
    linear_backward_weight(stream, {dw.sink(false), p.x, p.dy});
    check_accuracy("dw", p.dtype, dw.values(),
                   textbook_product<float>(p.dy, true, p.x, false, p.N, p.K, p.M),
                   textbook_product<double>(p.dy, true, p.x, false, p.N, p.K, p.M));
}

TEST_CASE("an unknown matrix product is refused by name") {
    try {
        select_cpu_gemm("openblas");
        FAIL("accepted");
    } catch (const Error& error) {
        CHECK(std::string(error.what()).find("openblas") != std::string::npos);
    }
#ifndef TRAIN_GPT_ONEDNN
    CHECK_THROWS_AS(select_cpu_gemm("onednn"), Error);
#endif
}

}  // namespace train_gpt
