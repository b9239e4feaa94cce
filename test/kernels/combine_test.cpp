#include "kernels/experts/combine.h"

#include <cmath>

#include "kernels/experts/group_rows.h"
#include "test/kernels/experts_reference.h"
#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

std::vector<int32_t> random_experts(int64_t N, int64_t k, int64_t E) {
    std::vector<int32_t> drawn(static_cast<size_t>(N * k));
    for (int32_t& e : drawn) e = static_cast<int32_t>(random_int(0, E - 1));
    return distinct_experts(drawn, k, E);
}

/// The rows of N tokens with k slots each, in random order.
struct Rows {
    DType dtype;
    int64_t N, k, C;
    Buffer y, residual, dout, weights;
    SharedArray<int32_t> row_of;

    Rows(DType dtype_, int64_t N_, int64_t k_, int64_t C_)
        : dtype(dtype_),
          N(N_),
          k(k_),
          C(C_),
          y(dtype, {N * k, C}, random_normal(static_cast<size_t>(N * k * C))),
          residual(dtype, {N, C}, random_normal(static_cast<size_t>(N * C))),
          dout(dtype, {N, C}, random_normal(static_cast<size_t>(N * C))),
          weights(DType::fp32, {N, k}, random_normal(static_cast<size_t>(N * k))),
          row_of(static_cast<size_t>(N * k)) {
        std::iota(row_of.data(), row_of.data() + N * k, 0);
        std::shuffle(row_of.data(), row_of.data() + N * k, test_rng());
    }
    Tensor rows() const { return {row_of.data(), DType::int32, {N, k}}; }
    CombineBackward backward(Tensor dy, Tensor dweights) const {
        return {.dy = dy,
                .dweights = dweights,
                .dout = dout,
                .y = y,
                .row_of = rows(),
                .weights = weights};
    }

    template <class Real>
    Values out(bool weighted, bool with_residual) const {
        Values result;
        for (int64_t t = 0; t < N; ++t) {
            for (int64_t c = 0; c < C; ++c) {
                Real sum = with_residual ? static_cast<Real>(residual[t * C + c]) : 0;
                for (int64_t j = 0; j < k; ++j) {
                    const Real value = static_cast<Real>(y[row_of.data()[t * k + j] * C + c]);
                    sum += weighted ? value * static_cast<Real>(weights[t * k + j]) : value;
                }
                result.push_back(sum);
            }
        }
        return std::is_same_v<Real, float> ? stored_as(dtype, result) : result;
    }
    template <class Real>
    std::pair<Values, Values> gradients() const {
        Values dy(static_cast<size_t>(N * k * C)), dweights;
        for (int64_t slot = 0; slot < N * k; ++slot) {
            Real sum = 0;
            for (int64_t c = 0; c < C; ++c) {
                const Real gradient = static_cast<Real>(dout[slot / k * C + c]);
                const int64_t at = row_of.data()[slot] * C + c;
                sum += gradient * static_cast<Real>(y[at]);
                dy[at] = gradient * static_cast<Real>(weights[slot]);
            }
            dweights.push_back(sum);
        }
        return {std::is_same_v<Real, float> ? stored_as(dtype, dy) : dy, dweights};
    }
};

void for_each_rows(const std::function<void(Rows&)>& check) {
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t C : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{1032}, int64_t{2056},
                                random_int(1, 300), 8 * random_int(1, 40)}) {
            Rows rows(dtype, random_int(1, C > 1000 ? 4 : 20), random_int(1, 8), C);
            CAPTURE(name_of(dtype), rows.N, rows.k, C);
            check(rows);
        }
}

}  // namespace

TEST_CASE("group_rows sorts the slots by expert and keeps their order", "[cuda]") {
    ON_EACH_DEVICE();
    struct Extent {
        int64_t N, k, E;
    };
    const int64_t many = device_is_simulated() ? 700 : 20'000;
    for (const Extent& x :
         {Extent{1, 1, 1}, Extent{5, 2, 2}, Extent{64, 8, 128}, Extent{many, 2, 8},
          Extent{random_int(1, many), random_int(1, 8), random_int(8, 512)},
          Extent{random_int(1, many), 1, 512}}) {
        for (const bool all_to_one : {false, true}) {
            CAPTURE(x.N, x.k, x.E, all_to_one);
            std::vector<int32_t> experts = random_experts(x.N, x.k, x.E);
            if (all_to_one) std::fill(experts.begin(), experts.end(), random_int(0, x.E - 1));
            const int64_t pairs = x.N * x.k;
            const SharedArray<int32_t> in(experts.size()), offsets(static_cast<size_t>(x.E) + 1),
                row_token(experts.size()), row_of(experts.size());
            std::ranges::copy(experts, in.data());
            TestStream stream(group_rows_scratch_bytes(planning(), pairs, x.E));
            group_rows(stream, {.experts = {in.data(), DType::int32, {x.N, x.k}},
                                .offsets = {offsets.data(), DType::int32, {x.E + 1}},
                                .row_token = {row_token.data(), DType::int32, {pairs}},
                                .row_of = {row_of.data(), DType::int32, {x.N, x.k}}});
            const Grouping expected(experts, x.k, x.E);
            CHECK(std::ranges::equal(offsets.values(), expected.offsets));
            CHECK(std::ranges::equal(row_token.values(), expected.row_token));
            CHECK(std::ranges::equal(row_of.values(), expected.row_of));
        }
    }
}

TEST_CASE("experts take the first slots of each sequence up to their capacity", "[cuda]") {
    ON_EACH_DEVICE();
    const int64_t most = device_is_simulated() ? 300 : 4000;
    for (int repeat = 0; repeat < (device_is_simulated() ? 4 : 20); ++repeat) {
        const int64_t S = random_int(1, 5), T = random_int(1, most / S), k = random_int(1, 8),
                      E = random_int(k, 40), N = S * T;
        const int64_t even = std::max<int64_t>(1, T * k / E);
        for (const int64_t capacity : {int64_t{1}, even, random_int(1, 2 * even), T, T + 1}) {
            const bool all_to_one = random_int(0, 4) == 0;
            CAPTURE(S, T, k, E, capacity, all_to_one);
            std::vector<int32_t> experts = random_experts(N, k, E);
            if (all_to_one) std::fill(experts.begin(), experts.end(), random_int(0, E - 1));
            std::vector<int32_t> kept = experts;
            for (int64_t s = 0; s < S; ++s) {
                std::vector<int64_t> taken(static_cast<size_t>(E));
                for (int64_t i = s * T * k; i < (s + 1) * T * k; ++i)
                    if (++taken[experts[i]] > capacity) kept[i] = -1;
            }
            const int64_t pairs = N * k;
            const SharedArray<int32_t> in(experts.size()), offsets(static_cast<size_t>(E) + 1),
                row_token(experts.size()), row_of(experts.size());
            std::ranges::copy(experts, in.data());
            TestStream stream(group_rows_scratch_bytes(planning(), pairs, E));
            group_rows(stream, {.experts = {in.data(), DType::int32, {N, k}},
                                .offsets = {offsets.data(), DType::int32, {E + 1}},
                                .row_token = {row_token.data(), DType::int32, {pairs}},
                                .row_of = {row_of.data(), DType::int32, {N, k}},
                                .capacity = capacity,
                                .sequences = S});
            const Grouping expected(kept, k, E);
            CHECK(std::ranges::equal(offsets.values(), expected.offsets));
            CHECK(std::ranges::equal(row_token.values().first(expected.row_token.size()),
                                     expected.row_token));
            CHECK(std::ranges::equal(row_of.values(), expected.row_of));
            CHECK(std::ranges::equal(in.values(), experts));
        }
    }
}

TEST_CASE("combine matches float64, with and without weights and residual", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_rows([&](const Rows& rows) {
        for (const bool weighted : {false, true}) {
            for (const bool with_residual : {false, true}) {
                const Buffer out(rows.dtype, {rows.N, rows.C});
                TestStream stream;
                combine(stream, {.out = out,
                                 .y = rows.y,
                                 .row_of = rows.rows(),
                                 .weights = weighted ? rows.weights.tensor() : Tensor{},
                                 .residual = with_residual ? rows.residual.tensor() : Tensor{}});
                accuracy.check("out", rows.dtype, out.values(),
                               rows.out<float>(weighted, with_residual),
                               rows.out<double>(weighted, with_residual));
            }
        }
    });
}

TEST_CASE("combine adds the slots in order", "[cuda]") {
    ON_EACH_DEVICE();
    // 2²⁴ + 1 − 2²⁴ is 0 in this order alone, and the residual comes first.
    Rows rows(DType::fp32, random_int(1, 5), 3, random_int(1, 40));
    for (int64_t t = 0; t < rows.N; ++t) {
        for (int64_t j = 0; j < 3; ++j) {
            rows.weights.set(static_cast<size_t>(t * 3 + j), j == 2 ? -1.0f : 1.0f);
            for (int64_t c = 0; c < rows.C; ++c)
                rows.y.set(static_cast<size_t>(rows.row_of.data()[t * 3 + j] * rows.C + c),
                           j == 1 ? 1.0f : 0x1p24f);
        }
        for (int64_t c = 0; c < rows.C; ++c)
            rows.residual.set(static_cast<size_t>(t * rows.C + c), 0.5f);
    }
    const Buffer out(DType::fp32, {rows.N, rows.C});
    TestStream stream;
    combine(stream, {.out = out,
                     .y = rows.y,
                     .row_of = rows.rows(),
                     .weights = rows.weights,
                     .residual = rows.residual});
    for (size_t i = 0; i < static_cast<size_t>(rows.N * rows.C); ++i) CHECK(out[i] == 0);
    // In place.
    combine(stream, {.out = rows.residual,
                     .y = rows.y,
                     .row_of = rows.rows(),
                     .weights = rows.weights,
                     .residual = rows.residual});
    CHECK((rows.residual.bytes() == out.bytes()));
}

TEST_CASE("combine_backward matches float64, and its gradient may replace y", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_rows([&](const Rows& rows) {
        const Buffer dy(rows.dtype, {rows.N * rows.k, rows.C}),
            dweights(DType::fp32, {rows.N, rows.k}), again(DType::fp32, {rows.N, rows.k});
        TestStream stream;
        const auto exact = rows.gradients<double>(), plain = rows.gradients<float>();
        combine_backward(stream, rows.backward(dy, dweights));
        accuracy.check("dy", rows.dtype, dy.values(), plain.first, exact.first);
        accuracy.check("dweights", DType::fp32, dweights.values(), plain.second, exact.second);
        combine_backward(stream, rows.backward(rows.y, again));
        CHECK((rows.y.bytes() == dy.bytes()));
        CHECK((again.bytes() == dweights.bytes()));
    });
}

TEST_CASE("slots without a row add nothing, and their weights have no gradient", "[cuda]") {
    ON_EACH_DEVICE();
    for_each_rows([&](Rows& all) {
        // The last rows, which hold NaNs, belong to nobody. In `all` they are 0.
        const int64_t rows = random_int(1, all.N * all.k), C = all.C;
        CAPTURE(rows);
        Rows some(all.dtype, all.N, all.k, C);
        for (int64_t i = 0; i < all.N * all.k * C; ++i) {
            const bool has_row = i / C < rows;
            some.y.set(i, has_row ? static_cast<float>(all.y[i]) : NAN);
            if (!has_row) all.y.set(i, 0);
        }
        for (int64_t slot = 0; slot < all.N * all.k; ++slot) {
            const int32_t row = all.row_of.data()[slot];
            some.row_of.data()[slot] = row < rows ? row : -1;
        }
        const auto combined = [&](const Rows& of) {
            const Buffer out(of.dtype, {of.N, C});
            TestStream stream;
            combine(stream, {.out = out,
                             .y = of.y,
                             .row_of = of.rows(),
                             .weights = all.weights,
                             .residual = all.residual});
            return out.values();
        };
        CHECK(combined(some) == combined(all));
        const auto gradients = [&](const Rows& of) {
            Buffer dy(of.dtype, {of.N * of.k, C}), dweights(DType::fp32, {of.N, of.k});
            for (int64_t i = rows * C; i < of.N * of.k * C; ++i) dy.set(i, 7);
            TestStream stream;
            CombineBackward args = of.backward(dy, dweights);
            args.dout = all.dout, args.weights = all.weights;
            combine_backward(stream, args);
            return std::pair(dy.values(), dweights.values());
        };
        const auto [dy, dweights] = gradients(some);
        auto [dy_of_all, dweights_of_all] = gradients(all);
        std::fill(dy_of_all.begin() + rows * C, dy_of_all.end(), 7);
        CHECK(dy == dy_of_all);
        CHECK(dweights == dweights_of_all);
    });
}

TEST_CASE("combine gives the same bits whatever the number of threads, and in every run",
          "[cuda]") {
    ON_EACH_DEVICE();
    const Rows rows(DType::bf16, random_int(1, 20), random_int(1, 8), random_int(1, 2000));
    check_thread_independence([&] {
        const Buffer out(rows.dtype, {rows.N, rows.C}), dy(rows.dtype, {rows.N * rows.k, rows.C}),
            dweights(DType::fp32, {rows.N, rows.k});
        TestStream stream;
        combine(stream, {.out = out, .y = rows.y, .row_of = rows.rows(), .weights = rows.weights});
        combine_backward(stream, rows.backward(dy, dweights));
        return out.bytes() + dy.bytes() + dweights.bytes();
    });
}

}  // namespace train_gpt
