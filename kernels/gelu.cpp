#include "kernels/gelu.h"

#include "device/profile.h"
#include "kernels/gelu_math.h"
#include "kernels/lanes.h"

namespace train_gpt {

void gelu_forward(Stream& stream, Tensor out, Tensor x) {
    const Profiled profiled(stream, {"gelu_forward", 2.0 * static_cast<double>(x.bytes()), 0});
    TRAIN_GPT_ON_CUDA(stream.device, gelu_forward(stream, out, x));
    assert(out.dtype == x.dtype && out.numel() == x.numel());
    with_float_type(x.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t count = x.numel();
        const T* in = x.as<T>();
        T* result = out.as<T>();
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < count; ++i) store(result[i], gelu(to_float(in[i])));
    });
}

}  // namespace train_gpt
