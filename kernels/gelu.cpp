#include "kernels/gelu.h"

#include <algorithm>

#include "base/error.h"
#include "device/profile.h"
#include "kernels/gelu_math.h"
#include "kernels/neighbours.h"

namespace train_gpt {

void gelu_forward(Stream& stream, Tensor out, Tensor x) {
    const Profiled profiled(stream, {"gelu_forward", 2.0 * static_cast<double>(x.bytes()), 0});
    TRAIN_GPT_ON_CUDA(stream.device, gelu_forward(stream, out, x));
    assert(out.dtype == x.dtype && out.numel() == x.numel());
    with_float_type(x.dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int64_t piece = 4096;
        const int64_t count = x.numel();
#pragma omp parallel for schedule(static)
        for (int64_t first = 0; first < count; first += piece) {
            const T* in = x.as<T>() + first;
            T* result = out.as<T>() + first;
            for_positions<T>(std::min(piece, count - first),
                             [=](auto at) { at.store(result, each(gelu, at(in))); });
        }
    });
}

void gelu_forward_rounded(Stream& stream, const Fp8Output& out, Tensor x) {
    const Profiled profiled(
        stream, {"gelu_forward", bytes_of(x) + bytes_of(out.codes) + bytes_of(out.transposed), 0});
    TRAIN_GPT_ON_CUDA(stream.device, gelu_forward_rounded(stream, out, x));
    throw Error("gelu_forward_rounded() is for GPUs");
}

}  // namespace train_gpt
