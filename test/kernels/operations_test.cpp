// What every operation of test/compare/operations.h must fulfil, with random operands of random
// shapes on each device: its formula, and for a backward pass that it computes a gradient.
#include <algorithm>
#include <cmath>
#include <string>

#include "test/catch.h"
#include "test/compare/measure.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt::compare {

namespace {

Shape random_shape(const Operation& operation) {
    Shape shape;
    for (const Letter& letter : operation.letters) {
        const bool is_flat = letter.small > 100'000;  // elements, not the extent of a matrix
        const bool is_few = std::string("BHGQk").find(letter.name) != std::string::npos;
        // A bound is about many elements: a single sum whose terms cancel may be less exact.
        shape[letter.name] = random_int(is_few ? 1 : 8, is_flat ? 10'000 : is_few ? 4 : 40);
    }
    return shape;
}

Operands random_operands(const Operation& operation, DType dtype) {
    Operands operands(random_shape(operation), dtype,
                      static_cast<uint64_t>(random_int(0, int64_t{1} << 40)));
    operation.declare(operands);
    return operands;
}

std::string text_of(const Operation& operation, const Operands& operands) {
    std::string text = operation.name + " in " + name_of(operands.dtype());
    for (const Letter& letter : operation.letters)
        text += std::string(" ") + letter.name + "=" + std::to_string(operands[letter.name]);
    return text;
}

Values added(Values values, double factor, const Values& to_add) {
    for (size_t i = 0; i < values.size(); ++i) values[i] += factor * to_add[i];
    return values;
}

double norm(const Values& values) { return std::sqrt(dot(values, values)); }

/// The gradient's share in a random direction must be the loss's slope in that direction. An error
/// of the gradient within the operation's bound changes the share by at most its length times the
/// direction's.
void check_derivative(const Derivative& derivative, const Operands& operands,
                      const Values& gradient, double bound) {
    const Values point = derivative.point(operands);
    REQUIRE(point.size() == gradient.size());
    const std::vector<float> normal = random_normal(point.size(), 1.0f);
    const Values direction(normal.begin(), normal.end());
    constexpr double h = 1e-4;  // the central difference errs by about h² and 1e-16 / h
    const double slope = (derivative.loss(operands, added(point, h, direction)) -
                          derivative.loss(operands, added(point, -h, direction))) /
                         (2 * h);
    const double length = norm(gradient) * norm(direction);
    CAPTURE(derivative.gradient, slope, length, bound);
    CHECK(std::abs(dot(gradient, direction) - slope) <= (bound + 1e-6) * length);
}

}  // namespace

TEST_CASE("every operation computes its formula as exactly as its dtype allows", "[cuda]") {
    ON_EACH_DEVICE();
    for (const Operation& operation : operations()) {
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            if (operation.fp32_only && dtype != DType::fp32) continue;
            for (int round = 0; round < (device_is_simulated() ? 1 : 4); ++round) {
                const Operands operands = random_operands(operation, dtype);
                const Results exact = operation.reference(operands);
                for (const Implementation& by :
                     operation.implementations(operands, test_device())) {
                    INFO(text_of(operation, operands) << ", " << by.name);
                    const Results ours =
                        Workplace(operation, operands, test_device(), by).results();
                    for (const Judgement& j : judge(operands, ours, "float64", exact, 1)) {
                        CAPTURE(j.result, j.difference.relative, j.bound);
                        CHECK(j.holds());
                    }
                }
            }
        }
    }
}

TEST_CASE("every backward pass computes the gradient of its forward pass", "[cuda]") {
    ON_EACH_DEVICE();
    int derivatives = 0;
    for (const Operation& operation : operations()) {
        if (operation.derivatives.empty()) continue;
        for (int round = 0; round < (device_is_simulated() ? 1 : 4); ++round) {
            const Operands operands = random_operands(operation, DType::fp32);
            INFO(text_of(operation, operands));
            const Implementation by = operation.implementations(operands, test_device()).front();
            const Results results = Workplace(operation, operands, test_device(), by).results();
            for (const Derivative& derivative : operation.derivatives) {
                const auto operand = std::ranges::find_if(operands.all(), [&](const Operand& o) {
                    return o.name == derivative.gradient;
                });
                check_derivative(derivative, operands, results.at(derivative.gradient),
                                 operand->accuracy.bound(DType::fp32));
                ++derivatives;
            }
        }
    }
    CHECK(derivatives >= 12);
}

}  // namespace train_gpt::compare
