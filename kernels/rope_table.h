// The frequencies and angles of rotary position embedding (rope.h).
#pragma once
#include <cstdint>
#include <vector>

namespace train_gpt {

/// How frequencies are changed for longer contexts than a model was first trained with.
enum class RopeScaling : uint8_t { none, linear, llama3 };

/// Frequency i of a head of D elements is f = θ^(−2i/D), 0 <= i < D/2, with
///   linear: f / factor
///   llama3: with the wavelength λ = 2π/f and n = original_context,
///           f                            where λ < n / high_frequency_factor
///           f / factor                   where λ > n / low_frequency_factor
///           (1 − s)·f / factor + s·f     in between; s = (n/λ − low) / (high − low)
/// Hugging Face's config.json has the same names, in short.
struct RopeFrequencies {
    int D = 0;
    double theta = 10000;
    RopeScaling scaling = RopeScaling::none;
    double factor = 1;
    double low_frequency_factor = 1, high_frequency_factor = 4;  // llama3, as original_context
    int64_t original_context = 8192;

    bool operator==(const RopeFrequencies&) const = default;
};
std::vector<double> rope_frequencies(const RopeFrequencies& of);

/// [n_ctx, 2, D/2]: for each position p the cosines, then the sines of p times the frequencies;
/// computed in double.
std::vector<float> rope_table(const RopeFrequencies& of, int64_t n_ctx);

}  // namespace train_gpt
