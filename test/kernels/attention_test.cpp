// Attention against a reference in float64, on random shapes, layouts and document boundaries.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <omp.h>

#include "base/error.h"
#include "kernels/attention/cpu.h"
#include "test/catch.h"
#include "test/kernels/attention_problem.h"
#include "test/kernels/reference.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt {

using namespace attention_problem;

TEST_CASE(
    "attention forward and backward match float64 on random shapes, layouts and groups of heads",
    "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (int i = 0; i < (device_is_simulated() ? 12 : 24); ++i) {
            Wish wish;
            wish.dtype = dtype;
            wish.documents = i % 3 == 2;
            wish.aligned = i % 2 == 1;
            wish.windows = i % 4 >= 2;
            check_case(random_case(wish), any_layout());
        }
    }
}

TEST_CASE("attention with a small soft-cap matches float64 in both passes", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes)
        for (bool aligned : {false, true})
            for (int i = 0; i < 3; ++i) {
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = aligned;
                wish.T = static_cast<int>(random_int(17, 70));
                wish.documents = i == 2;
                Case c = random_case(wish);
                c.shape.softcap = 0.5f * static_cast<float>(random_int(1, 3));
                check_case(c, any_layout());
            }
}

TEST_CASE("one to eight heads of queries share a key head, or all of them one", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes)
        for (const int group : {1, 2, 4, 8})
            for (const bool one : {false, true}) {
                Wish wish;
                wish.dtype = dtype;
                wish.H_kv = one ? 1 : static_cast<int>(random_int(2, 3));
                wish.H = group * wish.H_kv;
                wish.aligned = random_int(0, 1) == 1;
                wish.documents = random_int(0, 2) == 0;
                wish.windows = random_int(0, 1) == 1;
                check_case(random_case(wish), any_layout());
            }
}

TEST_CASE("attention matches float64 at the edges of its tiles and blocks", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (bool aligned : {false, true}) {
            for (int T :
                 {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300}) {
                if (device_is_simulated() && T > 65 && !(aligned && dtype == DType::bf16)) continue;
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = aligned;
                wish.B = 1;
                wish.T = T;
                wish.H_kv = 1;
                wish.H = T > 128 ? 1 : 2;
                wish.D =
                    aligned
                        ? 8 * static_cast<int>(random_int(1, 16))
                        : std::vector<int>{
                              1, 8, 16, 17, 31, 32, 48, 64}[static_cast<size_t>(random_int(0, 7))];
                wish.documents = random_int(0, 3) == 0;
                wish.windows = random_int(0, 3) == 0;
                check_case(random_case(wish), any_layout());
            }
        }
        for (int D :
             {1, 2, 7, 8, 16, 24, 32, 33, 40, 64, 80, 96, 112, 127, 128, 129, 200, 255, 256}) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = D % 8 == 0;
            wish.T = static_cast<int>(random_int(60, 70));
            wish.D = D;
            check_case(random_case(wish), any_layout());
        }
    }
}

TEST_CASE("where AMX cannot be used, attention in bf16 matches float64 without it") {
    const struct Without {
        bool used = std::exchange(cpu::uses_amx(), false);
        ~Without() { cpu::uses_amx() = used; }
    } without;
    for (int i = 0; i < 24; ++i) {
        Wish wish;
        wish.dtype = DType::bf16;
        wish.documents = i % 3 == 2;
        wish.aligned = i % 2 == 1;
        wish.windows = i % 4 >= 2;
        check_case(random_case(wish), any_layout());
    }
}

TEST_CASE("documents and groups of heads over many tiles match float64", "[cuda]") {
    ON_EACH_KERNELS();
    for (int mean_length : {10, 60, 400}) {
        Wish wish;
        wish.dtype = DType::bf16;
        wish.aligned = true;
        wish.B = 1;
        wish.T = static_cast<int>(random_int(250, 400));
        wish.extra_keys = mean_length == 60 ? 0 : static_cast<int>(random_int(1, 100));
        wish.H_kv = 1;
        wish.H = mean_length == 60 ? 2 : 1;
        wish.D = 16;
        Case c = random_case(wish);
        int start = 0;
        for (int t = 0; t < wish.T; ++t) {
            if (random_int(1, mean_length) == 1) start = t + wish.extra_keys;
            c.doc_start.push_back(start);
        }
        check_case(c, any_layout());
    }
}

TEST_CASE("attention over a cache sees the keys before its queries", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (int i = 0; i < 24; i += device_is_simulated() ? 3 : 1) {
            Wish wish;
            wish.dtype = dtype;
            wish.T =
                i < 12 ? static_cast<int>(random_int(1, 4)) : static_cast<int>(random_int(1, 90));
            wish.extra_keys = static_cast<int>(random_int(1, 300));
            wish.documents = i % 2 == 1;
            wish.aligned = i % 4 < 2;
            wish.windows = random_int(0, 1) == 1;
            check_case(random_case(wish), any_layout());
        }
    }
    // Positions against the edges of tiles of keys.
    for (int extra_keys : {1, 30, 31, 32, 33, 40, 48, 62, 63, 64, 65}) {
        Wish wish;
        wish.dtype = DType::bf16;
        wish.aligned = true;
        wish.B = 1;
        wish.T = 33;
        wish.extra_keys = extra_keys;
        wish.D = 64;
        check_case(random_case(wish), Layout::cache);
    }
}

TEST_CASE("gradients of keys in fp32 are those before rounding, and add to what is there",
          "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (int i = 0; i < 6; ++i) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = test_device().is_cuda();  // there, alignment chooses the kernel
            wish.T = static_cast<int>(i < 2 ? random_int(1, 3) : random_int(16, 60));
            wish.extra_keys = i % 2 == 0 ? 0 : static_cast<int>(random_int(1, 100));
            wish.documents = i % 3 == 2;
            wish.windows = i % 2 == 1;
            const Case c = random_case(wish);
            CAPTURE(describe(c));
            const Run stored = run(c, any_layout()),
                      single = run(c, any_layout(), {.key_gradients = KeyGradients::write_fp32});
            CHECK(stored.dq == single.dq);
            const Values dk = random_values(c.k.size(), DType::fp32),
                         dv = random_values(c.k.size(), DType::fp32);
            const Run sum = run(c, any_layout(), {true, KeyGradients::add_fp32, dk, dv});
            CHECK(sum.dq == single.dq);
            const auto check = [&](const Values& in_dtype, const Values& in_fp32,
                                   const Values& before, const Values& after) {
                for (size_t j = 0; j < in_fp32.size(); ++j) {
                    REQUIRE(rounded(in_fp32[j], dtype) == in_dtype[j]);
                    REQUIRE(std::abs(after[j] - (before[j] + in_fp32[j])) <=
                            0x1p-23 * (std::abs(before[j]) + std::abs(in_fp32[j])));
                }
            };
            check(stored.dk, single.dk, dk, sum.dk);
            check(stored.dv, single.dv, dv, sum.dv);
        }
    }
}

namespace {

/// values [B, rows, …]: the first rows of each sequence, from `first` to `end`.
Values rows_of(const Values& values, int B, int rows, int first, int end) {
    const auto width = static_cast<int64_t>(values.size()) / B / rows;
    Values some;
    for (int64_t b = 0; b < B; ++b)
        some.insert(some.end(), values.begin() + (b * rows + first) * width,
                    values.begin() + (b * rows + end) * width);
    return some;
}

/// values [B, rows, …]: sets the rows of each sequence from `first` on to `some` [B, count, …].
void set_rows(Values& values, int B, int rows, int first, int count, const Values& some) {
    const auto width = static_cast<int64_t>(values.size()) / B / rows;
    for (int64_t b = 0; b < B; ++b)
        std::copy_n(some.begin() + b * count * width, count * width,
                    values.begin() + (b * rows + first) * width);
}

/// Queries [first, end) of each sequence, with the keys up to the last of them.
Case chunk_of(const Case& whole, int first, int end) {
    const int B = whole.shape.B, N = whole.shape.T;
    Case c = whole;
    c.shape.T = end - first;
    c.shape.S = end;
    c.q = rows_of(whole.q, B, N, first, end);
    c.dout = rows_of(whole.dout, B, N, first, end);
    c.k = rows_of(whole.k, B, N, 0, end);
    c.v = rows_of(whole.v, B, N, 0, end);
    c.doc_start.clear();
    for (int b = 0; b < B && !whole.doc_start.empty(); ++b)
        for (int t = first; t < end; ++t) c.doc_start.push_back(whole.first(b, t));
    return c;
}

/// Adds a rank's part of context parallelism to the results of the whole sequence: it has chunk
/// `rank` and chunk 2·ranks − 1 − rank, whose keys are more, so it comes first. Each call alone
/// must match float64 too.
void add_rank(Run& sum, const Case& whole, int rank, int ranks) {
    const int B = whole.shape.B, N = whole.shape.T, length = N / (2 * ranks);
    Values dk(whole.k.size()), dv(whole.k.size());
    Request request{.key_gradients = KeyGradients::write_fp32,
                    .dsinks = {sum.dsinks.begin(), sum.dsinks.end()}};
    for (const int end : {N - rank * length, (rank + 1) * length}) {
        const Case c = chunk_of(whole, end - length, end);
        check_case(c, any_layout());
        const Run r = run(c, any_layout(), request);
        set_rows(sum.out, B, N, end - length, length, r.out);
        set_rows(sum.dq, B, N, end - length, length, r.dq);
        set_rows(dk, B, N, 0, end, r.dk);
        set_rows(dv, B, N, 0, end, r.dv);
        sum.dsinks = r.dsinks;
        const int next = (rank + 1) * length;
        request = {true,
                   KeyGradients::add_fp32,
                   rows_of(dk, B, N, 0, next),
                   rows_of(dv, B, N, 0, next),
                   {r.dsinks.begin(), r.dsinks.end()}};
    }
    for (size_t i = 0; i < dk.size(); ++i) {
        sum.dk[i] += dk[i];
        sum.dv[i] += dv[i];
    }
}

}  // namespace

TEST_CASE("the gradients of a sequence are the sums of those of its chunks", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (int i = 0; i < (device_is_simulated() ? 2 : 6); ++i) {
            const int ranks = static_cast<int>(random_int(1, 3));
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = i % 2 == 1;
            wish.T = 2 * ranks * static_cast<int>(random_int(i % 2 ? 16 : 1, 30));
            wish.documents = random_int(0, 1);
            wish.windows = random_int(0, 1);
            if (device_is_simulated()) wish.D = 24;
            const Case whole = random_case(wish);
            Run sum;
            sum.dsinks.resize(whole.sinks.size());
            for (Values* of_queries : {&sum.out, &sum.dq}) of_queries->resize(whole.q.size());
            for (Values* of_keys : {&sum.dk, &sum.dv}) of_keys->resize(whole.k.size());
            for (int rank = 0; rank < ranks; ++rank) add_rank(sum, whole, rank, ranks);
            for (Values* of_keys : {&sum.dk, &sum.dv})
                for (double& x : *of_keys) x = rounded(x, dtype);
            check_run(whole, sum);
        }
    }
}

TEST_CASE(
    "the float64 attention gradients that the kernels are tested against match numerical ones") {
    for (int i = 0; i < 6; ++i) {
        Wish wish;
        wish.T = static_cast<int>(random_int(1, 9));
        wish.D = static_cast<int>(random_int(1, 6));
        wish.extra_keys = i < 3 ? 0 : static_cast<int>(random_int(1, 5));
        wish.documents = i % 2 == 1;
        wish.windows = true;
        Case c = random_case(wish);
        const AttentionReference exact = exact_attention(c);
        const auto loss = [&] {
            Case forward = c;
            forward.dout.clear();
            const Values out = exact_attention(forward).out;
            double sum = 0;
            for (size_t j = 0; j < out.size(); ++j) sum += out[j] * c.dout[j];
            return sum;
        };
        const auto compare = [&](Values& x, const Values& gradient) {
            for (int sample = 0; sample < 12; ++sample) {
                const auto j =
                    static_cast<size_t>(random_int(0, static_cast<int64_t>(x.size()) - 1));
                const double kept = x[j], step = 1e-5;
                x[j] = kept + step;
                const double above = loss();
                x[j] = kept - step;
                const double below = loss();
                x[j] = kept;
                CHECK(std::abs((above - below) / (2 * step) - gradient[j]) <
                      1e-7 * (1 + std::abs(gradient[j])));
            }
        };
        compare(c.q, exact.dq);
        compare(c.k, exact.dk);
        compare(c.v, exact.dv);
        if (!c.sinks.empty()) compare(c.sinks, exact.dsinks);
    }
}

TEST_CASE("a query that sees one key returns its value exactly", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (bool aligned : {false, true}) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = aligned;
            wish.T = static_cast<int>(random_int(16, 100));
            wish.D = aligned ? 16 : 0;
            wish.B = 1;
            Case c = random_case(wish);
            const AttentionShape& s = c.shape;
            const int alone = static_cast<int>(random_int(0, s.T - 1));
            for (int t = 0; t < s.T; ++t) c.doc_start.push_back(t < alone ? 0 : alone);
            const Run r = run(c, any_layout());
            for (int h = 0; h < s.H; ++h) {
                for (int t : {0, alone}) {
                    for (int d = 0; d < s.D; ++d) {
                        REQUIRE(r.out[c.q_at(0, t, h) + d] ==
                                c.v[c.k_at(0, t, h / (s.H / s.H_kv)) + d]);
                    }
                }
            }
        }
    }
}

TEST_CASE("attention stays finite and right for very large scores", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (int T : {static_cast<int>(random_int(1, 3)), static_cast<int>(random_int(20, 140))}) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = true;
            wish.B = 1;
            wish.T = T;
            wish.D = 64;
            wish.size = 300;  // scores of the order of 10^5: each row is decided by its largest
            Case c = random_case(wish);
            const Run r = run(c, Layout::separate);
            const AttentionReference exact = exact_attention(c);
            // The score of the winner is known to a relative 2⁻²⁴ · √D or so; rows whose two best
            // are closer are few.
            size_t wrong = 0;
            for (size_t i = 0; i < r.out.size(); ++i) {
                REQUIRE(std::isfinite(r.out[i]));
                wrong += std::abs(r.out[i] - exact.out[i]) >
                         (dtype == DType::bf16 ? 0.02 : 0.01) * (1 + std::abs(exact.out[i]));
            }
            CHECK(static_cast<double>(wrong) <= 0.01 * static_cast<double>(r.out.size()));
            for (const Values* g : {&r.dq, &r.dk, &r.dv}) {
                for (double x : *g) REQUIRE(std::isfinite(x));
            }
        }
    }
}

TEST_CASE("attention gives the same bits again, whatever the number of threads and the layout",
          "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (int i = 0; i < 4; ++i) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = test_device().is_cuda();  // there, alignment chooses the kernel
            wish.B = 1;
            if (i == 3) wish.extra_keys = static_cast<int>(random_int(1, 400));
            wish.H_kv = 1 + i % 2;
            wish.H = 2;
            wish.T = i == 2                  ? static_cast<int>(random_int(1, 3))
                     : device_is_simulated() ? static_cast<int>(random_int(129, 150))
                                             : static_cast<int>(random_int(257, 800));
            wish.D = test_device().is_cuda() ? 8 * static_cast<int>(random_int(1, 16))
                                             : static_cast<int>(random_int(8, 40));
            wish.documents = i == 1;
            wish.windows = random_int(0, 1) == 1;
            const Case c = random_case(wish);
            CAPTURE(describe(c));
            std::unique_ptr<Run> first;
            for (int threads : test_device().is_cuda() ? std::vector<int>{1, 1}
                                                       : std::vector<int>{1, 1, 2, 3, 8}) {
                const Threads team(threads);
                Run r = run(c, any_layout());
                if (!first) first = std::make_unique<Run>(r);
                CAPTURE(threads);
                CHECK(same_bits(*first, r));
            }
        }
    }
}

TEST_CASE("a NaN reaches every query that sees it and none of another head", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        for (int which = 0; which < 3; ++which) {
            for (int T : {static_cast<int>(random_int(1, 3)),
                          static_cast<int>(random_int(16, device_is_simulated() ? 70 : 200))}) {
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = random_int(0, 1);
                wish.B = 1;
                if (device_is_simulated()) wish.D = 16;
                wish.T = T;
                wish.H_kv = 2;
                Case c = random_case(wish);
                const AttentionShape& s = c.shape;
                const int b = static_cast<int>(random_int(0, s.B - 1)),
                          t = static_cast<int>(random_int(0, s.T - 1));
                const int d = static_cast<int>(random_int(0, s.D - 1));
                const int h = static_cast<int>(random_int(0, s.H - 1)), g = h / (s.H / s.H_kv);
                Values& x = which == 0 ? c.q : which == 1 ? c.k : c.v;
                x[(which == 0 ? c.q_at(b, t, h) : c.k_at(b, t, g)) + d] =
                    std::numeric_limits<double>::quiet_NaN();
                const Run r = run(c, any_layout());
                const auto any_nan = [&](const Values& values, size_t start) {
                    return std::any_of(values.begin() + start, values.begin() + start + s.D,
                                       [](double value) { return std::isnan(value); });
                };
                for (int row = 0; row < s.T; ++row) {
                    CAPTURE(describe(c), which, row, t);
                    const bool seen = which == 0 ? row == t : row >= t;
                    if (seen) {
                        CHECK(any_nan(r.out, c.q_at(b, row, h)));
                        CHECK(any_nan(r.dq, c.q_at(b, row, h)));
                        if (which < 2) CHECK(std::isnan(r.lse[c.lse_at(b, h, row)]));
                    }
                    const int other = (h + s.H / s.H_kv) % s.H;  // has another key head
                    CHECK_FALSE(any_nan(r.out, c.q_at(b, row, other)));
                    CHECK_FALSE(any_nan(r.dq, c.q_at(b, row, other)));
                }
                CHECK(any_nan(r.dk, c.k_at(b, t, g)));
            }
        }
    }
}

TEST_CASE("attention without lse gives the same output", "[cuda]") {
    ON_EACH_KERNELS();
    for (DType dtype : dtypes) {
        Wish wish;
        wish.dtype = dtype;
        wish.aligned = true;
        wish.backward = false;
        const Case c = random_case(wish);
        CHECK(
            same_bits(run(c, Layout::separate).out, run(c, Layout::separate, {.lse = false}).out));
    }
}

TEST_CASE("the CPU and CUDA compute the same attention", "[cuda]") {
    if (test_devices().size() < 2) return;
    for (DType dtype : dtypes) {
        Wish wish;
        wish.dtype = dtype;
        wish.aligned = true;
        wish.B = 1;
        wish.T = static_cast<int>(random_int(40, 80));
        wish.D = 24;
        Case c = random_case(wish);
        for (int t = 0; t < wish.T; ++t) c.doc_start.push_back(t < wish.T / 3 ? 0 : wish.T / 3);
        const Run cpu = run(c, Layout::packed);
        const DeviceUnderTest gpu(test_devices().back());
        const Run cuda = run(c, Layout::packed);
        // In bf16 each may round P or dS, and rounds the results, by up to 2^-8. The gradients of
        // queries and keys also read the rounded output.
        const AttentionReference exact = exact_attention(c);
        const auto compare = [&](const char* name, const Values& ours, const Values& theirs,
                                 const Values& result, const Values& terms, int roundings) {
            const double bound = dtype == DType::bf16 ? 2 * roundings * 0x1p-8 + 1e-5 : 3e-6;
            CAPTURE(name, name_of(dtype), describe(c), error_of(ours, result, terms).max,
                    error_of(theirs, result, terms).max);
            CHECK(error_of(ours, theirs, terms).max <= bound);
        };
        compare("out", cuda.out, cpu.out, exact.out, exact.out_terms, 2);
        compare("dq", cuda.dq, cpu.dq, exact.dq, exact.dq_terms, 3);
        compare("dk", cuda.dk, cpu.dk, exact.dk, exact.dk_terms, 3);
        compare("dv", cuda.dv, cpu.dv, exact.dv, exact.dv_terms, 2);
    }
}

TEST_CASE("attention refuses what it cannot compute, in a sentence", "[cuda]") {
    ON_EACH_KERNELS();
    Wish wish;
    wish.backward = false;
    wish.T = 8;
    wish.H_kv = 2;
    wish.H = 4;
    wish.D = 8;
    Case c = random_case(wish);
    const auto error = [&] {
        try {
            run(c, Layout::separate);
        } catch (const Error& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    REQUIRE(error().empty());
    SECTION("heads that do not divide") {
        c.shape.H_kv = 3;
        CHECK(error().find("multiple") != std::string::npos);
    }
    SECTION("a document that starts after its token") {
        if (test_device().is_cuda()) return;  // values in device memory are not looked at
        c.doc_start.assign(static_cast<size_t>(c.shape.B) * 8, 0);
        c.doc_start[2] = 3;
        CHECK(error().find("doc_start of sequence 0, token 2 is 3") != std::string::npos);
    }
    SECTION("a dtype that is no floating type") {
        c.shape.dtype = DType::int32;
        CHECK(error().find("int32") != std::string::npos);
    }
    SECTION("a head too large, too little scratch, a missing tensor, fewer keys than queries") {
        AttentionShape shape = c.shape;
        AttentionStream scratch(shape);
        const TestMemory memory(4096 * sizeof(float));
        auto* const x = static_cast<float*>(memory.data());
        const HeadsView view{x, 0, 0, 0};
        shape.D = 257;
        CHECK_THROWS_AS(attention_scratch_bytes(planning(), shape), Error);
        CHECK_THROWS_AS(attention_forward(scratch.stream, {shape, view, view, view, view, nullptr}),
                        Error);
        CHECK_THROWS_AS(attention_forward(scratch.stream, {c.shape, view, {}, view, view, nullptr}),
                        Error);
        scratch.stream.scratch_bytes = 64;
        CHECK_THROWS_AS(attention_backward(scratch.stream, {c.shape, view, view, view, view, view,
                                                            x, view, view, view}),
                        Error);
        CHECK_THROWS_AS(attention_backward(scratch.stream, {c.shape, view, view, view, view, view,
                                                            nullptr, view, view, view}),
                        Error);
        shape = c.shape;
        const auto backward_error = [&] {
            try {
                attention_backward(scratch.stream,
                                   {shape, view, view, view, view, view, x, view, view, view});
            } catch (const Error& e) {
                return std::string(e.what());
            }
            return std::string();
        };
        shape.S = 7;
        CHECK(backward_error().find("T = 8, S = 7 is an invalid shape") != std::string::npos);
        shape.T = 0;
        CHECK(backward_error().find("T = 0 but S = 7") != std::string::npos);
    }
}

}  // namespace train_gpt
