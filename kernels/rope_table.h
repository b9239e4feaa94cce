// The frequencies and angles of rotary position embedding (rope.h).
#pragma once
#include <cstdint>
#include <vector>

namespace train_gpt {

/// How frequencies are changed for longer contexts than a model was first trained with.
enum class RopeScaling : uint8_t { none, linear, llama3, yarn };

/// What YaRN has beside a factor and an original context. Peng et al., arXiv 2309.00071.
struct Yarn {
    /// Frequencies that turn at least beta_fast times in the original context are kept. Those that
    /// turn at most beta_slow times are divided by the factor.
    double beta_fast = 32, beta_slow = 1;
    bool truncate = true;         // the two bounds are rounded to whole frequencies, outwards
    double attention_factor = 0;  // 0: it follows from the factor (rope_attention_factor)
    double mscale = 0, mscale_all_dim = 0;  // 0: absent

    bool operator==(const Yarn&) const = default;
};

/// Frequency i of a head of D elements is f = θ^(−2i/D), 0 <= i < D/2, with
///   linear: f / factor
///   llama3: with the wavelength λ = 2π/f and n = original_context,
///           f                            where λ < n / high_frequency_factor
///           f / factor                   where λ > n / low_frequency_factor
///           (1 − s)·f / factor + s·f     in between; s = (n/λ − low) / (high − low)
///   yarn:   s·f / factor + (1 − s)·f with s = (i − low) / (high − low), at least 0 and at most 1;
///           i(β) = D·ln(n / 2πβ) / (2·ln θ), low = max(i(beta_fast), 0),
///           high = min(i(beta_slow), D − 1); high is 0.001 more where both are equal. truncate:
///           i(beta_fast) is rounded down and i(beta_slow) up.
/// Hugging Face's config.json has the same names, in short.
struct RopeFrequencies {
    int D = 0;
    double theta = 10000;
    RopeScaling scaling = RopeScaling::none;
    double factor = 1;
    double low_frequency_factor = 1, high_frequency_factor = 4;  // llama3
    int64_t original_context = 8192;                             // llama3 and yarn
    Yarn yarn = {};

    bool operator==(const RopeFrequencies&) const = default;
};
std::vector<double> rope_frequencies(const RopeFrequencies& of);

/// By which cosines and sines are multiplied: queries and keys are then longer, so that softmax is
/// sharper in the longer context. 1, but with yarn
///   attention_factor, if given
///   m(mscale) / m(mscale_all_dim), if both are given
///   m(1) otherwise
/// where m(x) = 0.1·x·ln(factor) + 1, or 1 for a factor of at most 1.
double rope_attention_factor(const RopeFrequencies& of);

/// [n_ctx, 2, D/2]: for each position p the cosines, then the sines of p times the frequencies,
/// times the attention factor; computed in double.
std::vector<float> rope_table(const RopeFrequencies& of, int64_t n_ctx);

}  // namespace train_gpt
