// Attention with windows and sinks.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/profile.h"
#include "kernels/attention/attention.h"
#include "test/catch.h"
#include "test/kernels/attention_problem.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt {

using namespace attention_problem;

namespace {

/// Whether views that happen to be aligned are computed by another kernel, with other bits.
bool alignment_chooses() { return test_device().is_cuda(); }

}  // namespace

TEST_CASE("windows of one key to all of them match float64 in both passes", "[cuda]") {
    ON_EACH_KERNELS();
    const int T = device_is_simulated() ? 150 : 270;
    for (const DType dtype : dtypes)
        for (const bool aligned : {false, true})
            for (const int window :
                 {1, 2, 30, 31, 32, 33, 64, 65, 127, 128, 129, T - 1, T, T + 9}) {
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = aligned;
                wish.B = 1;
                wish.H_kv = 1;
                wish.H = 2;
                wish.T = T - static_cast<int>(random_int(0, 20));
                wish.D = 8 * static_cast<int>(
                                 random_int(1, device_is_simulated() && random_int(0, 3) ? 3 : 16));
                wish.documents = random_int(0, 3) == 0;
                Case c = random_case(wish);
                c.shape.window = window;
                if (random_int(0, 1)) add_sinks(c);
                check_case(c, any_layout());
            }
}

TEST_CASE("windows of a chunk's queries and of a cache's match float64", "[cuda]") {
    ON_EACH_KERNELS();
    for (const DType dtype : dtypes)
        for (const bool aligned : {false, true})
            for (const int window : {1, 2, 30, 127, 128, 129, 300}) {
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = aligned;
                wish.B = 1;
                wish.T = static_cast<int>(random_int(0, 1) ? random_int(1, 4) : random_int(16, 80));
                wish.extra_keys = static_cast<int>(random_int(1, 280));
                wish.D = 8 * static_cast<int>(random_int(1, device_is_simulated() ? 4 : 16));
                wish.documents = random_int(0, 2) == 0;
                Case c = random_case(wish);
                c.shape.window = window;
                if (random_int(0, 1)) add_sinks(c);
                check_case(c, any_layout());
            }
}

TEST_CASE("a window of all keys has the bits of none", "[cuda]") {
    ON_EACH_KERNELS();
    for (const DType dtype : dtypes)
        for (const int T :
             {static_cast<int>(random_int(1, 3)), static_cast<int>(random_int(16, 90))}) {
            Wish wish;
            wish.dtype = dtype;
            wish.aligned = alignment_chooses() || random_int(0, 1);
            wish.T = T;
            wish.extra_keys = static_cast<int>(random_int(0, 1) * random_int(1, 40));
            wish.documents = random_int(0, 1);
            Case c = random_case(wish);
            const Run none = run(c, Layout::separate);
            for (const int more : {0, 1, 1000, std::numeric_limits<int>::max() - c.shape.S}) {
                c.shape.window = c.shape.S + more;
                CAPTURE(describe(c));
                CHECK(same_bits(run(c, Layout::separate), none));
            }
        }
}

namespace {

/// Rows [from, T) of tensors [B, T, heads, D] have the same bits, and are finite.
void check_rows(const Case& c, int rows, int heads, int from, const Values& a, const Values& b) {
    for (int batch = 0; batch < c.shape.B; ++batch)
        for (int t = from; t < rows; ++t)
            for (int i = 0; i < heads * c.shape.D; ++i) {
                const auto at = static_cast<size_t>((batch * rows + t) * heads * c.shape.D + i);
                CAPTURE(batch, t, i);
                REQUIRE(std::isfinite(a[at]));
                REQUIRE(a[at] == b[at]);
            }
}

/// The same case with other keys and values before `end`.
Case with_keys_before(const Case& c, int end, double value) {
    Case changed = c;
    for (int b = 0; b < c.shape.B; ++b)
        for (int s = 0; s < end; ++s)
            for (int i = 0; i < c.shape.H_kv * c.shape.D; ++i) {
                changed.k[c.k_at(b, s, 0) + static_cast<size_t>(i)] = value;
                changed.v[c.k_at(b, s, 0) + static_cast<size_t>(i)] = value;
            }
    return changed;
}

Case windowed_case(DType dtype, bool aligned, int T, int extra_keys, int window) {
    Wish wish;
    wish.dtype = dtype;
    wish.aligned = aligned || alignment_chooses();
    wish.B = 1;
    wish.T = T;
    wish.extra_keys = extra_keys;
    wish.H_kv = 1;
    wish.H = 2;
    wish.D = device_is_simulated() ? 16 : 8 * static_cast<int>(random_int(1, 16));
    Case c = random_case(wish);
    c.shape.window = window;
    if (random_int(0, 1)) add_sinks(c);
    return c;
}

}  // namespace

TEST_CASE("keys before the windows of a tile's queries are not visited", "[cuda]") {
    ON_EACH_KERNELS();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const int tile = tests_wgmma() ? 128 : 64;  // the largest
    for (const DType dtype : dtypes)
        for (const bool aligned : {false, true}) {
            // All queries stand after many keys that none of them sees.
            for (const int T :
                 {static_cast<int>(random_int(1, 3)), 16 + static_cast<int>(random_int(0, 50))}) {
                const int extra_keys = static_cast<int>(random_int(150, 300)),
                          window = static_cast<int>(random_int(1, 80));
                const Case c = windowed_case(dtype, aligned, T, extra_keys, window);
                const int unseen = (extra_keys + 1 - window) / tile * tile;  // whole tiles
                CAPTURE(describe(c), unseen);
                const Run clean = run(c, Layout::separate),
                          poisoned = run(with_keys_before(c, unseen, nan), Layout::separate);
                CHECK(same_bits(clean, poisoned));
                for (const Values* gradient : {&clean.dk, &clean.dv})
                    for (size_t i = 0; i < c.k_at(0, extra_keys + 1 - window, 0); ++i)
                        REQUIRE((*gradient)[i] == 0);
            }
            // Queries that see the first tile come before queries that do not.
            const int window = static_cast<int>(random_int(1, 90));
            const int unaffected = (tile - 1 + window + tile - 1) / tile * tile;
            const int T = unaffected + static_cast<int>(random_int(1, 100));
            const Case c = windowed_case(dtype, aligned, T, 0, window);
            CAPTURE(describe(c), unaffected);
            const Run clean = run(c, Layout::separate),
                      poisoned = run(with_keys_before(c, tile, nan), Layout::separate);
            check_rows(c, T, c.shape.H, unaffected, poisoned.out, clean.out);
            check_rows(c, T, c.shape.H, unaffected, poisoned.dq, clean.dq);
            check_rows(c, T, c.shape.H_kv, unaffected, poisoned.dk, clean.dk);
            check_rows(c, T, c.shape.H_kv, unaffected, poisoned.dv, clean.dv);
        }
}

TEST_CASE("a query's results do not depend on keys before its window", "[cuda]") {
    ON_EACH_KERNELS();
    for (const DType dtype : dtypes)
        for (const bool aligned : {false, true})
            for (int i = 0; i < (device_is_simulated() ? 1 : 4); ++i) {
                const int window = static_cast<int>(random_int(1, 70)),
                          T = window + static_cast<int>(random_int(2, 80)),
                          changed = static_cast<int>(random_int(1, T - window));
                Case c = windowed_case(dtype, aligned, T, 0, window);
                c.shape.softcap = 0;
                CAPTURE(describe(c), changed);
                const Run before = run(c, Layout::separate),
                          after = run(with_keys_before(c, changed, 1e4), Layout::separate);
                // The first query whose window begins after the changed keys.
                const int first = changed + window - 1;
                check_rows(c, T, c.shape.H, first, after.out, before.out);
                check_rows(c, T, c.shape.H, first, after.dq, before.dq);
                check_rows(c, T, c.shape.H_kv, first, after.dk, before.dk);
                check_rows(c, T, c.shape.H_kv, first, after.dv, before.dv);
                for (int h = 0; h < c.shape.H; ++h)
                    for (int t = first; t < T; ++t)
                        REQUIRE(after.lse[c.lse_at(0, h, t)] == before.lse[c.lse_at(0, h, t)]);
                // The query before it sees the last of them.
                const size_t row = c.q_at(0, first - 1, 0), end = c.q_at(0, first, 0);
                CHECK_FALSE(std::equal(before.out.begin() + static_cast<ptrdiff_t>(row),
                                       before.out.begin() + static_cast<ptrdiff_t>(end),
                                       after.out.begin() + static_cast<ptrdiff_t>(row)));
            }
}

TEST_CASE("a sink that is very small changes nothing, and one that is very large takes all",
          "[cuda]") {
    ON_EACH_KERNELS();
    for (const DType dtype : dtypes)
        for (const bool aligned : {false, true})
            for (const int T :
                 {static_cast<int>(random_int(1, 3)), static_cast<int>(random_int(16, 70))}) {
                Case c = windowed_case(dtype, aligned, T, static_cast<int>(random_int(0, 60)),
                                       static_cast<int>(random_int(0, 40)));
                c.sinks.clear();
                const Run without = run(c, Layout::separate);
                c.sinks_dtype = random_int(0, 1) ? dtype : DType::fp32;
                for (const double small : {-1e30, -std::numeric_limits<double>::infinity()}) {
                    c.sinks.assign(static_cast<size_t>(c.shape.H), rounded(small, c.sinks_dtype));
                    CAPTURE(describe(c), small);
                    const Run with = run(c, Layout::separate);
                    CHECK(std::ranges::all_of(with.dsinks, [](float x) { return x == 0; }));
                    check_run(c, with);
                    CHECK(same_bits(with.dv, without.dv));
                }
                for (const double large : {100.0, 1e30}) {
                    c.sinks.assign(static_cast<size_t>(c.shape.H), rounded(large, c.sinks_dtype));
                    CAPTURE(describe(c), large);
                    const Run with = run(c, Layout::separate);
                    for (const float lse : with.lse)
                        REQUIRE(std::abs(lse - c.sinks[0]) <= 2e-6 * c.sinks[0]);
                    for (const Values* values : {&with.out, &with.dq, &with.dk, &with.dv})
                        for (const double x : *values) REQUIRE(std::abs(x) < 1e-25);
                    for (const float x : with.dsinks) REQUIRE(std::abs(x) < 1e-25f);
                }
            }
}

TEST_CASE("the gradients of sinks are added to what is there", "[cuda]") {
    ON_EACH_KERNELS();
    for (const DType dtype : dtypes)
        for (const bool aligned : {false, true})
            for (int i = 0; i < 3; ++i) {
                Wish wish;
                wish.dtype = dtype;
                wish.aligned = aligned || alignment_chooses();
                wish.T = static_cast<int>(
                    i == 0 ? random_int(1, 3) : random_int(16, device_is_simulated() ? 60 : 600));
                wish.D = 16;
                Case c = random_case(wish);
                add_sinks(c);
                const Values before = random_values(c.sinks.size(), DType::fp32);
                const Run written = run(c, any_layout()),
                          added = run(c, any_layout(), {.dsinks = before});
                for (size_t h = 0; h < before.size(); ++h) {
                    CAPTURE(describe(c), h);
                    const double sum = before[h] + written.dsinks[h];
                    REQUIRE(std::abs(added.dsinks[h] - sum) <=
                            0x1p-23 * (std::abs(before[h]) + std::abs(written.dsinks[h])));
                }
            }
}

TEST_CASE("sinks without a gradient change no other result", "[cuda]") {
    ON_EACH_KERNELS();
    for (const DType dtype : dtypes) {
        Wish wish;
        wish.dtype = dtype;
        wish.aligned = alignment_chooses() || random_int(0, 1);
        wish.backward = false;
        wish.T = static_cast<int>(random_int(16, 60));
        Case c = random_case(wish);
        add_sinks(c);
        CHECK(
            same_bits(run(c, Layout::separate).out, run(c, Layout::separate, {.lse = false}).out));
    }
}

TEST_CASE("attention refuses windows and sinks that mean nothing, in a sentence", "[cuda]") {
    ON_EACH_KERNELS();
    Wish wish;
    wish.T = 8;
    wish.H_kv = 1;
    wish.H = 2;
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
    SECTION("a negative window") {
        c.shape.window = -1;
        CHECK(error().find("a window of -1 is negative") != std::string::npos);
    }
    SECTION("not one sink a head") {
        c.sinks = {1, 2, 3};
        CHECK(error().find("3 sinks for 2 query heads") != std::string::npos);
    }
    SECTION("sinks that are no floating numbers") {
        c.sinks = {1, 2};
        c.sinks_dtype = DType::int32;
        CHECK(error().find("sinks of dtype int32") != std::string::npos);
    }
}

TEST_CASE("the FLOPs and bytes of attention count what windows show") {
    for (int i = 0; i < 50; ++i) {
        AttentionShape s{
            .B = 2, .T = static_cast<int>(random_int(1, 40)), .S = 0, .H = 4, .H_kv = 2, .D = 8};
        s.S = s.T + static_cast<int>(random_int(0, 30));
        s.window = static_cast<int>(random_int(0, s.S + 5));
        int64_t pairs = 0;
        std::vector<bool> seen(static_cast<size_t>(s.S));
        for (int t = 0; t < s.T; ++t)
            for (int key = 0; key <= t + s.S - s.T; ++key)
                if (s.window == 0 || key > t + s.S - s.T - s.window) {
                    ++pairs;
                    seen[static_cast<size_t>(key)] = true;
                }
        const auto keys = std::ranges::count(seen, true);
        AttentionForward of_forward;
        AttentionBackward of_backward;
        of_forward.shape = of_backward.shape = s;
        const Cost forward = cost_of(of_forward), backward = cost_of(of_backward);
        CAPTURE(s.T, s.S, s.window);
        const double all_pairs = static_cast<double>(pairs) * s.B * s.H,
                     row = s.B * s.D * 4.0,  // bytes of a token's head
            queries = row * s.T * s.H, key_bytes = row * static_cast<double>(keys) * s.H_kv;
        CHECK(forward.flops == 4 * all_pairs * s.D);
        CHECK(backward.flops == 10 * all_pairs * s.D);
        CHECK(forward.bytes == 2 * queries + 2 * key_bytes);
        CHECK(backward.bytes == 4 * queries + 2 * key_bytes + 2 * row * s.S * s.H_kv);
    }
}

}  // namespace train_gpt
