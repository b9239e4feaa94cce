#include "kernels/rope_table.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numbers>

namespace train_gpt {

namespace {

/// The share of frequency i that yarn divides by the factor.
class YarnRamp {
  public:
    explicit YarnRamp(const RopeFrequencies& of) {
        low_ = index(of, of.yarn.beta_fast), high_ = index(of, of.yarn.beta_slow);
        if (of.yarn.truncate) low_ = std::floor(low_), high_ = std::ceil(high_);
        low_ = std::max(low_, 0.0), high_ = std::min(high_, of.D - 1.0);
        if (low_ == high_) high_ += 0.001;
    }
    double operator()(double i) const { return std::clamp((i - low_) / (high_ - low_), 0.0, 1.0); }

  private:
    /// Of the frequency that turns so many times in the original context.
    static double index(const RopeFrequencies& of, double turns) {
        const double context = static_cast<double>(of.original_context);
        return of.D * std::log(context / (2 * std::numbers::pi * turns)) / (2 * std::log(of.theta));
    }

    double low_, high_;
};

}  // namespace

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
            case RopeScaling::yarn: {
                const double s = YarnRamp(of)(static_cast<double>(i));
                frequencies[i] = s * f / of.factor + (1 - s) * f;
                break;
            }
        }
    }
    return frequencies;
}

double rope_attention_factor(const RopeFrequencies& of) {
    if (of.scaling != RopeScaling::yarn) return 1;
    const Yarn& yarn = of.yarn;
    if (yarn.attention_factor != 0) return yarn.attention_factor;
    const auto of_scale = [&](double mscale) {
        return of.factor <= 1 ? 1.0 : 0.1 * mscale * std::log(of.factor) + 1;
    };
    if (yarn.mscale != 0 && yarn.mscale_all_dim != 0)
        return of_scale(yarn.mscale) / of_scale(yarn.mscale_all_dim);
    return of_scale(1);
}

std::vector<float> rope_table(const RopeFrequencies& of, int64_t n_ctx) {
    const std::vector<double> frequencies = rope_frequencies(of);
    const double attention_factor = rope_attention_factor(of);
    const size_t half = frequencies.size();
    std::vector<float> table(static_cast<size_t>(n_ctx) * 2 * half);
#pragma omp parallel for schedule(static)
    for (int64_t position = 0; position < n_ctx; ++position) {
        float* row = table.data() + static_cast<size_t>(position) * 2 * half;
        for (size_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(position) * frequencies[i];
            row[i] = static_cast<float>(attention_factor * std::cos(angle));
            row[half + i] = static_cast<float>(attention_factor * std::sin(angle));
        }
    }
    return table;
}

}  // namespace train_gpt
