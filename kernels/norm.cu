// The forward pass of norms; norm_backward.cu has the backward pass.
#include <algorithm>
#include <type_traits>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/norm.h"
#include "kernels/norm_rows.cuh"

namespace train_gpt::cuda {

namespace {

// Both passes are memory-bound: they read each row once, in 16-byte packs, and keep it on chip.
// Rows that do not consist of whole packs (C not a multiple of the pack size, or a view that starts
// at any address) or that are too long use the *_any kernels, which visit a row several times and
// rely on the caches.

/// Rows of a warp: eight warps per block keep 64 KB or more of loads in flight on a multiprocessor.
constexpr int rows_per_block = 8;

/// Rows of a block (C <= 32768): where there are more than run at a time, blocks process several
/// and keep w, b and bias in shared memory, so that these are not read again for each row and do
/// not compete with the rows for the caches. In fp32, a thread of such a block needs more than the
/// 64 registers that 1024 threads leave it; still longer rows, and those whose vectors do not fit,
/// get a block each.
template <class T, bool keeps_vectors>
constexpr int max_block_threads = keeps_vectors && sizeof(T) == 4 ? 640 : 1024;

constexpr int any_threads = 256;

/// Calls f(std::integral_constant<int, n>{}) for 1 <= n <= most.
template <int most, class F>
void with_count(int64_t n, F&& f) {
    if constexpr (most > 1) {
        if (n < most) return with_count<most - 1>(n, f);
    }
    f(std::integral_constant<int, most>{});
}

/// One row per warp at a time.
template <class T, int packs>
__global__ void __launch_bounds__(rows_per_block* warp_size, packs == warp_packs ? 2 : 1)
    forward_warps(ForwardArgs<T> args) {
    extern __shared__ uint4 dynamic_shared[];
    const int64_t stride = int64_t{gridDim.x} * rows_per_block;
    if (stride < args.M) {
        keep_vectors(args, dynamic_shared);
        __syncthreads();
    }
    for (int64_t row = int64_t{blockIdx.x} * rows_per_block + threadIdx.x / warp_size; row < args.M;
         row += stride)
        forward_row<T, packs>(
            args, row, warp_size, static_cast<int>(threadIdx.x) % warp_size,
            [](float value) { return warp_sum(value); },
            [&](int column, const Pack<T>& own) { own.store(args.out + row * args.C + column); });
}

/// A block takes every gridDim.x-th row. With `keeps_vectors` and more rows than blocks, a thread
/// reads of w, b and bias what it has copied itself.
template <class T, bool keeps_vectors>
__global__ void __launch_bounds__(max_block_threads<T, keeps_vectors>)
    forward_rows(ForwardArgs<T> args) {
    extern __shared__ uint4 dynamic_shared[];
    __shared__ float shared[2][max_block_threads<T, keeps_vectors> / warp_size];
    const int lanes = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
    if (keeps_vectors && gridDim.x < args.M) keep_vectors(args, dynamic_shared);
    // Sums take turns with the two halves of `shared`, so one barrier for each is enough.
    int turn = 0;
    const auto row_sum = [&](float value) { return block_sum(value, shared[turn ^= 1]); };
    for (int64_t row = blockIdx.x; row < args.M; row += gridDim.x)
        forward_row<T, block_elements / Pack<T>::size>(
            args, row, lanes, lane, row_sum,
            [&](int column, const Pack<T>& own) { own.store(args.out + row * args.C + column); });
}

/// One row per block, any C and alignment; x is read three times.
template <class T>
__global__ void __launch_bounds__(any_threads) forward_any(ForwardArgs<T> args) {
    __shared__ float shared[2][any_threads / warp_size];
    const int64_t row = blockIdx.x;
    const T* x = args.x + row * args.C;
    float sum = 0, squares = 0;
    if (args.x_out) {  // each thread reads below what it has written here
        T* x_out = args.x_out + row * args.C;
        for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads)
            x_out[c] = from_float<T>(to_float(x[c]) + to_float(args.residual[row * args.C + c]) +
                                     (args.bias ? to_float(args.bias[c]) : 0.0f));
        x = x_out;
    }
    for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads) sum += to_float(x[c]);
    const float mean = args.rms ? 0.0f : block_sum(sum, shared[0]) / static_cast<float>(args.C);
    for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads) {
        const float centred = to_float(x[c]) - mean;
        squares += centred * centred;
    }
    const float rstd =
        rsqrtf(block_sum(squares, shared[1]) / static_cast<float>(args.C) + args.epsilon);
    if (threadIdx.x == 0) args.store_stats(row, mean, rstd);
    for (int c = static_cast<int>(threadIdx.x); c < args.C; c += any_threads)
        args.out[row * args.C + c] =
            from_float<T>((to_float(x[c]) - mean) * rstd * to_float(args.w[c]) +
                          (args.b ? to_float(args.b[c]) : 0.0f));
}

template <class T>
size_t vector_bytes(const ForwardArgs<T>& args) {
    const int64_t vectors = 1 + (args.b != nullptr) + (args.bias != nullptr);
    return static_cast<size_t>(vectors * args.C) * sizeof(T);
}

/// Launches a kernel that keeps w, b and bias where it has more rows than blocks; a block processes
/// `rows` at a time. At most `most` blocks run on a multiprocessor.
template <class T>
void launch_keeping(Stream& stream, void (*kernel)(ForwardArgs<T>), const ForwardArgs<T>& args,
                    int64_t rows, int threads, int64_t most) {
    const size_t shared_bytes = vector_bytes(args);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)));
    int resident = 0;
    CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared_bytes));
    const int64_t blocks =
        std::min(ceil_div(args.M, rows),
                 limits_of(stream).multiprocessors * std::clamp<int64_t>(resident, 1, most));
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes,
             stream_of(stream)>>>(args);
}

template <class T>
void launch_forward_rows(Stream& stream, const ForwardArgs<T>& args) {
    const int threads = threads_of_row(args.C);
    constexpr size_t static_shared_bytes = 256;
    constexpr int most = max_block_threads<T, true>;
    if (threads > most ||
        vector_bytes(args) + static_shared_bytes > limits_of(stream).shared_bytes_per_block) {
        forward_rows<T, false><<<static_cast<unsigned>(args.M), static_cast<unsigned>(threads), 0,
                                 stream_of(stream)>>>(args);
    } else {
        launch_keeping<T>(stream, forward_rows<T, true>, args, 1, threads, most / threads);
    }
}

template <class T>
void forward(Stream& stream, const NormForward& args) {
    const int64_t M = args.x.rows(), C = args.x.cols(), packs = ceil_div<int64_t>(C, Pack<T>::size);
    const ForwardArgs<T> kernel_args{.out = static_cast<T*>(args.out.data),
                                     .stats = static_cast<float*>(args.stats.data),
                                     .x = static_cast<const T*>(args.x.data),
                                     .w = static_cast<const T*>(args.w.data),
                                     .b = static_cast<const T*>(args.b.data),
                                     .residual = static_cast<const T*>(args.residual.data),
                                     .bias = static_cast<const T*>(args.bias.data),
                                     .x_out = static_cast<T*>(args.x_out.data),
                                     .M = M,
                                     .C = static_cast<int>(C),
                                     .epsilon = args.epsilon,
                                     .rms = args.norm == Norm::rms};
    if (!rows_are_packed<T>(C, args.x, args.out, args.w, args.b, args.residual, args.bias,
                            args.x_out) ||
        C > block_elements * max_block_threads<T, false>) {
        forward_any<T>
            <<<static_cast<unsigned>(M), any_threads, 0, stream_of(stream)>>>(kernel_args);
    } else if (is_row_of_warp<T>(C)) {
        // Blocks with 64 KB of rows together.
        const int64_t most =
            ceil_div<int64_t>(65536, rows_per_block * C * static_cast<int64_t>(sizeof(T)));
        with_count<warp_packs>(ceil_div<int64_t>(packs, warp_size), [&](auto per_lane) {
            launch_keeping<T>(stream, forward_warps<T, per_lane.value>, kernel_args, rows_per_block,
                              rows_per_block * warp_size, most);
        });
    } else {
        launch_forward_rows(stream, kernel_args);
    }
    CUDA_CHECK_LAUNCH();
}

}  // namespace

void norm_forward(Stream& stream, const NormForward& args) {
    assert(args.x.dtype == args.out.dtype && args.out.data != args.x.data);
    with_element_type(args.x.dtype, [&](auto type) { forward<decltype(type)>(stream, args); });
}

}  // namespace train_gpt::cuda
