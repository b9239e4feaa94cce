#include "kernels/rope_table.h"

#include <cassert>
#include <cmath>
#include <numbers>

namespace train_gpt {

std::vector<double> rope_frequencies(const RopeFrequencies& of) {
    assert(of.D % 2 == 0);
    std::vector<double> frequencies(static_cast<size_t>(of.D / 2));
    for (size_t i = 0; i < frequencies.size(); ++i) {
        const double f = std::pow(of.theta, -2.0 * static_cast<double>(i) / of.D);
        // How often the original context holds the wavelength.
        const double waves = static_cast<double>(of.original_context) * f / (2 * std::numbers::pi);
        const double low = of.low_frequency_factor, high = of.high_frequency_factor;
        switch (of.scaling) {
            case RopeScaling::none:
                frequencies[i] = f;
                break;
            case RopeScaling::linear:
                frequencies[i] = f / of.factor;
                break;
            case RopeScaling::llama3: {
                const double s = waves > high  ? 1.0
                                 : waves < low ? 0.0
                                               : (waves - low) / (high - low);
                frequencies[i] = (1 - s) * f / of.factor + s * f;
                break;
            }
        }
    }
    return frequencies;
}

std::vector<float> rope_table(const RopeFrequencies& of, int64_t n_ctx) {
    const std::vector<double> frequencies = rope_frequencies(of);
    const size_t half = frequencies.size();
    std::vector<float> table(static_cast<size_t>(n_ctx) * 2 * half);
#pragma omp parallel for schedule(static)
    for (int64_t position = 0; position < n_ctx; ++position) {
        float* row = table.data() + static_cast<size_t>(position) * 2 * half;
        for (size_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(position) * frequencies[i];
            row[i] = static_cast<float>(std::cos(angle));
            row[half + i] = static_cast<float>(std::sin(angle));
        }
    }
    return table;
}

}  // namespace train_gpt
