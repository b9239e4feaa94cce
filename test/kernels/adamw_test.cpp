#include "kernels/adamw.h"

#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

/// A few tensors of odd sizes with their optimizer state, and the same in float64.
struct Parameters {
    struct One {
        int64_t n = random_int(0, 3) == 0 ? random_int(1, 40) : random_int(1, 15000);
        bool decay = random_int(0, 1) == 1, has_weights = random_int(0, 1) == 1;
        Buffer weights{DType::bf16, {n}};
        Buffer master{DType::fp32, {n}, random_normal(static_cast<size_t>(n))};
        Buffer m{DType::fp32, {n}, std::vector<float>(static_cast<size_t>(n))};
        Buffer v{DType::fp32, {n}, std::vector<float>(static_cast<size_t>(n))};
        Buffer gradient{DType::fp32, {n}};
        std::vector<double> exact_master = master.values(), exact_m = m.values(),
                            exact_v = v.values();
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

struct Norm {
    std::vector<double> partials;
    std::vector<int64_t> counts;
    StepState state;
};

Norm norm_of(const Parameters& parameters, float scale, float clip) {
    Norm norm;
    for (auto& one : parameters.all) norm.counts.push_back((one->n + norm_block - 1) / norm_block);
    int64_t total = 0;
    for (int64_t count : norm.counts) total += count;
    norm.partials.assign(static_cast<size_t>(total), std::numeric_limits<double>::quiet_NaN());
    std::vector<NormSegment> segments;
    int64_t first = 0;
    for (size_t i = 0; i < norm.counts.size(); ++i) {
        segments.push_back({parameters.all[i]->gradient.as<float>(), parameters.all[i]->n,
                            norm.partials.data() + first});
        first += norm.counts[i];
    }
    TestStream stream;
    norm_partials(stream, segments);
    finish_norm(stream, &norm.state, norm.partials.data(), norm.counts, scale, clip);
    return norm;
}

}  // namespace

TEST_CASE(
    "norm partials are the blocks' sums of squares, and the norm is scaled and clipped as the "
    "contract says") {
    for (int repeat = 0; repeat < 5; ++repeat) {
        Parameters parameters;
        parameters.new_gradients(0.3f);
        double exact = 0;
        size_t at = 0;
        const float scale = 0.01f;
        const Norm norm = norm_of(parameters, scale, 0);
        for (auto& one : parameters.all) {
            for (int64_t first = 0; first < one->n; first += norm_block, ++at) {
                double sum = 0;
                for (int64_t i = first; i < std::min(one->n, first + norm_block); ++i) {
                    const double g = one->gradient[static_cast<size_t>(i)];
                    sum += g * g;
                }
                CHECK(std::abs(norm.partials[at] - sum) <= 1e-6 * sum);
                exact += sum;
            }
        }
        exact = static_cast<double>(scale) * std::sqrt(exact);
        CHECK(std::abs(norm.state.norm - exact) <= 1e-6 * exact);
        CHECK(norm.state.multiplier == scale);
        CHECK(norm.state.stop == 0);

        const float half = norm.state.norm / 2;
        CHECK(std::abs(norm_of(parameters, scale, half).state.multiplier - scale / 2) <=
              1e-6f * scale);
        CHECK(norm_of(parameters, scale, 4 * half).state.multiplier == scale);
    }
}

TEST_CASE("the norm of zero gradients is zero and nothing is clipped") {
    Parameters parameters;
    parameters.new_gradients(0);
    const StepState state = norm_of(parameters, 0.5f, 1.0f).state;
    CHECK(state.norm == 0);
    CHECK(state.multiplier == 0.5f);
    CHECK(state.stop == 0);
}

TEST_CASE(
    "a norm that is not finite stops the optimizer for good and names the first bad segment") {
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
        Norm norm = norm_of(parameters, 1, 1);
        CAPTURE(bad, first);
        CHECK(norm.state.stop == 1);
        CHECK(norm.state.bad_segment == static_cast<int32_t>(first));

        // A later, sound norm changes neither.
        std::fill(norm.partials.begin(), norm.partials.end(), 1.0);
        TestStream stream;
        finish_norm(stream, &norm.state, norm.partials.data(), norm.counts, 1, 1);
        CHECK(norm.state.stop == 1);
        CHECK(norm.state.bad_segment == static_cast<int32_t>(first));

        const std::string before = parameters.bytes();
        adamw(stream, parameters.segments(),
              {.learning_rate = 1,
               .beta1 = 0.9f,
               .beta2 = 0.99f,
               .epsilon = 1e-8f,
               .weight_decay = 1,
               .step = 1,
               .state = &norm.state});
        CHECK((parameters.bytes() == before));
    }
}

TEST_CASE(
    "adamw follows the float64 recurrence over several steps, decays only where asked, and rounds "
    "to bf16") {
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
            const Norm norm = norm_of(parameters, 0.25f, 0.5f);
            args.state = &norm.state;
            TestStream stream;
            adamw(stream, parameters.segments(), args);

            const double lr = args.learning_rate, beta1 = args.beta1, beta2 = args.beta2,
                         t = static_cast<double>(args.step);
            for (auto& one : parameters.all) {
                for (size_t i = 0; i < static_cast<size_t>(one->n); ++i) {
                    const double g = norm.state.multiplier * one->gradient[i];
                    double &m = one->exact_m[i], &v = one->exact_v[i],
                           &theta = one->exact_master[i];
                    m = beta1 * m + (1 - beta1) * g;
                    v = beta2 * v + (1 - beta2) * g * g;
                    const double m_hat = m / (1 - std::pow(beta1, t)),
                                 v_hat = v / (1 - std::pow(beta2, t));
                    const double decay = one->decay ? static_cast<double>(args.weight_decay) : 0.0;
                    theta -= lr * (m_hat / (std::sqrt(v_hat) + static_cast<double>(args.epsilon)) +
                                   decay * theta);
                }
            }
        }
        for (auto& one : parameters.all) {
            double worst_master = 0, worst_m = 0, worst_v = 0, largest_m = 0, largest_v = 0;
            bool rounded = true;
            for (size_t i = 0; i < static_cast<size_t>(one->n); ++i) {
                // Each step rounds θ once and changes it by at most a few learning rates, known to a few fp32 roundings.
                const double allowed =
                    steps * (0x1p-24 * std::abs(one->exact_master[i]) + 0x1p-19 * 0.01);
                worst_master = std::max(worst_master,
                                        std::abs(one->master[i] - one->exact_master[i]) / allowed);
                worst_m = std::max(worst_m, std::abs(one->m[i] - one->exact_m[i]));
                worst_v = std::max(worst_v, std::abs(one->v[i] - one->exact_v[i]));
                largest_m = std::max(largest_m, std::abs(one->exact_m[i]));
                largest_v = std::max(largest_v, one->exact_v[i]);
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

TEST_CASE("norms and adamw give the same bits whatever the number of threads") {
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
        std::vector<double> partials(64);
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
        StepState state;
        TestStream stream;
        norm_partials(stream, norm_segments);
        finish_norm(stream, &state, partials.data(), counts, 1, 1);
        adamw(stream, segments,
              {.learning_rate = 0.1f,
               .beta1 = 0.9f,
               .beta2 = 0.95f,
               .epsilon = 1e-8f,
               .weight_decay = 0.1f,
               .step = 3,
               .state = &state});
        std::string bytes(reinterpret_cast<const char*>(&state), sizeof state);
        bytes.append(reinterpret_cast<const char*>(partials.data()),
                     partials.size() * sizeof(double));
        for (auto& one : buffers) bytes += one->bytes();
        return bytes;
    });
}

}  // namespace train_gpt
