// The soft-cap of a logit and its derivative (softcap_math.h), in device code.
#pragma once
#include "kernels/exp_math.cuh"

namespace train_gpt::cuda {

/// T: the type in which a result will be stored (exp_math.cuh). −∞, which stands for no logit,
/// stays −∞. For bf16 the absolute error is below cap · 10⁻⁶.
template <class T>
struct SoftCap {
    float cap, inverse;

    __host__ explicit SoftCap(float cap_) : cap(cap_), inverse(1 / cap_) {}
    __device__ __forceinline__ float operator()(float z) const {
        return z == -__builtin_huge_valf() ? z : cap * tanh_for<T>(z * inverse);
    }
    /// The derivative, from the capped logit; 0 at −∞.
    __device__ __forceinline__ float slope(float capped) const {
        const float t = capped * inverse;
        return t < -1.0f ? 0.0f : 1.0f - t * t;
    }
};

struct NoCap {
    __device__ __forceinline__ float operator()(float z) const { return z; }
    __device__ __forceinline__ float slope(float) const { return 1.0f; }
};

/// Calls f(SoftCap<T>), or f(NoCap) if cap is 0.
template <class T, class F>
decltype(auto) with_cap(float cap, F&& f) {
    return cap == 0 ? f(NoCap{}) : f(SoftCap<T>(cap));
}

}  // namespace train_gpt::cuda
