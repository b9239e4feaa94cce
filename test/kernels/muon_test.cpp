#include "kernels/muon/muon.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

/// Parts of matrices, their state in float64 beside it, and gradients in fp32 or as integers on
/// grids.
struct Segments {
    struct One {
        int64_t n = random_int(0, 3) == 0 ? random_int(1, 40) : random_int(1, 9000);
        bool decay = random_int(0, 1) == 1, has_weights = random_int(0, 1) == 1,
             exact = random_int(0, 1) == 1;
        float scale = static_cast<float>(random_int(1, 100)) / 16;
        Buffer weights{DType::bf16, {n}};
        Buffer master{DType::fp32, {n}, random_normal(static_cast<size_t>(n))};
        Buffer momentum;
        Buffer gradient{DType::fp32, {n}, random_normal(static_cast<size_t>(n))};
        SharedArray<int32_t> sums{static_cast<size_t>(n)};
        SharedArray<int32_t> exponents{static_cast<size_t>((n + norm_block - 1) / norm_block)};
        Buffer values;
        std::vector<double> gradients, direction;  // what the passes should see

        One(DType dtype, DType momentum_dtype)
            : momentum(momentum_dtype, {n}, random_normal(static_cast<size_t>(n))),
              values(dtype, {n}) {
            for (int64_t i = 0; i < n; ++i) {
                const auto k = static_cast<size_t>(i);
                int32_t& exponent = exponents.data()[i / norm_block];
                if (i % norm_block == 0) exponent = static_cast<int32_t>(random_int(-24, -12));
                sums.data()[i] = static_cast<int32_t>(random_int(-(1 << 20), 1 << 20));
                gradients.push_back(exact ? std::ldexp(sums.data()[i], exponent) : gradient[k]);
            }
        }
    };
    DType momentum_dtype = random_int(0, 1) ? DType::bf16 : DType::fp32;
    std::vector<std::unique_ptr<One>> all;

    explicit Segments(DType dtype) {
        for (int64_t i = random_int(1, 6); i > 0; --i)
            all.push_back(std::make_unique<One>(dtype, momentum_dtype));
    }
    std::vector<MuonSegment> list() const {
        std::vector<MuonSegment> segments;
        for (const auto& one : all) {
            segments.push_back({.weights = one->has_weights ? one->weights.as<bf16>() : nullptr,
                                .master = one->master.as<float>(),
                                .momentum = one->momentum.tensor().data,
                                .gradient = one->gradient.as<float>(),
                                .values = one->values.tensor().data,
                                .n = one->n,
                                .scale = one->scale,
                                .decay = one->decay});
            if (!one->exact) continue;
            segments.back().gradient = nullptr;
            segments.back().sums = one->sums.data();
            segments.back().exponents = one->exponents.data();
        }
        return segments;
    }
};

double error_of(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 0x1p-24; }

}  // namespace

TEST_CASE("Muon's momentum and update are as the contract says", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        const DType dtype = repeat % 2 == 0 ? DType::bf16 : DType::fp32;
        const Segments segments(dtype);
        const SharedArray<StepState> state(1);
        *state.data() = {.multiplier = 0.375f};
        const bool nesterov = random_int(0, 1) == 1, cautious = random_int(0, 1) == 1;
        const MuonStep step{.learning_rate = 0.01f,
                            .momentum = 0.95f,
                            .weight_decay = 0.1f,
                            .nesterov = nesterov,
                            .dtype = dtype,
                            .cautious_decay = cautious,
                            .state = state.data(),
                            .momentum_dtype = segments.momentum_dtype};
        CAPTURE(name_of(dtype), name_of(segments.momentum_dtype), nesterov, cautious);
        std::vector<std::vector<double>> momentum, master;
        for (const auto& one : segments.all) {
            momentum.push_back(one->momentum.values());
            master.push_back(one->master.values());
        }
        TestStream stream;
        const std::vector<MuonSegment> list = segments.list();
        muon_momentum(stream, list, step);
        const double mu = step.momentum, rate = step.learning_rate, roundings = 4 * 0x1p-24;
        double worst = 0;
        const auto expect = [&](double ours, double right, double size, double error) {
            const double ratio = std::abs(ours - right) / (error * size + 1e-30);
            if (!(ratio <= 1))
                UNSCOPED_INFO(ours << " in place of " << right << " of size " << size);
            worst = std::isfinite(ratio) ? std::max(worst, ratio) : 1e9;
        };
        for (size_t s = 0; s < segments.all.size(); ++s) {
            const Segments::One& one = *segments.all[s];
            for (size_t i = 0; i < momentum[s].size(); ++i) {
                const double g = 0.375 * one.gradients[i], m = mu * momentum[s][i] + g,
                             size = std::abs(g) + std::abs(mu * momentum[s][i]);
                expect(one.momentum[i], m, size,
                       roundings + (segments.momentum_dtype == DType::bf16 ? 0x1p-8 : 0));
                expect(one.values[i], nesterov ? g + mu * m : m, 2 * size,
                       roundings + error_of(dtype));
            }
        }
        CHECK(worst <= 1);

        // The direction is what the iteration left.
        worst = 0;
        for (const auto& one : segments.all) {
            const std::vector<float> values = random_normal(static_cast<size_t>(one->n));
            for (size_t i = 0; i < values.size(); ++i) one->values.set(i, values[i]);
            one->direction = one->values.values();
        }
        muon_update(stream, list, step);
        for (size_t s = 0; s < segments.all.size(); ++s) {
            const Segments::One& one = *segments.all[s];
            for (size_t i = 0; i < master[s].size(); ++i) {
                const double theta = master[s][i];
                const bool decays = one.decay && !(cautious && theta * one.direction[i] < 0);
                const double decay = decays ? double{step.weight_decay} : 0.0,
                             change = double{one.scale} * one.direction[i] + decay * theta;
                expect(one.master[i], theta - rate * change,
                       std::abs(theta) + rate * (std::abs(double{one.scale} * one.direction[i]) +
                                                 decay * std::abs(theta)),
                       roundings);
                if (one.has_weights &&
                    one.weights[i] != to_float(bf16(static_cast<float>(one.master[i]))))
                    worst = 1e9;
            }
        }
        CHECK(worst <= 1);
    }
}

TEST_CASE("after a stop, an overflow or a skipped step Muon changes nothing", "[cuda]") {
    ON_EACH_DEVICE();
    for (const int which : {0, 1, 2}) {
        const Segments segments(DType::bf16);
        const SharedArray<StepState> state(1);
        *state.data() = {.multiplier = 1};
        (which == 0   ? state.data()->stop
         : which == 1 ? state.data()->overflow
                      : state.data()->skip) = 1;
        const MuonStep step{.learning_rate = 1,
                            .momentum = 0.9f,
                            .state = state.data(),
                            .momentum_dtype = segments.momentum_dtype};
        const auto bytes = [&] {
            std::string all;
            for (const auto& one : segments.all)
                all += one->momentum.bytes() + one->master.bytes() + one->weights.bytes();
            return all;
        };
        const std::string before = bytes();
        TestStream stream;
        muon_momentum(stream, segments.list(), step);
        for (const auto& one : segments.all)
            CHECK(std::ranges::count(one->values.values(), 0.0) == one->n);
        muon_update(stream, segments.list(), step);
        CHECK(bytes() == before);
    }
}

}  // namespace train_gpt
