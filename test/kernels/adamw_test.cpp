#include "kernels/adamw.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// A few tensors of odd sizes with their optimizer state, and the same state in float64.
struct Parameters {
    struct One {
        int64_t n = random_int(0, 3) == 0 ? random_int(1, 40)
                                          : random_int(1, device_is_simulated() ? 9000 : 15000);
        bool decay = random_int(0, 1) == 1, has_weights = random_int(0, 1) == 1;
        Buffer weights{DType::bf16, {n}};
        Buffer master{DType::fp32, {n}, random_normal(static_cast<size_t>(n))};
        Buffer m{DType::fp32, {n}, std::vector<float>(static_cast<size_t>(n))};
        Buffer v{DType::fp32, {n}, std::vector<float>(static_cast<size_t>(n))};
        Buffer gradient{DType::fp32, {n}};
        std::vector<AdamWReference> exact;

        One() {
            for (double theta : master.values()) exact.push_back({.master = theta});
        }
    };
    std::vector<std::unique_ptr<One>> all;

    Parameters() {
        for (int64_t i = random_int(1, 9); i > 0; --i) all.push_back(std::make_unique<One>());
    }
    void new_gradients(float stddev) {
        for (auto& one : all) {
            const std::vector<float> values = random_normal(static_cast<size_t>(one->n), stddev);
            for (size_t i = 0; i < values.size(); ++i) one->gradient.set(i, values[i]);
        }
    }
    std::vector<AdamWSegment> segments() const {
        std::vector<AdamWSegment> result;
        for (auto& one : all) {
            result.push_back({.weights = one->has_weights ? one->weights.as<bf16>() : nullptr,
                              .master = one->master.as<float>(),
                              .m = one->m.as<float>(),
                              .v = one->v.as<float>(),
                              .gradient = one->gradient.as<float>(),
                              .n = one->n,
                              .decay = one->decay});
        }
        return result;
    }
    std::string bytes() const {
        std::string result;
        for (auto& one : all) {
            result += one->weights.bytes() + one->master.bytes() + one->m.bytes() + one->v.bytes();
        }
        return result;
    }
};

/// The norm from partials, counts[i] of tensor i.
void finish_partials(Stream& stream, StepState* state, const double* partials,
                     const std::vector<int64_t>& counts, float scale, float clip) {
    const SharedArray<double> sums(counts.size());
    add_partials(stream, sums.data(), partials, counts);
    finish_norm(stream, state, sums.data(), static_cast<int64_t>(counts.size()), scale, clip);
    stream.synchronize();
}

struct GradientNorm {
    std::vector<int64_t> counts;
    SharedArray<double> partials{0};
    SharedArray<StepState> memory{1};

    GradientNorm() { *memory.data() = {}; }
    void finish(Stream& stream, float scale, float clip) const {
        finish_partials(stream, memory.data(), partials.data(), counts, scale, clip);
    }
    StepState state() const { return memory.values()[0]; }
};

GradientNorm norm_of(const Parameters& parameters, float scale, float clip) {
    GradientNorm norm;
    for (auto& one : parameters.all) norm.counts.push_back((one->n + norm_block - 1) / norm_block);
    int64_t total = 0;
    for (int64_t count : norm.counts) total += count;
    norm.partials = SharedArray<double>(static_cast<size_t>(total));
    std::vector<NormSegment> segments;
    int64_t first = 0;
    for (size_t i = 0; i < norm.counts.size(); ++i) {
        segments.push_back({parameters.all[i]->gradient.as<float>(), parameters.all[i]->n,
                            norm.partials.data() + first});
        first += norm.counts[i];
    }
    TestStream stream;
    norm_partials(stream, segments);
    norm.finish(stream, scale, clip);
    return norm;
}

}  // namespace

TEST_CASE(
    "norm partials are the blocks' sums of squares, and the norm is scaled and clipped as the "
    "contract says",
    "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 5; ++repeat) {
        Parameters parameters;
        parameters.new_gradients(0.3f);
        double exact = 0;
        const float scale = 0.01f;
        const GradientNorm norm = norm_of(parameters, scale, 0);
        const std::span<const double> partials = norm.partials.values();
        const StepState state = norm.state();
        size_t at = 0;
        for (auto& one : parameters.all) {
            for (double sum : norm_partials_reference(one->gradient.values())) {
                CHECK(std::abs(partials[at] - sum) <= 1e-6 * sum);
                exact += sum;
                ++at;
            }
        }
        exact = static_cast<double>(scale) * std::sqrt(exact);
        CHECK(std::abs(state.norm - exact) <= 1e-6 * exact);
        CHECK(state.multiplier == scale);
        CHECK(state.stop == 0);

        const float half = state.norm / 2;
        CHECK(std::abs(norm_of(parameters, scale, half).state().multiplier - scale / 2) <=
              1e-6f * scale);
        CHECK(norm_of(parameters, scale, 4 * half).state().multiplier == scale);
    }
}

TEST_CASE("the norm of zero gradients is zero and nothing is clipped", "[cuda]") {
    ON_EACH_DEVICE();
    Parameters parameters;
    parameters.new_gradients(0);
    const StepState state = norm_of(parameters, 0.5f, 1.0f).state();
    CHECK(state.norm == 0);
    CHECK(state.multiplier == 0.5f);
    CHECK(state.stop == 0);
}

TEST_CASE("a norm that is not finite stops the optimizer for good and names the first bad segment",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
        Parameters parameters;
        parameters.new_gradients(1);
        const size_t first =
            static_cast<size_t>(random_int(0, static_cast<int64_t>(parameters.all.size()) - 1));
        for (size_t i = first; i < parameters.all.size(); ++i) {
            auto& one = *parameters.all[i];
            one.gradient.set(static_cast<size_t>(random_int(0, one.n - 1)), bad);
        }
        GradientNorm norm = norm_of(parameters, 1, 1);
        CAPTURE(bad, first);
        CHECK(norm.state().stop == 1);
        CHECK(norm.state().bad_segment == static_cast<int32_t>(first));

        // A later, finite norm changes neither.
        std::ranges::fill(norm.partials.values(), 1.0);
        TestStream stream;
        norm.finish(stream, 1, 1);
        CHECK(norm.state().stop == 1);
        CHECK(norm.state().bad_segment == static_cast<int32_t>(first));

        const std::string before = parameters.bytes();
        adamw(stream, parameters.segments(),
              {.learning_rate = 1,
               .beta1 = 0.9f,
               .beta2 = 0.99f,
               .epsilon = 1e-8f,
               .weight_decay = 1,
               .step = 1,
               .state = norm.memory.data()});
        CHECK((parameters.bytes() == before));
    }
}

TEST_CASE(
    "adamw follows the float64 recurrence over several steps, decays only where asked, and rounds "
    "to bf16",
    "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 3; ++repeat) {
        Parameters parameters;
        AdamWStep args{.learning_rate = 0.01f,
                       .beta1 = 0.9f,
                       .beta2 = 0.95f,
                       .epsilon = 1e-8f,
                       .weight_decay = 0.1f};
        const int steps = 6;
        for (args.step = 1; args.step <= steps; ++args.step) {
            parameters.new_gradients(0.1f);
            const GradientNorm norm = norm_of(parameters, 0.25f, 0.5f);
            args.state = norm.memory.data();
            TestStream stream;
            adamw(stream, parameters.segments(), args);

            const double multiplier = norm.state().multiplier;
            for (auto& one : parameters.all) {
                const Values gradient = one->gradient.values();
                for (size_t i = 0; i < gradient.size(); ++i)
                    one->exact[i] =
                        adamw_reference(one->exact[i], gradient[i], multiplier, one->decay, args);
            }
        }
        for (auto& one : parameters.all) {
            double worst_master = 0, worst_m = 0, worst_v = 0, largest_m = 0, largest_v = 0;
            bool rounded = true;
            for (size_t i = 0; i < static_cast<size_t>(one->n); ++i) {
                const AdamWReference& exact = one->exact[i];
                // Each step rounds θ once and changes it by at most a few learning rates, with an
                // error of a few fp32 roundings.
                const double allowed = steps * (0x1p-24 * std::abs(exact.master) + 0x1p-19 * 0.01);
                worst_master =
                    worse(worst_master, std::abs(one->master[i] - exact.master) / allowed);
                worst_m = worse(worst_m, std::abs(one->m[i] - exact.m));
                worst_v = worse(worst_v, std::abs(one->v[i] - exact.v));
                largest_m = std::max(largest_m, std::abs(exact.m));
                largest_v = std::max(largest_v, exact.v);
                const bf16 expected(one->master.as<float>()[i]);
                rounded = rounded &&
                          (!one->has_weights || one->weights.as<bf16>()[i].bits == expected.bits);
            }
            CAPTURE(one->n, one->decay);
            CHECK(worst_master <= 1.5);
            CHECK(worst_m <= 1e-6 * largest_m);
            CHECK(worst_v <= 1e-6 * largest_v);
            CHECK(rounded);
        }
    }
}

TEST_CASE("with cautious decay adamw decays only what its step moves towards 0", "[cuda]") {
    ON_EACH_DEVICE();
    Parameters parameters;
    AdamWStep args{.learning_rate = 0.01f,
                   .beta1 = 0.9f,
                   .beta2 = 0.95f,
                   .epsilon = 1e-8f,
                   .weight_decay = 0.5f,
                   .cautious_decay = true};
    parameters.new_gradients(1);
    const GradientNorm norm = norm_of(parameters, 1, 0);
    args.state = norm.memory.data();
    TestStream stream;
    adamw(stream, parameters.segments(), args);
    int64_t decayed = 0, spared = 0, wrong = 0;
    for (const auto& one : parameters.all) {
        const Values gradient = one->gradient.values();
        for (size_t i = 0; i < gradient.size(); ++i) {
            // In the first step m/(1−β₁) = g and v/(1−β₂) = g²; where the sign is not clear, skip.
            const double g = gradient[i] * static_cast<double>(norm.state().multiplier),
                         theta = one->exact[i].master, u = g / (std::abs(g) + 1e-8);
            if (std::abs(g) < 1e-4) continue;
            const bool decays = one->decay && u * theta > 0;
            ++(decays ? decayed : spared);
            const double expected = theta - 0.01 * (u + (decays ? 0.5 * theta : 0));
            wrong += std::abs(one->master[i] - expected) > 1e-6 * (1 + std::abs(theta));
        }
    }
    CAPTURE(decayed, spared);
    CHECK(wrong == 0);
}

namespace {

/// Optimizer state of sizes.size() segments, with one piece of memory for each kind of state.
/// Segment i has sizes[i] elements and begins `gap` elements after the end of the previous one.
struct Pieces {
    static constexpr AdamWStep step{.learning_rate = 0.01f,
                                    .beta1 = 0.9f,
                                    .beta2 = 0.95f,
                                    .epsilon = 1e-8f,
                                    .weight_decay = 0.1f,
                                    .step = 3};

    std::vector<int64_t> sizes;
    std::vector<int64_t> first;
    std::unique_ptr<Buffer> weights, master, m, v, gradient;
    SharedArray<double> partials{0};
    SharedArray<StepState> state{1};

    Pieces(const std::vector<int64_t>& sizes_, int64_t gap) : sizes(sizes_) {
        int64_t total = gap, blocks = 0;
        for (int64_t n : sizes) {
            first.push_back(total);
            total += n + gap;
            blocks += (n + norm_block - 1) / norm_block;
        }
        const auto normal = [&] {
            return std::make_unique<Buffer>(DType::fp32, std::initializer_list<int64_t>{total},
                                            random_normal(static_cast<size_t>(total)));
        };
        weights = std::make_unique<Buffer>(DType::bf16, std::initializer_list<int64_t>{total});
        master = normal();
        m = normal();
        v = normal();
        gradient = normal();
        for (size_t i = 0; i < static_cast<size_t>(total); ++i)
            v->set(i, static_cast<float>(std::abs((*v)[i])));
        partials = SharedArray<double>(static_cast<size_t>(blocks));
        *state.data() = {};
    }
    void update(Stream& stream) {
        std::vector<NormSegment> norm_segments;
        std::vector<AdamWSegment> segments;
        std::vector<int64_t> counts;
        double* next = partials.data();
        for (size_t i = 0; i < sizes.size(); ++i) {
            const auto at = [&](const std::unique_ptr<Buffer>& of) {
                return of->as<float>() + first[i];
            };
            norm_segments.push_back({at(gradient), sizes[i], next});
            counts.push_back((sizes[i] + norm_block - 1) / norm_block);
            next += counts.back();
            segments.push_back({.weights = i % 3 == 2 ? nullptr : weights->as<bf16>() + first[i],
                                .master = at(master),
                                .m = at(m),
                                .v = at(v),
                                .gradient = at(gradient),
                                .n = sizes[i],
                                .decay = i % 2 == 0});
        }
        norm_partials(stream, norm_segments);
        finish_partials(stream, state.data(), partials.data(), counts, 0.5f, 1.0f);
        AdamWStep args = step;
        args.state = state.data();
        adamw(stream, segments, args);
    }
};

}  // namespace

TEST_CASE("norms and adamw take any number of segments, empty ones too, that begin at any element",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (int64_t gap : {int64_t{0}, int64_t{1}, int64_t{64}}) {
        std::vector<int64_t> sizes;
        for (int64_t i = gap == 0 ? 1300 : random_int(1, 40); i > 0; --i)
            sizes.push_back(gap == 64 ? 64 * random_int(0, 70) : random_int(0, 9));
        sizes.push_back(gap == 0 ? 2 * norm_block + 3 : norm_block);
        Pieces pieces(sizes, gap);
        const std::vector<double> weights = pieces.weights->values(),
                                  master = pieces.master->values(), m = pieces.m->values(),
                                  v = pieces.v->values(), gradient = pieces.gradient->values();
        TestStream stream;
        pieces.update(stream);

        double sum = 0;
        size_t wrong = 0, checked = 0, beside = 0;
        for (size_t i = 0; i < sizes.size(); ++i)
            for (int64_t j = 0; j < sizes[i]; ++j)
                sum += std::pow(gradient[static_cast<size_t>(pieces.first[i] + j)], 2.0);
        const StepState state = pieces.state.values()[0];
        CAPTURE(gap, sizes.size());
        CHECK(std::abs(state.norm - 0.5 * std::sqrt(sum)) <= 1e-6 * state.norm);
        CHECK(std::abs(state.multiplier - 0.5f / std::max(state.norm, 1.0f)) <= 1e-6f);

        const std::vector<double> new_weights = pieces.weights->values(),
                                  new_master = pieces.master->values(), new_m = pieces.m->values(),
                                  new_v = pieces.v->values();
        std::vector<char> inside(master.size());
        for (size_t i = 0; i < sizes.size(); ++i) {
            for (int64_t j = 0; j < sizes[i]; ++j, ++checked) {
                const size_t at = static_cast<size_t>(pieces.first[i] + j);
                inside[at] = 1;
                const AdamWReference exact =
                    adamw_reference({master[at], m[at], v[at]}, gradient[at], state.multiplier,
                                    i % 2 == 0, Pieces::step);
                const double g = state.multiplier * gradient[at],
                             change = std::abs(exact.master - master[at]);
                const bool right =
                    std::abs(new_m[at] - exact.m) <= 1e-6 * (std::abs(m[at]) + std::abs(g)) &&
                    std::abs(new_v[at] - exact.v) <= 1e-6 * exact.v &&
                    std::abs(new_master[at] - exact.master) <=
                        1e-6 * (std::abs(master[at]) + change) &&
                    (i % 3 == 2
                         ? std::isnan(new_weights[at])
                         : new_weights[at] == to_float(bf16(static_cast<float>(new_master[at]))));
                wrong += !right;
            }
        }
        for (size_t at = 0; at < inside.size(); ++at)
            beside += !inside[at] && (new_master[at] != master[at] || new_m[at] != m[at] ||
                                      new_v[at] != v[at] || !std::isnan(new_weights[at]));
        CHECK(checked >= norm_block);
        CHECK(wrong == 0);
        CHECK(beside == 0);
    }
}

TEST_CASE("the first segment is named with which the norm is no longer finite, among thousands",
          "[cuda]") {
    ON_EACH_DEVICE();
    const std::vector<int64_t> counts(2001, 2);
    for (int64_t bad :
         {int64_t{0}, int64_t{999}, int64_t{1000}, int64_t{2000}, random_int(0, 2000)}) {
        const SharedArray<double> partials(counts.size() * 2);
        const SharedArray<StepState> state(1);
        *state.data() = {};
        std::ranges::fill(partials.values(), 1.0);
        // Finite numbers, but the root of their sum is not finite in fp32. The later ones are
        // infinite.
        for (size_t i = static_cast<size_t>(2 * bad); i < partials.values().size(); ++i)
            partials.values()[i] = i > static_cast<size_t>(2 * bad) + 1
                                       ? std::numeric_limits<double>::infinity()
                                       : 6e76;
        TestStream stream;
        finish_partials(stream, state.data(), partials.data(), counts, 1, 1);
        CAPTURE(bad);
        CHECK(state.values()[0].stop == 1);
        CHECK(state.values()[0].bad_segment == bad);
        CHECK(state.values()[0].multiplier == 0);
    }
}

TEST_CASE("partials are added tensor by tensor, and sums of ranks rank by rank", "[cuda]") {
    ON_EACH_DEVICE();
    std::vector<int64_t> counts;
    for (int64_t i = random_int(1, 2100); i > 0; --i) counts.push_back(random_int(0, 5));
    counts.push_back(random_int(1025, 3000));
    const auto n = std::ssize(counts);
    const SharedArray<double> partials(
        static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
    for (double& value : partials.values()) value = static_cast<double>(random_int(1, 1 << 20));
    const SharedArray<double> sums(counts.size());
    std::ranges::fill(sums.values(), std::nan(""));
    TestStream stream;
    add_partials(stream, sums.data(), partials.data(), counts);
    const double* next = partials.values().data();
    std::vector<double> expected;  // sums of integers, exact in any order
    for (const int64_t count : counts) {
        expected.push_back(std::accumulate(next, next + count, 0.0));
        next += count;
    }
    CHECK(std::ranges::equal(sums.values(), expected));

    const int64_t ranks = random_int(1, 20);
    const SharedArray<double> rows(static_cast<size_t>(ranks * n)), total(counts.size());
    for (double& value : rows.values()) value = double{random_normal(1)[0]} / 3;
    std::ranges::fill(total.values(), std::nan(""));
    add_rows(stream, total.data(), rows.data(), ranks, n);
    const std::span<const double> in = rows.values(), out = total.values();
    for (int64_t i = 0; i < n; ++i) {
        double sum = 0;  // the order of ranks is part of the contract, so bits are equal
        for (int64_t r = 0; r < ranks; ++r) sum += in[static_cast<size_t>(r * n + i)];
        CHECK(out[static_cast<size_t>(i)] == sum);
    }
}

TEST_CASE("norms and adamw on the GPU agree with the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    Pieces ours({3, 4096, 5000, 1, 64}, 3);
    Pieces expected({3, 4096, 5000, 1, 64}, 3);
    for (auto [to, from] : {std::pair{&expected.master, &ours.master},
                            {&expected.m, &ours.m},
                            {&expected.v, &ours.v},
                            {&expected.gradient, &ours.gradient}})
        std::memcpy((*to)->tensor().data, (*from)->tensor().data, (*to)->tensor().bytes());
    TestStream gpu;
    Stream cpu;
    ours.update(gpu);
    expected.update(cpu);
    for (auto [a, b] : {std::pair{&expected.master, &ours.master},
                        {&expected.m, &ours.m},
                        {&expected.v, &ours.v}}) {
        const std::vector<double> x = (*a)->values(), y = (*b)->values();
        double worst = 0;
        for (size_t i = 0; i < x.size(); ++i)
            worst = worse(worst, std::abs(x[i] - y[i]) / (std::abs(x[i]) + 0.1));
        CHECK(worst <= 1e-6);
    }
    CHECK(std::abs(ours.state.values()[0].norm - expected.state.values()[0].norm) <=
          1e-6f * expected.state.values()[0].norm);
}

TEST_CASE("norms and adamw give the same bits whatever the number of threads, and in every run",
          "[cuda]") {
    ON_EACH_DEVICE();
    const int64_t sizes[] = {random_int(1, 30000), random_int(1, 4096), random_int(1, 9000), 4096};
    std::vector<std::vector<float>> values, gradients;
    for (int64_t n : sizes) {
        values.push_back(random_normal(static_cast<size_t>(n)));
        gradients.push_back(random_normal(static_cast<size_t>(n)));
    }
    check_thread_independence([&] {
        std::vector<std::unique_ptr<Buffer>> buffers;
        const auto buffer = [&](DType dtype, const std::vector<float>& of) {
            buffers.push_back(std::make_unique<Buffer>(
                dtype, std::initializer_list<int64_t>{static_cast<int64_t>(of.size())}, of));
            return buffers.back().get();
        };
        std::vector<AdamWSegment> segments;
        std::vector<NormSegment> norm_segments;
        std::vector<int64_t> counts;
        const SharedArray<double> partials(64);
        const SharedArray<StepState> state(1);
        *state.data() = {};
        double* next = partials.data();
        for (size_t i = 0; i < std::size(sizes); ++i) {
            const float* gradient = buffer(DType::fp32, gradients[i])->as<float>();
            const std::vector<float> zero(values[i].size());
            segments.push_back({.weights = buffer(DType::bf16, zero)->as<bf16>(),
                                .master = buffer(DType::fp32, values[i])->as<float>(),
                                .m = buffer(DType::fp32, zero)->as<float>(),
                                .v = buffer(DType::fp32, zero)->as<float>(),
                                .gradient = gradient,
                                .n = sizes[i],
                                .decay = i % 2 == 0});
            norm_segments.push_back({gradient, sizes[i], next});
            counts.push_back((sizes[i] + norm_block - 1) / norm_block);
            next += counts.back();
        }
        TestStream stream;
        norm_partials(stream, norm_segments);
        finish_partials(stream, state.data(), partials.data(), counts, 1, 1);
        adamw(stream, segments,
              {.learning_rate = 0.1f,
               .beta1 = 0.9f,
               .beta2 = 0.95f,
               .epsilon = 1e-8f,
               .weight_decay = 0.1f,
               .step = 3,
               .state = state.data()});
        std::string bytes(reinterpret_cast<const char*>(state.values().data()), sizeof(StepState));
        bytes.append(reinterpret_cast<const char*>(partials.values().data()),
                     partials.values().size_bytes());
        for (auto& one : buffers) bytes += one->bytes();
        return bytes;
    });
}

}  // namespace train_gpt
