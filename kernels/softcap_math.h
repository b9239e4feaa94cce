// The soft-cap of a logit z, c·tanh(z / c), which keeps it between −c and c (Bello et al. 2016,
// arXiv 1611.09940; Gemma 2, arXiv 2408.00118), and its derivative, for one number;
// softcap_math.cuh has the device versions.
#pragma once
#include <limits>

#include "kernels/exp_math.h"

namespace train_gpt {

/// −∞, which stands for no logit, stays −∞.
struct SoftCap {
    float cap, inverse;

    explicit SoftCap(float cap_) : cap(cap_), inverse(1 / cap_) {}
    float operator()(float z) const {
        const float capped = cap * fast_tanh(z * inverse);
        return z == -std::numeric_limits<float>::infinity() ? z : capped;
    }
    /// The derivative, from the capped logit; 0 at −∞.
    float slope(float capped) const {
        const float t = capped * inverse;
        return t < -1 ? 0 : 1 - t * t;
    }
};

struct NoCap {
    float operator()(float z) const { return z; }
    float slope(float) const { return 1; }
};

/// Calls f(SoftCap), or f(NoCap) if cap is 0.
template <class F>
void with_cap(float cap, F&& f) {
    if (cap == 0)
        f(NoCap{});
    else
        f(SoftCap(cap));
}

}  // namespace train_gpt
