#include "device/cuda_queue.h"
#include "kernels/fp8_tile.cuh"
#include "kernels/gelu.h"
#include "kernels/gelu_math.cuh"

namespace train_gpt::cuda {

namespace {

// Each thread issues four 16-byte loads before the first use, so 64 bytes per thread are in flight.
constexpr int threads = 256, packs_per_thread = 4;

/// out[i] = gelu(x[i]) for i < n; out may be x. The first `packs` packs are moved by 16-byte
/// accesses, which need aligned tensors; the elements after them are moved one by one.
template <class T>
__global__ void __launch_bounds__(threads)
    gelu_elements(T* out, const T* x, int64_t packs, int64_t n) {
    const int64_t first = int64_t{blockIdx.x} * (threads * packs_per_thread) + threadIdx.x;
    Pack<T> values[packs_per_thread];
#pragma unroll
    for (int k = 0; k < packs_per_thread; ++k) {
        const int64_t at = first + k * threads;
        if (at < packs) values[k] = Pack<T>::load(x + at * Pack<T>::size);
    }
#pragma unroll
    for (int k = 0; k < packs_per_thread; ++k) {
        const int64_t at = first + k * threads;
        if (at >= packs) continue;
        float numbers[Pack<T>::size];
        unpack(numbers, values[k]);
#pragma unroll
        for (float& number : numbers) number = gelu<T>(number);
        pack<T>(numbers).store(out + at * Pack<T>::size);
    }
    const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x;
    for (int64_t i = packs * Pack<T>::size + thread; i < n; i += int64_t{gridDim.x} * threads)
        out[i] = from_float<T>(gelu<T>(to_float(x[i])));
}

/// gelu(x), as it would be stored.
template <class T>
struct Results {
    const T* x;
    int64_t cols;

    template <int width>
    __device__ __forceinline__ void load(float (&values)[width], int64_t row, int64_t col) const {
        unpack(values, Vector<T, width>::load(x + row * cols + col));
#pragma unroll
        for (float& value : values) value = gelu<T>(value);
        unpack(values, vector_of<T>(values));
    }
};

}  // namespace

void gelu_forward(Stream& stream, Tensor out, Tensor x) {
    assert(out.dtype == x.dtype && out.numel() == x.numel());
    with_element_type(x.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t n = x.numel();
        const auto addresses =
            reinterpret_cast<uintptr_t>(out.data) | reinterpret_cast<uintptr_t>(x.data);
        const int64_t packs = addresses % sizeof(Pack<T>) == 0 ? n / Pack<T>::size : 0;
        const int64_t blocks = ceil_div<int64_t>(n, threads * packs_per_thread * Pack<T>::size);
        gelu_elements<<<static_cast<unsigned>(blocks), threads, 0, stream_of(stream)>>>(
            static_cast<T*>(out.data), static_cast<const T*>(x.data), packs, n);
        CUDA_CHECK_LAUNCH();
    });
}

void gelu_forward_rounded(Stream& stream, const Fp8Output& out, Tensor x) {
    with_element_type(x.dtype, [&](auto type) {
        using T = decltype(type);
        const bool aligned = is_aligned(x.data) && is_aligned(out.codes.data);
        with_width<T>(x.cols(), aligned, [&](auto width) {
            launch_round_tile<E4M3, width>(stream, round_tile_of(out, x.rows(), x.cols()),
                                           Results<T>{static_cast<const T*>(x.data), x.cols()});
        });
    });
}

}  // namespace train_gpt::cuda
