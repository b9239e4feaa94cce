#include "kernels/dynamic_map.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "kernels/adamw.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// A map's absolute values in float64, as the contract has them.
std::vector<double> map_in_float64(Coding coding) {
    std::vector<double> map{0};
    for (int decade = 0; decade < 7; ++decade) {
        const double top = std::pow(10.0, decade - 6), bottom = top / 10;
        const int n = (coding == Coding::signs ? 1 : 2) << decade;
        for (int i = 0; i < n; ++i) {
            const double low = bottom + (top - bottom) * i / n,
                         high = bottom + (top - bottom) * (i + 1) / n;
            map.push_back((low + high) / 2);
        }
    }
    if (coding == Coding::signs)
        map.back() = 1;
    else
        map.push_back(1);
    return map;
}

int place_of(Coding coding, uint8_t code) { return coding == Coding::signs ? code & 0x7f : code; }

/// Whether a code is the nearest one to value / scale, up to a few roundings in fp32.
bool is_nearest(Coding coding, const std::vector<double>& map, double value, double scale,
                uint8_t code) {
    const double x = std::abs(value) / scale;
    if (coding == Coding::signs && code > 0x7f && value >= 0) return false;
    if (coding == Coding::signs && code <= 0x7f && code > 0 && value <= 0) return false;
    if (code == 0x80 && coding == Coding::signs) return false;  // there is one 0
    if (coding == Coding::roots && (value > 0) != (code > 0)) return false;
    const auto place = static_cast<size_t>(place_of(coding, code));
    double best = std::abs(map.back() - x);
    for (size_t k = coding == Coding::roots && value > 0 ? 1 : 0; k < map.size(); ++k)
        best = std::min(best, std::abs(map[k] - x));
    return std::abs(map[place] - x) <= best + 0x1p-21 * x;
}

/// Blocks with values of many sizes, exact zeros, and now and then one that is far larger.
std::vector<float> random_values(Coding coding, int64_t n) {
    const float size = std::ldexp(1.0f, static_cast<int>(random_int(-60, 60)));
    const double spread = static_cast<double>(random_int(0, 8));
    std::vector<float> values = random_normal(static_cast<size_t>(n));
    const std::vector<float> exponents = random_normal(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] *= size * static_cast<float>(std::exp(spread * double{exponents[i]}));
        if (random_int(0, 30) == 0) values[i] = 0;
        if (coding == Coding::roots) values[i] = std::abs(values[i]);
    }
    if (random_int(0, 3) == 0) values[static_cast<size_t>(random_int(0, n - 1))] = size * 0x1p40f;
    return values;
}

struct Codes {
    std::vector<uint8_t> codes;
    std::vector<float> scales, decoded;
};

Codes codes_of(Coding coding, const std::vector<float>& values) {
    Codes result{std::vector<uint8_t>(values.size(), 0x55),
                 std::vector<float>((values.size() + 255) / 256, NAN),
                 std::vector<float>(values.size(), NAN)};
    encode(coding, values, result.codes.data(), result.scales.data());
    decode(coding, result.codes.data(), result.scales.data(), result.decoded);
    return result;
}

}  // namespace

TEST_CASE("values become the nearest of the map, with the largest of each block as its scale") {
    for (int repeat = 0; repeat < 20; ++repeat)
        for (const Coding coding : {Coding::signs, Coding::roots}) {
            const std::vector<double> map = map_in_float64(coding);
            REQUIRE(map.size() == (coding == Coding::signs ? 128 : 256));
            const std::vector<float> values = random_values(coding, random_int(1, 1500));
            const Codes of = codes_of(coding, values);
            int64_t wrong = 0, wrong_scales = 0, not_decoded = 0;
            for (size_t i = 0; i < values.size(); ++i) {
                const size_t first = i / 256 * 256;
                float largest = 0;
                for (size_t k = first; k < std::min(first + 256, values.size()); ++k)
                    largest = std::max(largest, std::abs(values[k]));
                const float scale = of.scales[i / 256];
                wrong_scales += scale != (largest >= smallest_scale ? largest : 0);
                if (scale == 0) {
                    wrong += of.codes[i] != 0 || of.decoded[i] != 0;
                    continue;
                }
                wrong += !is_nearest(coding, map, double{values[i]}, double{scale}, of.codes[i]);
                const double exact = map[static_cast<size_t>(place_of(coding, of.codes[i]))] *
                                     double{scale} *
                                     (coding == Coding::signs && of.codes[i] > 0x7f ? -1 : 1);
                not_decoded +=
                    !(std::abs(double{of.decoded[i]} - exact) <= 0x1p-22 * std::abs(exact));
            }
            CAPTURE(repeat, coding == Coding::roots, values.size());
            CHECK(wrong == 0);
            CHECK(wrong_scales == 0);
            CHECK(not_decoded == 0);
            // The values of codes have the same codes: files and other meshes keep the bits.
            const Codes again = codes_of(coding, of.decoded);
            CHECK(again.codes == of.codes);
            CHECK(again.scales == of.scales);
        }
}

TEST_CASE("halfway between two values of the map the smaller one is taken") {
    for (const Coding coding : {Coding::signs, Coding::roots}) {
        const std::vector<double> map = map_in_float64(coding);
        int64_t wrong = 0;
        for (size_t k = coding == Coding::signs ? 0 : 1; k + 1 < map.size(); ++k) {
            const auto middle = static_cast<float>((map[k] + map[k + 1]) / 2);
            const float above = std::nextafter(middle, 2.0f);
            const Codes of = codes_of(coding, {middle, above, 1.0f});
            wrong += of.codes[0] != k || of.codes[1] != k + 1 || of.codes[2] != map.size() - 1;
            if (coding == Coding::roots) continue;
            const Codes below = codes_of(coding, {-middle, -above, -1.0f});
            wrong += below.codes[0] != (k > 0 ? k | 0x80 : 0) || below.codes[1] != ((k + 1) | 0x80);
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("zeros, numbers near the limits of fp32 and positive roots keep their meaning") {
    const float giant = std::numeric_limits<float>::max(), tiny = 0x1p-149f;
    for (const float scale : {0.0f, tiny, 0x1p-101f}) {
        const Codes of = codes_of(Coding::signs, {scale, -scale, 0});
        CHECK(of.scales[0] == 0);
        CHECK(of.decoded == std::vector<float>{0, 0, 0});
    }
    const Codes of = codes_of(Coding::signs, {giant, -giant, 1, -0.0f, tiny});
    CHECK(of.decoded == std::vector<float>{giant, -giant, 0, 0, 0});
    // The largest and the smallest root of a number in fp32
    const float smallest_root = std::sqrt(tiny);
    const Codes roots = codes_of(Coding::roots, {largest_root, smallest_root, 0, 1});
    CHECK(roots.decoded[0] == largest_root);
    CHECK(roots.decoded[1] > 0);
    CHECK(roots.decoded[2] == 0);
    CHECK(roots.decoded[3] > 0);
    CHECK(codes_of(Coding::roots, {smallest_root}).decoded[0] == smallest_root);
    CHECK(std::isfinite(largest_root * largest_root));
}

// ---- AdamW with moments in 16 or 8 bits ---------------------------------------------------------

namespace {

/// Tensors with moments in bf16 or as codes. Those after the first begin at odd addresses.
struct SmallMoments {
    DType dtype;
    std::vector<int64_t> sizes, first, first_scale;
    SharedArray<float> master{0}, gradient{0}, m_scales{0}, v_scales{0};
    SharedArray<bf16> weights{0}, m{0}, v{0};
    SharedArray<uint8_t> m_codes{0}, v_codes{0};
    SharedArray<StepState> state{1};

    explicit SmallMoments(DType dtype_, float gradient_size) : dtype(dtype_) {
        int64_t total = 0, blocks = 0;
        for (int64_t i = random_int(1, 4); i > 0; --i) {
            sizes.push_back(random_int(0, 2) == 0
                                ? random_int(1, 300)
                                : random_int(1, device_is_simulated() ? 6000 : 15000));
            first.push_back(total);
            first_scale.push_back(blocks);
            total += sizes.back() + random_int(0, 2);
            blocks += (sizes.back() + code_block - 1) / code_block;
        }
        const auto n = static_cast<size_t>(total), b = static_cast<size_t>(blocks);
        master = SharedArray<float>(n), gradient = SharedArray<float>(n);
        weights = SharedArray<bf16>(n), m = SharedArray<bf16>(n), v = SharedArray<bf16>(n);
        m_codes = SharedArray<uint8_t>(n), v_codes = SharedArray<uint8_t>(n);
        m_scales = SharedArray<float>(b), v_scales = SharedArray<float>(b);
        *state.data() = {.multiplier = 0.5f};
        std::ranges::copy(random_normal(n), master.data());
        std::ranges::copy(random_normal(n, gradient_size), gradient.data());
        const std::vector<float> new_m = random_normal(n, 0.1f);
        std::vector<float> new_v = random_normal(n, 0.1f);
        // Some v stay tiny, while the largest of their blocks grow.
        for (size_t i = 0; i < n; ++i) {
            if (i % 50 == 3) new_v[i] = 1e-9f, gradient.data()[i] = 0;
            if (i % 256 == 7) gradient.data()[i] *= 64;
        }
        for (size_t t = 0; t < sizes.size(); ++t) {
            const auto size = static_cast<size_t>(sizes[t]);
            std::vector<float> of_m, of_v;
            for (size_t i = 0; i < size; ++i) {
                const size_t at = static_cast<size_t>(first[t]) + i;
                m.data()[at] = bf16(new_m[at]);
                v.data()[at] = bf16(new_v[at] * new_v[at]);
                of_m.push_back(new_m[at]);
                of_v.push_back(std::abs(new_v[at]));
            }
            encode(Coding::signs, of_m, m_codes.data() + first[t],
                   m_scales.data() + first_scale[t]);
            encode(Coding::roots, of_v, v_codes.data() + first[t],
                   v_scales.data() + first_scale[t]);
        }
    }
    /// In segments of at most `most` elements, a multiple of norm_block.
    std::vector<AdamWSegment> segments(int64_t most) const {
        std::vector<AdamWSegment> all;
        for (size_t t = 0; t < sizes.size(); ++t)
            for (int64_t at = 0; at < sizes[t]; at += most) {
                const int64_t place = first[t] + at, scale = first_scale[t] + at / code_block;
                const bool has_codes = dtype == DType::uint8;
                all.push_back({.weights = t % 2 == 0 ? weights.data() + place : nullptr,
                               .master = master.data() + place,
                               .m = has_codes ? static_cast<void*>(m_codes.data() + place)
                                              : static_cast<void*>(m.data() + place),
                               .v = has_codes ? static_cast<void*>(v_codes.data() + place)
                                              : static_cast<void*>(v.data() + place),
                               .gradient = gradient.data() + place,
                               .n = std::min(most, sizes[t] - at),
                               .decay = t % 2 == 1,
                               .tensor = static_cast<uint32_t>(t),
                               .m_scales = has_codes ? m_scales.data() + scale : nullptr,
                               .v_scales = has_codes ? v_scales.data() + scale : nullptr,
                               .first = at});
            }
        return all;
    }
    std::string bytes() const {
        std::string all;
        const auto add = [&](const auto& array) {
            const auto values = array.values();
            all.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
        };
        add(master), add(weights), add(m), add(v), add(m_codes), add(v_codes), add(m_scales),
            add(v_scales);
        return all;
    }
    /// The moments of tensor t in float64.
    std::vector<AdamWReference> values(size_t t) const {
        std::vector<AdamWReference> all;
        const std::vector<double> signs = map_in_float64(Coding::signs),
                                  roots = map_in_float64(Coding::roots);
        for (int64_t i = 0; i < sizes[t]; ++i) {
            const auto at = static_cast<size_t>(first[t] + i),
                       block = static_cast<size_t>(first_scale[t] + i / code_block);
            AdamWReference& one = all.emplace_back();
            one.master = double{master.values()[at]};
            if (dtype == DType::bf16) {
                one.m = double{to_float(m.values()[at])};
                one.v = double{to_float(v.values()[at])};
                continue;
            }
            const uint8_t code = m_codes.values()[at];
            one.m = signs[code & 0x7f] * (code > 0x7f ? -1 : 1) * double{m_scales.values()[block]};
            const double root = roots[v_codes.values()[at]] * double{v_scales.values()[block]};
            one.v = root * root;
        }
        return all;
    }
};

}  // namespace

TEST_CASE("adamw with small moments follows the float64 recurrence and rounds what it keeps",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::bf16, DType::uint8})
        for (int repeat = 0; repeat < 3; ++repeat) {
            SmallMoments all(dtype, std::ldexp(1.0f, static_cast<int>(random_int(-12, 3))));
            const AdamWStep args{.learning_rate = 0.01f,
                                 .beta1 = 0.9f,
                                 .beta2 = 0.99f,
                                 .epsilon = 1e-8f,
                                 .weight_decay = 0.1f,
                                 .step = random_int(1, 1000),
                                 .state = all.state.data(),
                                 .moments = dtype,
                                 .seed = static_cast<uint64_t>(random_int(0, 1 << 30))};
            std::vector<std::vector<AdamWReference>> exact;
            std::vector<Values> largest_change;  // of a weight, if no terms of m cancelled
            for (size_t t = 0; t < all.sizes.size(); ++t) {
                exact.push_back(all.values(t));
                largest_change.emplace_back();
                for (size_t i = 0; i < exact[t].size(); ++i) {
                    const double g =
                        double{all.gradient.values()[static_cast<size_t>(all.first[t]) + i]};
                    AdamWReference& one = exact[t][i];
                    AdamWReference larger = one;
                    larger.m = std::abs(larger.m);
                    one = adamw_reference(one, g, 0.5, t % 2 == 1, args);
                    const double theta = larger.master;
                    larger = adamw_reference(larger, std::abs(g), 0.5, false, args);
                    largest_change[t].push_back(std::abs(larger.master - theta) +
                                                0.001 * std::abs(theta));
                }
            }
            TestStream stream;
            adamw(stream, all.segments(1 << 30), args);
            const std::vector<double> signs = map_in_float64(Coding::signs),
                                      roots = map_in_float64(Coding::roots);
            for (size_t t = 0; t < all.sizes.size(); ++t) {
                int64_t wrong_master = 0, wrong_weights = 0, wrong_m = 0, wrong_v = 0,
                        wrong_scales = 0;
                const RandomStream random(args.seed, RandomPurpose::rounding,
                                          static_cast<uint32_t>(t),
                                          static_cast<uint64_t>(args.step));
                for (int64_t i = 0; i < all.sizes[t]; ++i) {
                    const AdamWReference& e = exact[t][static_cast<size_t>(i)];
                    const auto at = static_cast<size_t>(all.first[t] + i);
                    const float master = all.master.values()[at];
                    wrong_master += !(std::abs(double{master} - e.master) <=
                                      0x1p-23 * std::abs(e.master) +
                                          0x1p-20 * largest_change[t][static_cast<size_t>(i)]);
                    wrong_weights +=
                        t % 2 == 0 && all.weights.values()[at].bits != bf16(master).bits;
                    if (dtype == DType::bf16) {
                        const double m = double{to_float(all.m.values()[at])},
                                     v = double{to_float(all.v.values()[at])};
                        // Half the spacing; and terms of m may cancel.
                        const double half = std::ldexp(1.0, std::ilogb(e.m) - 8);
                        wrong_m += !(std::abs(m - e.m) <= (1 + 0x1p-10) * half + 0x1p-22);
                        // Up if the random word exceeds what is left to the next number.
                        const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(e.v));
                        const double part = (bits & 0xffffu) / 65536.0,
                                     drawn = (random.bits(static_cast<uint64_t>(i)) & 0xffffu) /
                                             65536.0;
                        if (std::abs(part + drawn - 1) < 0x1p-12 || part < 0x1p-12 ||
                            part > 1 - 0x1p-12)
                            continue;
                        const uint32_t wanted =
                            (bits & 0xffff0000u) + (part + drawn >= 1 ? 0x10000u : 0);
                        wrong_v += v != double{std::bit_cast<float>(wanted)};
                        continue;
                    }
                    const int64_t begin = i / code_block * code_block,
                                  end = std::min(all.sizes[t], begin + code_block);
                    double largest_m = 0, largest_v = 0;
                    for (int64_t k = begin; k < end; ++k) {
                        const AdamWReference& other = exact[t][static_cast<size_t>(k)];
                        largest_m = std::max(largest_m, std::abs(other.m));
                        largest_v = std::max(largest_v, other.v);
                    }
                    const auto block = static_cast<size_t>(all.first_scale[t] + i / code_block);
                    const double m_scale = double{all.m_scales.values()[block]},
                                 v_scale = double{all.v_scales.values()[block]};
                    wrong_scales += !(std::abs(m_scale - largest_m) <= 0x1p-20 * largest_m) ||
                                    !(std::abs(v_scale - std::sqrt(largest_v)) <=
                                      0x1p-20 * std::sqrt(largest_v));
                    // Terms of m may cancel; then a code may be that of a neighbour.
                    const double slack = 0x1p-22 * largest_m;
                    bool has_code = false;
                    for (const double x : {e.m - slack, e.m, e.m + slack})
                        has_code = has_code || is_nearest(Coding::signs, signs, x, m_scale,
                                                          all.m_codes.values()[at]);
                    wrong_m += !has_code;
                    wrong_v += !is_nearest(Coding::roots, roots, std::sqrt(e.v), v_scale,
                                           all.v_codes.values()[at]);
                }
                CAPTURE(name_of(dtype), t, all.sizes[t], args.step, args.seed);
                CHECK(wrong_master == 0);
                CHECK(wrong_weights == 0);
                CHECK(wrong_m == 0);
                CHECK(wrong_v == 0);
                CHECK(wrong_scales == 0);
            }
        }
}

TEST_CASE("small moments do not depend on how a tensor is cut, and a refused step keeps them",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::bf16, DType::uint8}) {
        const SmallMoments whole(dtype, 1);
        AdamWStep args{.learning_rate = 0.01f,
                       .beta1 = 0.9f,
                       .beta2 = 0.95f,
                       .epsilon = 1e-8f,
                       .weight_decay = 0.1f,
                       .step = 7,
                       .cautious_decay = random_int(0, 1) == 1,
                       .state = whole.state.data(),
                       .moments = dtype,
                       .seed = 5};
        const std::string before = whole.bytes();
        TestStream stream;
        for (int32_t StepState::*refuses :
             {&StepState::stop, &StepState::overflow, &StepState::skip}) {
            whole.state.data()->*refuses = 1;
            adamw(stream, whole.segments(norm_block), args);
            CHECK((whole.bytes() == before));
            *whole.state.data() = {.multiplier = 0.5f};
        }
        // Twice from the same start: as one segment each, and cut.
        const auto copied = [&](const auto& from) {
            const auto values = from.values();
            return std::vector(values.begin(), values.end());
        };
        const auto master = copied(whole.master);
        const auto m = copied(whole.m), v = copied(whole.v);
        const auto m_codes = copied(whole.m_codes), v_codes = copied(whole.v_codes);
        const auto m_scales = copied(whole.m_scales), v_scales = copied(whole.v_scales);
        adamw(stream, whole.segments(1 << 30), args);
        const std::string once = whole.bytes();
        CHECK((once != before));
        std::ranges::copy(master, whole.master.values().begin());
        std::ranges::copy(m, whole.m.values().begin());
        std::ranges::copy(v, whole.v.values().begin());
        std::ranges::copy(m_codes, whole.m_codes.values().begin());
        std::ranges::copy(v_codes, whole.v_codes.values().begin());
        std::ranges::copy(m_scales, whole.m_scales.values().begin());
        std::ranges::copy(v_scales, whole.v_scales.values().begin());
        adamw(stream, whole.segments(norm_block), args);
        CHECK((whole.bytes() == once));
    }
}

TEST_CASE("v in bf16 keeps its mean where rounding to nearest would let it grow only", "[cuda]") {
    ON_EACH_DEVICE();
    // With β₂ = 0.999 and constant gradients v shrinks by 0.1 % of its distance in a step, which is
    // less than half of bf16's spacing.
    const int64_t n = device_is_simulated() ? 2000 : 20000;
    const int steps = device_is_simulated() ? 100 : 400;
    SharedArray<float> master(static_cast<size_t>(n)), gradient(static_cast<size_t>(n));
    SharedArray<bf16> m(static_cast<size_t>(n)), v(static_cast<size_t>(n));
    SharedArray<StepState> state(1);
    *state.data() = {.multiplier = 1};
    std::ranges::fill(master.values(), 0.0f);
    std::ranges::fill(gradient.values(), 0.5f);
    std::ranges::fill(m.values(), bf16(0));
    std::ranges::fill(v.values(), bf16(1));
    TestStream stream;
    const AdamWSegment segment{
        .master = master.data(), .m = m.data(), .v = v.data(), .gradient = gradient.data(), .n = n};
    AdamWStep args{.learning_rate = 0,
                   .beta1 = 0.9f,
                   .beta2 = 0.999f,
                   .epsilon = 1e-8f,
                   .state = state.data(),
                   .moments = DType::bf16,
                   .seed = static_cast<uint64_t>(random_int(0, 1 << 30))};
    for (args.step = 1; args.step <= steps; ++args.step) adamw(stream, {&segment, 1}, args);
    double mean = 0;
    for (const bf16 x : v.values()) mean += double{to_float(x)} / static_cast<double>(n);
    const double expected = 0.25 + 0.75 * std::pow(0.999, steps);
    // A rounding's deviation is at most half the spacing, 2⁻⁹; each of the steps has one.
    const double deviation = 0x1p-9 * std::sqrt(steps / static_cast<double>(n));
    CAPTURE(mean, expected, args.seed);
    CHECK(std::abs(mean - expected) <= 6 * deviation + 1e-4);
}

}  // namespace train_gpt
