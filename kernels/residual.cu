#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/residual.h"

namespace train_gpt::cuda {

namespace {

constexpr int threads = 256;

/// A thread adds one vector of a row; width divides C. bias may be null.
template <class T, int width>
__global__ void __launch_bounds__(threads)
    add_rows(T* out, const T* x, const T* residual, const T* bias, int64_t vectors, int64_t C) {
    const int64_t vector = int64_t{blockIdx.x} * threads + threadIdx.x;
    if (vector >= vectors) return;
    const int64_t first = vector * width;
    float sum[width], other[width];
    unpack(sum, Vector<T, width>::load(x + first));
    unpack(other, Vector<T, width>::load(residual + first));
#pragma unroll
    for (int i = 0; i < width; ++i) sum[i] += other[i];
    if (bias) {
        unpack(other, Vector<T, width>::load(bias + first % C));
#pragma unroll
        for (int i = 0; i < width; ++i) sum[i] += other[i];
    }
    vector_of<T>(sum).store(out + first);
}

}  // namespace

void residual_add(Stream& stream, const ResidualAdd& args) {
    with_element_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t C = args.x.cols();
        const bool aligned = is_aligned(args.out.data) && is_aligned(args.x.data) &&
                             is_aligned(args.residual.data) &&
                             (!args.bias || is_aligned(args.bias.data));
        with_width<T>(C, aligned, [&](auto width) {
            const int64_t vectors = args.x.numel() / width;
            add_rows<T, width><<<static_cast<unsigned>(ceil_div<int64_t>(vectors, threads)),
                                 threads, 0, stream_of(stream)>>>(
                static_cast<T*>(args.out.data), static_cast<const T*>(args.x.data),
                static_cast<const T*>(args.residual.data), static_cast<const T*>(args.bias.data),
                vectors, C);
            CUDA_CHECK_LAUNCH();
        });
    });
}

}  // namespace train_gpt::cuda
