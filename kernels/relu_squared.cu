#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/fp8_tile.cuh"
#include "kernels/relu_squared.h"

namespace train_gpt::cuda {

namespace {

// Each thread issues its 16-byte loads before the first use, 64 bytes or more per thread.
constexpr int threads = 256, packs_per_thread = 4;

/// max(x, 0); a NaN stays a NaN.
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

/// out = relu2(x), and with a gradient dx = dout ⊙ 2·max(x, 0); out may be null then. dx may be
/// dout, and out may be x. The first `packs` packs are moved by 16-byte accesses, which need
/// aligned tensors; the elements after them are moved one by one.
template <class T, bool gradient>
__global__ void __launch_bounds__(threads)
    relu_squared_elements(T* out, T* dx, const T* dout, const T* x, int64_t packs, int64_t n) {
    constexpr int size = Pack<T>::size;
    const int64_t first = int64_t{blockIdx.x} * (threads * packs_per_thread) + threadIdx.x;
    Pack<T> inputs[packs_per_thread], gradients[packs_per_thread];
#pragma unroll
    for (int k = 0; k < packs_per_thread; ++k) {
        const int64_t at = first + k * threads;
        if (at >= packs) continue;
        inputs[k] = Pack<T>::load(x + at * size);
        if constexpr (gradient) gradients[k] = Pack<T>::load(dout + at * size);
    }
#pragma unroll
    for (int k = 0; k < packs_per_thread; ++k) {
        const int64_t at = first + k * threads;
        if (at >= packs) continue;
        float value[size], derivative[size];
        unpack(value, inputs[k]);
        if constexpr (gradient) unpack(derivative, gradients[k]);
#pragma unroll
        for (int i = 0; i < size; ++i) {
            const float positive = relu(value[i]);
            value[i] = positive * positive;
            if constexpr (gradient) derivative[i] *= positive + positive;
        }
        if constexpr (gradient) pack<T>(derivative).store(dx + at * size);
        if (!gradient || out) pack<T>(value).store(out + at * size);
    }
    const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x;
    for (int64_t i = packs * size + thread; i < n; i += int64_t{gridDim.x} * threads) {
        const float positive = relu(to_float(x[i]));
        if constexpr (gradient) dx[i] = from_float<T>(to_float(dout[i]) * (positive + positive));
        if (!gradient || out) out[i] = from_float<T>(positive * positive);
    }
}

template <bool gradient>
void launch(Stream& stream, const ReluSquaredBackward& args) {
    with_element_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t n = args.x.numel();
        const auto address = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
        const uintptr_t addresses =
            address(args.out) | address(args.dx) | address(args.dout) | address(args.x);
        const int64_t packs = addresses % sizeof(Pack<T>) == 0 ? n / Pack<T>::size : 0;
        const int64_t blocks = ceil_div<int64_t>(n, threads * packs_per_thread * Pack<T>::size);
        relu_squared_elements<T, gradient>
            <<<static_cast<unsigned>(blocks), threads, 0, stream_of(stream)>>>(
                static_cast<T*>(args.out.data), static_cast<T*>(args.dx.data),
                static_cast<const T*>(args.dout.data), static_cast<const T*>(args.x.data), packs,
                n);
        CUDA_CHECK_LAUNCH();
    });
}

/// relu2(x), as it would be stored.
template <class T>
struct Results {
    const T* x;
    int64_t cols;

    template <int width>
    __device__ __forceinline__ void load(float (&values)[width], int64_t row, int64_t col) const {
        unpack(values, Vector<T, width>::load(x + row * cols + col));
#pragma unroll
        for (float& value : values) {
            const float positive = relu(value);
            value = positive * positive;
        }
        unpack(values, vector_of<T>(values));
    }
};

void launch_rounded(Stream& stream, const Fp8Output& out, const Tensor& x) {
    with_element_type(x.dtype, [&](auto type) {
        using T = decltype(type);
        const bool aligned = is_aligned(x.data) && is_aligned(out.codes.data);
        with_width<T>(x.cols(), aligned, [&](auto width) {
            launch_round_tile<E4M3, width>(stream, round_tile_of(out, x.rows(), x.cols()),
                                           Results<T>{static_cast<const T*>(x.data), x.cols()});
        });
    });
}

}  // namespace

void relu_squared_forward(Stream& stream, const ReluSquaredForward& args) {
    if (args.rounded) return launch_rounded(stream, args.rounded, args.x);
    launch<false>(stream, {.dx = {}, .dout = {}, .x = args.x, .out = args.out});
}

void relu_squared_backward(Stream& stream, const ReluSquaredBackward& args) {
    launch<true>(stream, args);
}

}  // namespace train_gpt::cuda
