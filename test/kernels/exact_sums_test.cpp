#include "kernels/exact_sums.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/embedding.h"
#include "kernels/exact_math.h"
#include "kernels/head_loss.h"
#include "test/kernels/kernel_test.h"

using namespace train_gpt;

namespace {

constexpr int64_t blocks_of(int64_t n) { return (n + norm_block - 1) / norm_block; }

/// Tensors of odd sizes, and the arrays of all of them.
struct Model {
    std::vector<int64_t> sizes;
    std::vector<TensorGrids> tensors;
    int64_t elements = 0, blocks = 0;

    Model() {
        for (int64_t i = random_int(1, 6); i > 0; --i) {
            const int64_t n = random_int(0, 2) == 0 ? random_int(1, 40) : random_int(1, 15000);
            tensors.push_back({blocks, blocks_of(n), random_int(0, 3) == 0});
            sizes.push_back(n);
            elements += n;
            blocks += blocks_of(n);
        }
    }
};

/// Gradients whose sizes differ by block, as those of layers do.
std::vector<float> gradients_of(const Model& model, float largest = 1) {
    std::vector<float> all;
    for (const int64_t n : model.sizes)
        for (int64_t first = 0; first < n; first += norm_block) {
            const auto count = static_cast<size_t>(std::min(norm_block, n - first));
            const std::vector<float> block =
                random_normal(count, largest * std::exp2(static_cast<float>(random_int(-12, 0))));
            all.insert(all.end(), block.begin(), block.end());
        }
    return all;
}

/// What the kernels work on, in memory of the device.
struct Arrays {
    const Model& model;
    SharedArray<float> gradient;
    SharedArray<int32_t> sums, exponents, scales, overflow{1}, stale{1};
    SharedArray<int64_t> lost{1}, first_not_finite{1};
    SharedArray<int64_t> maxima, not_finite, totals;
    SharedArray<float> largest;

    explicit Arrays(const Model& of)
        : model(of),
          gradient(static_cast<size_t>(of.elements)),
          sums(static_cast<size_t>(of.elements)),
          exponents(static_cast<size_t>(of.blocks)),
          scales(of.sizes.size()),
          maxima(static_cast<size_t>(of.blocks)),
          not_finite(of.sizes.size()),
          totals(of.sizes.size()),
          largest(static_cast<size_t>(of.blocks)) {
        clear_step();
        for (float& x : largest.values()) x = 0;
        for (int32_t& e : exponents.values()) e = 0;
    }
    void clear_step() {
        for (int64_t& s : maxima.values()) s = 0;
        for (int64_t& n : not_finite.values()) n = 0;
        for (int64_t& n : totals.values()) n = 0;
        overflow.values()[0] = stale.values()[0] = 0;
        lost.values()[0] = 0;
        first_not_finite.values()[0] = std::numeric_limits<int64_t>::max();
    }
    void set(const std::vector<float>& values) {
        std::ranges::copy(values, gradient.values().begin());
    }
    template <class Segment, class F>
    std::vector<Segment> segments(F&& make) const {
        std::vector<Segment> all;
        int64_t first = 0;
        for (size_t t = 0; t < model.sizes.size(); ++t) {
            all.push_back(make(t, first, model.tensors[t].first));
            first += model.sizes[t];
        }
        return all;
    }
    void add(Stream& stream, bool accumulate, int64_t number = 0) {
        round_and_add(stream, segments<ExactSegment>([&](size_t t, int64_t first, int64_t block) {
                          return ExactSegment{.gradient = gradient.data() + first,
                                              .sums = sums.data() + first,
                                              .n = model.sizes[t],
                                              .exponents = exponents.data() + block,
                                              .maxima = maxima.data() + block,
                                              .not_finite = not_finite.data() + t,
                                              .first_not_finite = first_not_finite.data(),
                                              .number = number,
                                              .lost = lost.data(),
                                              .accumulate = accumulate};
                      }));
    }
    void update(Stream& stream, int64_t contributions) {
        update_grids(stream, {.exponents = exponents.data(),
                              .maxima = maxima.data(),
                              .tensors = model.tensors,
                              .contributions = contributions,
                              .overflow = overflow.data(),
                              .stale = stale.data()});
    }
    void find_first(Stream& stream, int64_t contributions) {
        block_maxima(stream, segments<LargestSegment>([&](size_t t, int64_t first, int64_t block) {
                         return LargestSegment{.gradient = gradient.data() + first,
                                               .n = model.sizes[t],
                                               .largest = largest.data() + block};
                     }));
        first_grids(stream, exponents.data(), largest.data(), model.tensors, contributions);
    }
};

/// ⌊x⌉, ties to even, without the machine's rounding.
int64_t nearest_even(double x) {
    const double below = std::floor(x), rest = x - below;
    const auto whole = static_cast<int64_t>(below);
    return whole + (rest > 0.5 || (rest == 0.5 && whole % 2 != 0) ? 1 : 0);
}

}  // namespace

TEST_CASE("gradients are rounded to their block's grid and added as integers", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        const Model model;
        Arrays arrays(model);
        TestStream stream;
        for (int32_t& e : arrays.exponents.values()) e = static_cast<int32_t>(random_int(-24, -12));
        const auto exponents = arrays.exponents.values();
        std::vector<int64_t> sums(static_cast<size_t>(model.elements)),
            units(static_cast<size_t>(model.blocks));
        int64_t lost = 0;
        const int64_t micro_batches = random_int(1, 4);
        for (int64_t m = 0; m < micro_batches; ++m) {
            const std::vector<float> g = gradients_of(model);
            arrays.set(g);
            arrays.add(stream, m > 0);
            size_t i = 0;
            for (size_t t = 0; t < model.sizes.size(); ++t)
                for (int64_t k = 0; k < model.sizes[t]; ++k, ++i) {
                    const auto b = static_cast<size_t>(model.tensors[t].first + k / norm_block);
                    const int64_t q = nearest_even(std::ldexp(g[i], -exponents[b]));
                    sums[i] += q;
                    lost += q == 0 && g[i] != 0 ? 1 : 0;
                }
            i = 0;
            for (size_t t = 0; t < model.sizes.size(); ++t)
                for (int64_t first = 0; first < model.sizes[t]; first += norm_block) {
                    const auto n =
                        static_cast<size_t>(std::min(norm_block, model.sizes[t] - first));
                    double most = 0;
                    for (size_t k = 0; k < n; ++k, ++i)
                        most = std::max(most, std::fabs(double{g[i]}));
                    const auto b = static_cast<size_t>(model.tensors[t].first + first / norm_block);
                    units[b] += static_cast<int64_t>(std::ceil(std::ldexp(most, -exponents[b])));
                }
        }
        CAPTURE(model.sizes, micro_batches);
        const auto found = arrays.sums.values();
        for (size_t i = 0; i < sums.size(); ++i) REQUIRE(found[i] == sums[i]);
        const auto maxima = arrays.maxima.values();
        for (size_t b = 0; b < units.size(); ++b) REQUIRE(maxima[b] == units[b]);
        for (const int64_t n : arrays.not_finite.values()) CHECK(n == 0);
        CHECK(arrays.lost.values()[0] == lost);
    }
}

TEST_CASE("integers may take the place of the gradients that they are rounded from", "[cuda]") {
    ON_EACH_DEVICE();
    const Model model;
    Arrays arrays(model);
    TestStream stream;
    for (int32_t& e : arrays.exponents.values()) e = static_cast<int32_t>(random_int(-24, -12));
    arrays.set(gradients_of(model));
    arrays.add(stream, false);
    const std::vector<int32_t> apart(arrays.sums.values().begin(), arrays.sums.values().end());
    auto segments = arrays.segments<ExactSegment>([&](size_t t, int64_t first, int64_t block) {
        return ExactSegment{.gradient = arrays.gradient.data() + first,
                            .sums = reinterpret_cast<int32_t*>(arrays.gradient.data() + first),
                            .n = model.sizes[t],
                            .exponents = arrays.exponents.data() + block,
                            .maxima = arrays.maxima.data() + block,
                            .not_finite = arrays.not_finite.data() + t,
                            .first_not_finite = arrays.first_not_finite.data(),
                            .lost = arrays.lost.data()};
    });
    round_and_add(stream, segments);
    const auto found = arrays.gradient.values();
    for (size_t i = 0; i < apart.size(); ++i)
        REQUIRE(std::bit_cast<int32_t>(static_cast<float>(found[i])) == apart[i]);
}

TEST_CASE("an embedding's rows are rounded once they are complete", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        TestStream stream(1 << 20);
        const int64_t B = random_int(1, 3), T = random_int(1, 60), V = random_int(3, 50),
                      C = random_int(0, 1) ? 8 * random_int(1, 20) : random_int(1, 100),
                      first_token = random_int(0, 2);
        const auto n = static_cast<size_t>(B * T), all = static_cast<size_t>(V * C);
        const SharedArray<int32_t> tokens(n), sums(all), exponent(1);
        const SharedArray<float> dout(n * static_cast<size_t>(C));
        const SharedArray<uint32_t> largest(1);
        const SharedArray<int64_t> maxima(3), not_finite(1), first_not_finite(1);
        // Frequent tokens make long runs; some are in another rank's part of the vocabulary.
        for (int32_t& t : tokens.values())
            t = static_cast<int32_t>(random_int(0, 1) ? first_token : random_int(0, V + 3));
        std::ranges::copy(random_normal(dout.values().size()), dout.values().begin());
        const auto e = static_cast<int32_t>(random_int(-20, -10));
        exponent.values()[0] = e, largest.values()[0] = 0, not_finite.values()[0] = 0;
        first_not_finite.values()[0] = 8;
        for (int64_t& s : maxima.values()) s = 3;
        const bool accumulate = random_int(0, 1) == 1;
        std::vector<int32_t> expected(all);
        for (size_t i = 0; i < all; ++i) {
            sums.values()[i] = static_cast<int32_t>(random_int(-1000, 1000));
            if (accumulate) expected[i] = sums.values()[i];
        }
        const std::vector<int32_t> before(sums.values().begin(), sums.values().end());
        std::vector<float> of_rows(all);
        // The reference takes fp32 sums from the kernel itself; its own test compares those.
        const SharedArray<float> in_fp32(all);
        EmbeddingBackward args{.dw = {in_fp32.data(), DType::fp32, false},
                               .dpositions = {},
                               .dout = {dout.data(), DType::fp32, {B, T, C}},
                               .tokens = tokens.data(),
                               .vocab_rows = V,
                               .first_token = first_token};
        embedding_backward(stream, args);
        float most = 0;
        for (size_t i = 0; i < all; ++i) {
            const float g = in_fp32.values()[i];
            most = std::max(most, std::fabs(g));
            expected[i] += static_cast<int32_t>(nearest_even(std::ldexp(g, -e)));
        }
        ExactRows rows{.exponent = exponent.data(), .largest = largest.data(), .looks_only = true};
        args.dw = {sums.data(), DType::int32, accumulate, &rows};
        CAPTURE(B, T, C, V, first_token, accumulate, e);
        embedding_backward(stream, args);
        CHECK(std::ranges::equal(sums.values(), before));
        CHECK(std::bit_cast<float>(static_cast<uint32_t>(largest.values()[0])) == most);
        rows.looks_only = false;
        embedding_backward(stream, args);
        const auto found = sums.values();
        for (size_t i = 0; i < all; ++i) REQUIRE(found[i] == expected[i]);
        count_largest(stream, {.largest = largest.data(),
                               .exponent = exponent.data(),
                               .maxima = maxima.data(),
                               .blocks = 2,
                               .not_finite = not_finite.data(),
                               .first_not_finite = first_not_finite.data(),
                               .number = 3});
        const auto units = static_cast<int64_t>(std::ceil(std::ldexp(double{most}, -e)));
        CHECK(maxima.values()[0] == 3 + units);
        CHECK(maxima.values()[1] == 3 + units);
        CHECK(maxima.values()[2] == 3);
        CHECK(largest.values()[0] == 0);
        CHECK(not_finite.values()[0] == 0);
        CHECK(first_not_finite.values()[0] == 8);
        // Not finite
        dout.values()[0] = std::numeric_limits<float>::infinity();
        tokens.values()[0] = static_cast<int32_t>(first_token);
        embedding_backward(stream, args);
        count_largest(stream, {.largest = largest.data(),
                               .exponent = exponent.data(),
                               .maxima = maxima.data(),
                               .blocks = 1,
                               .not_finite = not_finite.data(),
                               .first_not_finite = first_not_finite.data(),
                               .number = 5});
        CHECK(not_finite.values()[0] == 1);
        CHECK(first_not_finite.values()[0] == 5);
        CHECK(maxima.values()[0] == 3 + units + (int64_t{1} << 40));
    }
}

TEST_CASE("sums of integers wrap, and the order of additions does not change them", "[cuda]") {
    ON_EACH_DEVICE();
    const auto n = static_cast<size_t>(random_int(1, 20000));
    const auto any = [&] {
        std::vector<int32_t> values(n);
        for (int32_t& x : values)
            x = static_cast<int32_t>(random_int(std::numeric_limits<int32_t>::min(),
                                                std::numeric_limits<int32_t>::max()));
        return values;
    };
    const std::vector<std::vector<int32_t>> added{any(), any(), any()};
    const auto sum_in = [&](std::vector<size_t> order) {
        const SharedArray<int32_t> sums(n), one(n);
        TestStream stream;
        for (size_t k = 0; k < order.size(); ++k) {
            std::ranges::copy(added[order[k]], one.values().begin());
            add_integers(stream, sums.data(), one.data(), static_cast<int64_t>(n), k > 0);
        }
        const auto values = sums.values();
        return std::vector<int32_t>(values.begin(), values.end());
    };
    const std::vector<int32_t> forwards = sum_in({0, 1, 2});
    CHECK(forwards == sum_in({2, 0, 1}));
    for (size_t i = 0; i < n; ++i)
        REQUIRE(static_cast<uint32_t>(forwards[i]) == static_cast<uint32_t>(added[0][i]) +
                                                          static_cast<uint32_t>(added[1][i]) +
                                                          static_cast<uint32_t>(added[2][i]));
}

TEST_CASE("elements that are not finite are counted, and too large ones count as 2^40", "[cuda]") {
    ON_EACH_DEVICE();
    const Model model;
    Arrays arrays(model);
    TestStream stream;
    std::vector<float> g = gradients_of(model);
    const auto at = static_cast<size_t>(random_int(0, model.elements - 1));
    size_t t = 0;
    for (int64_t before = 0; static_cast<int64_t>(at) >= before + model.sizes[t];)
        before += model.sizes[t++];
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::infinity(), 1e30f}) {
        arrays.clear_step();
        std::vector<float> with = g;
        with[at] = bad;
        const int64_t number = random_int(1, 1000);
        arrays.set(g);
        arrays.add(stream, false, number - 1);
        arrays.set(with);
        arrays.add(stream, false, number);
        CAPTURE(bad, at, model.sizes, number);
        CHECK(arrays.first_not_finite.values()[0] ==
              (std::isfinite(bad) ? std::numeric_limits<int64_t>::max() : number));
        const auto counts = arrays.not_finite.values();
        for (size_t k = 0; k < counts.size(); ++k)
            CHECK(counts[k] == (k == t && !std::isfinite(bad) ? 1 : 0));
        const auto maxima = arrays.maxima.values();
        CHECK(std::ranges::count_if(maxima, [](int64_t s) { return s >= int64_t{1} << 40; }) == 1);
    }
}

TEST_CASE("grids leave the headroom at first, become coarser at once and finer bit by bit",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const auto& [contributions, bits] :
         {std::pair<int64_t, int>{1, 6}, {16, 6}, {17, 5}, {64, 4}, {128, 3}, {256, 2}, {2048, 2}})
        CHECK(headroom_bits(contributions) == bits);
    for (int repeat = 0; repeat < 4; ++repeat) {
        const Model model;
        Arrays arrays(model);
        TestStream stream;
        const int64_t contributions = random_int(1, 40);
        const int headroom = headroom_bits(contributions);
        CAPTURE(model.sizes, contributions);
        std::vector<float> g = gradients_of(model);
        // A block, or a tensor, without gradient
        const auto idle = static_cast<size_t>(random_int(0, std::ssize(model.sizes) - 1));
        int64_t begin = 0;
        for (size_t t = 0; t < idle; ++t) begin += model.sizes[t];
        const bool whole = random_int(0, 1) == 1;
        const int64_t count = whole ? model.sizes[idle] : std::min(norm_block, model.sizes[idle]);
        std::fill_n(g.begin() + begin, count, 0.0f);
        arrays.set(g);
        arrays.find_first(stream, contributions);
        arrays.add(stream, false);
        const std::vector<int64_t> units(arrays.maxima.values().begin(),
                                         arrays.maxima.values().end());
        std::vector<int32_t> first(arrays.exponents.values().begin(),
                                   arrays.exponents.values().end());
        const int64_t limit = int64_t{1} << (31 - headroom);
        const int32_t coarsest = *std::ranges::max_element(first);
        for (size_t t = 0; t < model.tensors.size(); ++t) {
            const TensorGrids& tensor = model.tensors[t];
            int64_t most = 0;
            int32_t own = std::numeric_limits<int32_t>::min();
            for (int64_t b = tensor.first; b < tensor.first + tensor.blocks; ++b) {
                most = std::max(most, units[static_cast<size_t>(b)]);
                if (units[static_cast<size_t>(b)] > 0)
                    own = std::max(own, first[static_cast<size_t>(b)]);
            }
            for (int64_t b = tensor.first; b < tensor.first + tensor.blocks; ++b) {
                const auto i = static_cast<size_t>(b);
                const int64_t of_grid = tensor.one_grid ? most : units[i];
                CAPTURE(t, b, first[i], of_grid);
                if (of_grid == 0) {
                    CHECK(first[i] == (most > 0 ? own : coarsest));
                    continue;
                }
                // Not more than the limit, and more than half of it, but for rounding up and in
                // blocks that the tensor's coarsest grid keeps from finer ones.
                CHECK(of_grid * contributions <= limit + contributions);
                CHECK(first[i] >= own - most_bits_finer);
                if (first[i] > own - most_bits_finer) CHECK(2 * of_grid * contributions >= limit);
            }
        }
        // The step's own S again, much smaller ones, which make grids one bit finer, and larger.
        for (const int shift : {0, -6, 5}) {
            std::vector<int64_t> now = units;
            for (size_t i = 0; i < now.size(); ++i) {
                now[i] = shift < 0 ? (units[i] * contributions) >> -shift
                                   : std::min(units[i] * contributions << shift, int_limit - 1);
                arrays.maxima.values()[i] = now[i];
            }
            std::ranges::copy(first, arrays.exponents.values().begin());
            arrays.overflow.values()[0] = 0;
            find_overflow(stream, arrays.overflow.data(), arrays.maxima.data(), model.blocks);
            arrays.update(stream, contributions);
            CHECK(arrays.overflow.values()[0] == 0);
            const auto next = arrays.exponents.values();
            for (const TensorGrids& tensor : model.tensors) {
                const auto begin = static_cast<size_t>(tensor.first),
                           blocks = static_cast<size_t>(tensor.blocks);
                std::vector<int64_t> units_of(now.begin() + tensor.first,
                                              now.begin() + tensor.first + tensor.blocks);
                if (tensor.one_grid)
                    std::ranges::fill(units_of, *std::ranges::max_element(units_of));
                std::vector<int> expected;
                for (size_t b = 0; b < blocks; ++b) {
                    const int wanted =
                        std::bit_width(static_cast<uint64_t>(units_of[b])) - (31 - headroom);
                    expected.push_back(first[begin + b] +
                                       (units_of[b] == 0 ? 0 : std::max(wanted, -1)));
                }
                const int of_tensor = *std::ranges::max_element(expected);
                for (size_t b = 0; b < blocks; ++b) {
                    CAPTURE(tensor.first, b, shift, first[begin + b], units_of[b]);
                    CHECK(next[begin + b] == std::max(expected[b], of_tensor - most_bits_finer));
                }
            }
        }
        // One block too many: that is said, no grid becomes finer, and its own has room.
        const auto bad = static_cast<size_t>(random_int(0, model.blocks - 1));
        std::ranges::copy(first, arrays.exponents.values().begin());
        for (int64_t& s : arrays.maxima.values()) s = 1;
        arrays.maxima.values()[bad] = int_limit;
        find_overflow(stream, arrays.overflow.data(), arrays.maxima.data(), model.blocks);
        // After an earlier step that will come again, nothing changes.
        arrays.stale.values()[0] = 1;
        arrays.update(stream, contributions);
        CHECK(std::ranges::equal(arrays.exponents.values(), first));
        arrays.stale.values()[0] = 0;
        arrays.update(stream, contributions);
        CHECK(arrays.overflow.values()[0] == 1);
        const auto after = arrays.exponents.values();
        CHECK(after[bad] == first[bad] + headroom + 1);
        for (size_t i = 0; i < first.size(); ++i) CHECK(after[i] >= first[i]);
    }
}

TEST_CASE("the norm of integer sums is that of the numbers they stand for, in any order",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        const Model model;
        Arrays arrays(model);
        TestStream stream;
        for (int32_t& e : arrays.exponents.values()) e = static_cast<int32_t>(random_int(-30, -20));
        for (int32_t& q : arrays.sums.values())
            q = static_cast<int32_t>(random_int(-(1 << 28), 1 << 28));
        norm_scales(stream, arrays.scales.data(), arrays.exponents.data(), model.tensors);
        const auto segments =
            arrays.segments<ExactNormSegment>([&](size_t t, int64_t first, int64_t block) {
                return ExactNormSegment{.sums = arrays.sums.data() + first,
                                        .n = model.sizes[t],
                                        .exponents = arrays.exponents.data() + block,
                                        .scale = arrays.scales.data() + t,
                                        .total = arrays.totals.data() + t};
            });
        exact_norm(stream, segments);
        const std::vector<int64_t> totals(arrays.totals.values().begin(),
                                          arrays.totals.values().end());
        const SharedArray<double> sums(model.sizes.size());
        norm_sums(stream, sums.data(), arrays.totals.data(), arrays.scales.data(),
                  arrays.not_finite.data(), std::ssize(model.sizes));
        const auto q = arrays.sums.values();
        const auto exponents = arrays.exponents.values();
        size_t i = 0;
        for (size_t t = 0; t < model.sizes.size(); ++t) {
            double exact = 0;
            for (int64_t k = 0; k < model.sizes[t]; ++k, ++i) {
                const auto b = static_cast<size_t>(model.tensors[t].first + k / norm_block);
                const double x = std::ldexp(static_cast<double>(q[i]), exponents[b]);
                exact += x * x;
            }
            // The squares of a lane are added in fp32, at most 128 of them, each rounded with its
            // element: 2^-24 · (127 + 3). Blocks are rounded to 2^-62 of the largest sum.
            const double bound =
                130 * 0x1p-24 * exact +
                std::ldexp(static_cast<double>(model.tensors[t].blocks), arrays.scales.values()[t]);
            CAPTURE(t, model.sizes, exact);
            CHECK(std::fabs(sums.values()[t] - exact) <= bound);
            CHECK(totals[t] >= 0);
        }
        // Each segment in two parts at a boundary of blocks, in the opposite order
        for (int64_t& n : arrays.totals.values()) n = 0;
        for (size_t s = segments.size(); s-- > 0;) {
            const int64_t cut =
                std::min(segments[s].n, norm_block * random_int(0, blocks_of(segments[s].n)));
            ExactNormSegment end = segments[s], begin = segments[s];
            end.sums += cut, end.n -= cut, end.exponents += cut / norm_block, begin.n = cut;
            for (const ExactNormSegment& part : {end, begin}) exact_norm(stream, {&part, 1});
        }
        const auto again = arrays.totals.values();
        CHECK(std::vector<int64_t>(again.begin(), again.end()) == totals);
    }
}

TEST_CASE("the largest sum of squares that sums may have fits into its scale", "[cuda]") {
    for (const int64_t blocks :
         {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{1000}, int64_t{1} << 24})
        for (const int32_t e : {min_exponent, -20, 0, max_exponent}) {
            const double of_block = static_cast<double>(norm_block) * 0x1p62;
            const int64_t units = norm_units(of_block, e, norm_scale(e, blocks));
            CAPTURE(blocks, e, units);
            CHECK(units > 0);
            CHECK(static_cast<double>(units) * static_cast<double>(blocks) <= 0x1p62);
        }
}

TEST_CASE("AdamW takes a gradient of integers as the numbers that they stand for", "[cuda]") {
    ON_EACH_DEVICE();
    const Model model;
    const Arrays arrays(model);
    TestStream stream;
    for (int32_t& e : arrays.exponents.values()) e = static_cast<int32_t>(random_int(-30, -20));
    // Integers of up to 24 bits, which are floats
    for (int32_t& q : arrays.sums.values())
        q = static_cast<int32_t>(random_int(-(1 << 24), 1 << 24));
    const auto n = static_cast<size_t>(model.elements);
    const auto with_state = [&](const auto& work) {
        const SharedArray<float> master(n), m(n), v(n);
        const SharedArray<bf16> weights(n);
        const SharedArray<StepState> state(1);
        state.values()[0] = {.multiplier = 0.3f};
        for (size_t i = 0; i < n; ++i)
            master.values()[i] = std::sin(static_cast<float>(i)), m.values()[i] = 0.1f,
            v.values()[i] = 0.2f;
        const auto segments =
            arrays.segments<AdamWSegment>([&](size_t t, int64_t first, int64_t block) {
                AdamWSegment segment{.weights = t % 2 == 0 ? weights.data() + first : nullptr,
                                     .master = master.data() + first,
                                     .m = m.data() + first,
                                     .v = v.data() + first,
                                     .n = model.sizes[t],
                                     .decay = t % 3 == 0};
                work(segment, first, block);
                return segment;
            });
        adamw(stream, segments,
              {.learning_rate = 1e-2f,
               .beta1 = 0.9f,
               .beta2 = 0.95f,
               .epsilon = 1e-8f,
               .weight_decay = 0.1f,
               .step = 2,
               .state = state.data()});
        std::vector<float> all;
        for (const SharedArray<float>* array : {&master, &m, &v})
            all.insert(all.end(), array->values().begin(), array->values().end());
        size_t i = 0;
        for (size_t t = 0; t < model.sizes.size(); ++t)
            for (int64_t k = 0; k < model.sizes[t]; ++k, ++i)
                if (t % 2 == 0) all.push_back(to_float(weights.values()[i]));
        return all;
    };
    size_t i = 0;
    for (size_t t = 0; t < model.sizes.size(); ++t)
        for (int64_t k = 0; k < model.sizes[t]; ++k, ++i) {
            const auto b = static_cast<size_t>(model.tensors[t].first + k / norm_block);
            arrays.gradient.values()[i] = std::ldexp(static_cast<float>(arrays.sums.values()[i]),
                                                     arrays.exponents.values()[b]);
        }
    const auto of_floats = with_state([&](AdamWSegment& segment, int64_t first, int64_t) {
        segment.gradient = arrays.gradient.data() + first;
    });
    const auto of_integers = with_state([&](AdamWSegment& segment, int64_t first, int64_t block) {
        segment.sums = arrays.sums.data() + first;
        segment.exponents = arrays.exponents.data() + block;
    });
    CAPTURE(model.sizes);
    CHECK(of_floats == of_integers);
}

namespace {

/// Errors of the sums of M gradients of 64 rows of 1,024 elements, relative to the sums' root mean
/// square: of all elements, and of the tenth of the rows where they are largest.
struct Errors {
    double all = 0, worst_rows = 0;
};

constexpr int64_t error_rows = 64, row_elements = 1024;

Errors errors_of(const std::vector<double>& sums, const std::vector<double>& right) {
    std::vector<double> of_rows;
    double errors = 0, squares = 0;
    for (int64_t r = 0; r < error_rows; ++r) {
        double error = 0, square = 0;
        for (int64_t c = 0; c < row_elements; ++c) {
            const auto i = static_cast<size_t>(r * row_elements + c);
            error += (sums[i] - right[i]) * (sums[i] - right[i]);
            square += right[i] * right[i];
        }
        errors += error, squares += square;
        of_rows.push_back(std::sqrt(error / square));
    }
    std::ranges::sort(of_rows, std::greater<>());
    constexpr size_t tenth = error_rows / 10;
    const double worst =
        std::accumulate(of_rows.begin(), of_rows.begin() + tenth, 0.0) / double{tenth};
    return {std::sqrt(errors / squares), worst};
}

struct SumErrors {
    Errors exact, fp32;
    double expected = 0;  // of exact sums over all elements: of roundings that are uniform
};

/// Rows differ in size by up to 2^8. Heavy-tailed: Student's t with three degrees of freedom.
SumErrors errors_of_sums(int64_t M, bool heavy_tailed) {
    constexpr auto n = static_cast<size_t>(error_rows * row_elements);
    std::vector<float> scales;
    for (int64_t r = 0; r < error_rows; ++r)
        scales.push_back(std::exp2(-static_cast<float>(random_int(0, 800)) / 100));
    std::mt19937_64 random(static_cast<uint64_t>(random_int(0, 1 << 30)));
    std::normal_distribution<float> normal;
    std::vector<float> g(n), fp32(n), largest(n / norm_block);
    std::vector<double> right(n);
    std::vector<int32_t> sums(n), exponents(n / norm_block);
    std::vector<int64_t> maxima(n / norm_block);
    const std::vector<TensorGrids> tensors{{0, std::ssize(exponents)}};
    int64_t not_finite = 0, first_not_finite = 0, lost = 0;
    Stream stream{Device{}};
    const auto draw = [&] {
        for (size_t i = 0; i < n; ++i) {
            const float x = normal(random);
            float squares = 0;
            for (int k = 0; heavy_tailed && k < 3; ++k) {
                const float y = normal(random);
                squares += y * y;
            }
            const float t = x / std::sqrt(squares / 3);
            g[i] = scales[i / row_elements] * (heavy_tailed ? t : x);
        }
    };
    const LargestSegment look{
        .gradient = g.data(), .n = static_cast<int64_t>(n), .largest = largest.data()};
    draw();
    block_maxima(stream, std::span(&look, 1));
    first_grids(stream, exponents.data(), largest.data(), tensors, M);
    // Steps before, from whose S the grids of this one follow; and where it overflows, once more.
    for (int step = 0, overflows = 1; step < 2 || overflows; ++step) {
        std::ranges::fill(maxima, 0);
        std::ranges::fill(right, 0);
        std::ranges::fill(fp32, 0.0f);
        for (int64_t m = 0; m < M; ++m) {
            draw();
            const ExactSegment segment{.gradient = g.data(),
                                       .sums = sums.data(),
                                       .n = static_cast<int64_t>(n),
                                       .exponents = exponents.data(),
                                       .maxima = maxima.data(),
                                       .not_finite = &not_finite,
                                       .first_not_finite = &first_not_finite,
                                       .lost = &lost,
                                       .accumulate = m > 0};
            round_and_add(stream, std::span(&segment, 1));
            for (size_t i = 0; i < n; ++i) {
                right[i] += double{g[i]};
                fp32[i] += g[i];
            }
        }
        int32_t overflow = 0;
        const int32_t stale = 0;
        find_overflow(stream, &overflow, maxima.data(), std::ssize(maxima));
        overflows = overflow;
        if (step > 0 && !overflows) break;
        update_grids(stream, {.exponents = exponents.data(),
                              .maxima = maxima.data(),
                              .tensors = tensors,
                              .contributions = M,
                              .overflow = &overflow,
                              .stale = &stale});
    }
    std::vector<double> exact(n), in_fp32(fp32.begin(), fp32.end());
    double roundings = 0, squares = 0;
    for (size_t i = 0; i < n; ++i) {
        const double grid = std::ldexp(1.0, exponents[i / norm_block]);
        exact[i] = grid * sums[i];
        roundings += static_cast<double>(M) * grid * grid / 12;
        squares += right[i] * right[i];
    }
    return {errors_of(exact, right), errors_of(in_fp32, right), std::sqrt(roundings / squares)};
}

}  // namespace

TEST_CASE("errors of exact sums are those of their roundings") {
    for (const bool heavy_tailed : {false, true}) {
        const int64_t M = int64_t{1} << random_int(0, 6);
        const SumErrors errors = errors_of_sums(M, heavy_tailed);
        CAPTURE(heavy_tailed, M, errors.expected);
        // Of at least 4,096 roundings, in the coarsest block; fewer where elements are 0.
        CHECK(errors.exact.all < 1.1 * errors.expected);
        CHECK(errors.exact.all > 0.6 * errors.expected);
    }
}

TEST_CASE("table of the errors of exact sums, for docs/many-ranks.md", "[.][table]") {
    std::printf("M     gradients     exact: all   worst rows   fp32: all    worst rows\n");
    for (const bool heavy_tailed : {false, true})
        for (const int64_t M : {1, 8, 64, 512, 2048}) {
            const SumErrors e = errors_of_sums(M, heavy_tailed);
            std::printf("%-5lld %-12s  %.2g      %.2g      %.2g      %.2g\n",
                        static_cast<long long>(M), heavy_tailed ? "heavy-tailed" : "Gaussian",
                        e.exact.all, e.exact.worst_rows, e.fp32.all, e.fp32.worst_rows);
        }
}

TEST_CASE("AdamW changes nothing in a step that comes again, or is skipped", "[cuda]") {
    ON_EACH_DEVICE();
    TestStream stream;
    const auto n = static_cast<size_t>(random_int(1, 9000));
    const SharedArray<float> master(n), m(n), v(n), gradient(n);
    const SharedArray<bf16> weights(n);
    const SharedArray<StepState> state(1);
    for (const SharedArray<float>* array : {&master, &m, &v, &gradient})
        std::ranges::copy(random_normal(n), array->values().begin());
    for (float& x : v.values()) x = std::fabs(x);
    for (bf16& w : weights.values()) w = bf16(3.0f);
    const auto all = [&] {
        std::vector<float> values;
        for (const SharedArray<float>* array : {&master, &m, &v})
            values.insert(values.end(), array->values().begin(), array->values().end());
        for (const bf16 w : weights.values()) values.push_back(to_float(w));
        return values;
    };
    const std::vector<float> before = all();
    const AdamWSegment segment{.weights = weights.data(),
                               .master = master.data(),
                               .m = m.data(),
                               .v = v.data(),
                               .gradient = gradient.data(),
                               .n = static_cast<int64_t>(n)};
    for (const int kind : {0, 1, 2, 3}) {
        state.values()[0] = {
            .multiplier = 1, .stop = kind == 0, .overflow = kind == 1, .skip = kind == 2};
        adamw(stream, std::span(&segment, 1),
              {.learning_rate = 0.1f, .beta1 = 0.9f, .beta2 = 0.9f, .state = state.data()});
        CAPTURE(kind);
        CHECK((all() == before) == (kind < 3));
    }
}

TEST_CASE("a micro-batch's losses are rounded before they are added, if sums are exact", "[cuda]") {
    ON_EACH_DEVICE();
    TestStream stream;
    const int64_t B = random_int(1, 4), T = random_int(1, 300);
    const auto n = static_cast<size_t>(B * T);
    const SharedArray<float> losses(n);
    const SharedArray<double> total(1), of_sources(2);
    const SharedArray<int32_t> source_of(static_cast<size_t>(B));
    for (int32_t& s : source_of.values()) s = 1;
    double sum = 0;
    total.values()[0] = of_sources.values()[1] = 5;
    for (float& x : losses.values()) sum += double{x = std::exp(random_normal(1)[0] - 3)};
    for (const bool exact : {false, true}) {
        accumulate_loss(stream, total.data(), losses.data(), B * T, exact, exact);
        accumulate_loss_by_source(stream, {.totals = of_sources.data(),
                                           .sources = 2,
                                           .losses = losses.data(),
                                           .source_of = source_of.data(),
                                           .B = B,
                                           .T = T,
                                           .accumulate = exact,
                                           .exact = exact});
        if (!exact) total.values()[0] = of_sources.values()[1] = 5;
    }
    for (const double found : {double{total.values()[0]}, double{of_sources.values()[1]}}) {
        CAPTURE(B, T, found, sum);
        const double units = std::ldexp(found, 20);
        CHECK(units == std::floor(units));
        // Of one rounding, or on the CPU one for each sequence
        CHECK(std::fabs(found - 5 - sum) <= std::ldexp(0.5 * static_cast<double>(B) + 0.01, -20));
    }
}
