#include <algorithm>
#include <cstdint>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/experts/combine.h"

namespace train_gpt::cuda {

namespace {

constexpr int most_threads = 256;

template <class T>
struct Forward {
    T* out;
    const T *y, *residual;  // residual may be null, or out
    const int32_t* row_of;  // may be null
    const float* weights;   // may be null
    int64_t C;
    int k;
};

/// A block takes a token and up to 256 vectors of its row. The loads of several slots are in flight
/// at a time.
template <class T, int width>
__global__ void __launch_bounds__(most_threads, 4) forward_kernel(Forward<T> a) {
    const int64_t t = blockIdx.x, c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * width;
    if (c >= a.C) return;
    float sum[width] = {};
    if (a.residual) unpack(sum, Vector<T, width>::load(a.residual + t * a.C + c));
#pragma unroll 4
    for (int j = 0; j < a.k; ++j) {
        const int64_t slot = t * a.k + j, row = row_of_slot(a.row_of, slot);
        const float weight = a.weights ? a.weights[slot] : 1.0f;
        float value[width];
        // A slot without a row reads row 0, so that no load waits for a branch.
        unpack(value, Vector<T, width>::load(a.y + max(row, int64_t{0}) * a.C + c));
#pragma unroll
        for (int i = 0; i < width; ++i) sum[i] = row < 0 ? sum[i] : sum[i] + weight * value[i];
    }
    vector_of<T>(sum).store(a.out + t * a.C + c);
}

template <class T>
struct Backward {
    T* dy;
    float* dweights;
    const T *dout, *y;      // y may be dy
    const int32_t* row_of;  // may be null
    const float* weights;
    int64_t slots, C;
    int k;
};

constexpr int warps = 8;

/// A warp takes a slot. The slots of a token follow each other, so that dout comes from memory
/// once.
template <class T, int width>
__global__ void __launch_bounds__(warps* warp_size) backward_kernel(Backward<T> a) {
    const int64_t slot = int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    if (slot >= a.slots) return;
    const int64_t row = row_of_slot(a.row_of, slot);
    if (row < 0) {
        if (threadIdx.x % warp_size == 0) a.dweights[slot] = 0;
        return;
    }
    const float weight = a.weights[slot];
    const T *const dout = a.dout + slot / a.k * a.C, *const y = a.y + row * a.C;
    T* const dy = a.dy + row * a.C;
    float product = 0;
#pragma unroll 4
    for (int64_t c = int64_t{threadIdx.x % warp_size} * width; c < a.C; c += warp_size * width) {
        float gradient[width], value[width];
        unpack(gradient, Vector<T, width>::load(dout + c));
        unpack(value, Vector<T, width>::load(y + c));
#pragma unroll
        for (int i = 0; i < width; ++i) {
            product += gradient[i] * value[i];
            gradient[i] *= weight;
        }
        vector_of<T>(gradient).store(dy + c);
    }
    product = warp_sum(product);
    if (threadIdx.x % warp_size == 0) a.dweights[slot] = product;
}

}  // namespace

void combine(Stream& stream, const Combine& args) {
    with_element_type(args.out.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t N = args.out.rows(), C = args.out.cols();
        const bool aligned =
            is_aligned(args.out.data) && is_aligned(args.y.data) && is_aligned(args.residual.data);
        with_width<T>(C, aligned, [&](auto width) {
            const int64_t vectors = C / width, tiles = ceil_div<int64_t>(vectors, most_threads),
                          threads =
                              ceil_div(ceil_div(vectors, tiles), int64_t{warp_size}) * warp_size;
            forward_kernel<T, width><<<dim3(static_cast<unsigned>(N), static_cast<unsigned>(tiles)),
                                       static_cast<unsigned>(threads), 0, stream_of(stream)>>>(
                {static_cast<T*>(args.out.data), static_cast<const T*>(args.y.data),
                 static_cast<const T*>(args.residual.data),
                 static_cast<const int32_t*>(args.row_of.data),
                 static_cast<const float*>(args.weights.data), C,
                 static_cast<int>(slots_of_token(args.row_of))});
            CUDA_CHECK_LAUNCH();
        });
    });
}

void combine_backward(Stream& stream, const CombineBackward& args) {
    with_element_type(args.dout.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t slots = args.y.rows(), C = args.dout.cols();
        const bool aligned =
            is_aligned(args.dy.data) && is_aligned(args.y.data) && is_aligned(args.dout.data);
        with_width<T>(C, aligned, [&](auto width) {
            backward_kernel<T, width><<<static_cast<unsigned>(ceil_div<int64_t>(slots, warps)),
                                        warps * warp_size, 0, stream_of(stream)>>>(
                {static_cast<T*>(args.dy.data), static_cast<float*>(args.dweights.data),
                 static_cast<const T*>(args.dout.data), static_cast<const T*>(args.y.data),
                 static_cast<const int32_t*>(args.row_of.data),
                 static_cast<const float*>(args.weights.data), slots, C,
                 static_cast<int>(slots_of_token(args.row_of))});
            CUDA_CHECK_LAUNCH();
        });
    });
}

}  // namespace train_gpt::cuda
