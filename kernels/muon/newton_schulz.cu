#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/linear/gemm_cublas.h"
#include "kernels/muon/newton_schulz.h"

namespace train_gpt::cuda {

namespace {

constexpr int threads = 256;
// The elements whose squares a thread block adds up.
constexpr int64_t norm_elements = 16 * threads;
// Transposes go through shared memory in squares of tile × tile, tile_rows rows at a time.
constexpr int tile = 32, tile_rows = threads / tile;

/// One thread block per norm_elements elements of a matrix: partials [count, blocks].
template <class T>
__global__ void __launch_bounds__(threads)
    sum_squares(double* partials, const T* x, int64_t numel, int64_t blocks) {
    __shared__ double shared[threads / warp_size];
    const int64_t matrix = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const T* const of_matrix = x + matrix * numel;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < norm_elements / threads; ++k) {
        const int64_t i = block * norm_elements + k * threads + threadIdx.x;
        const float value = i < numel ? to_float(of_matrix[i]) : 0.0f;
        sum += value * value;
    }
    const double total = block_sum(static_cast<double>(sum), shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

/// One thread block per matrix: scales [count] = 1 / (safety·norm + epsilon).
__global__ void __launch_bounds__(threads)
    find_scales(float* scales, const double* partials, int64_t blocks, float safety,
                float epsilon) {
    __shared__ double shared[threads / warp_size];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < blocks; i += threads)
        sum += partials[blockIdx.x * blocks + i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        scales[blockIdx.x] = 1.0f / (safety * static_cast<float>(sqrt(sum)) + epsilon);
}

/// y = scale·x; y may be x.
template <class T>
__global__ void __launch_bounds__(threads)
    scale_matrices(T* y, const T* x, const float* scales, int64_t numel, int64_t blocks) {
    const int64_t matrix = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const float scale = scales[matrix];
#pragma unroll
    for (int k = 0; k < norm_elements / threads; ++k) {
        const int64_t i = block * norm_elements + k * threads + threadIdx.x;
        if (i < numel)
            y[matrix * numel + i] = from_float<T>(scale * to_float(x[matrix * numel + i]));
    }
}

/// y [cols, rows] = scale·xᵀ, with a thread block for each square of x. scales may be null.
template <class T>
__global__ void __launch_bounds__(threads)
    transpose_matrices(T* y, const T* x, const float* scales, int64_t rows, int64_t cols) {
    __shared__ float square[tile][tile + 1];
    const int64_t across = ceil_div<int64_t>(cols, tile), down = ceil_div<int64_t>(rows, tile),
                  matrix = blockIdx.x / (across * down), place = blockIdx.x % (across * down),
                  row = place / across * tile, col = place % across * tile;
    const T* const from = x + matrix * rows * cols;
    T* const to = y + matrix * rows * cols;
    const int i = static_cast<int>(threadIdx.x) % tile,
              first = static_cast<int>(threadIdx.x) / tile;
    const float scale = scales ? scales[matrix] : 1.0f;
    for (int r = first; r < tile; r += tile_rows)
        if (row + r < rows && col + i < cols)
            square[r][i] = scale * to_float(from[(row + r) * cols + col + i]);
    __syncthreads();
    for (int c = first; c < tile; c += tile_rows)
        if (col + c < cols && row + i < rows)
            to[(col + c) * rows + row + i] = from_float<T>(square[i][c]);
}

/// One thread block per square on or below the diagonal, which it writes with its mirror image.
template <class T>
__global__ void __launch_bounds__(threads)
    combine_panels(SymmetricPolynomial args, int64_t squares) {
    __shared__ float square[tile][tile + 1];
    const auto *first = static_cast<const T*>(args.first),
               *second = static_cast<const T*>(args.second);
    const SymmetricPanels& panels = args.panels;
    const int64_t n = panels.n, matrix = blockIdx.x / squares, place = blockIdx.x % squares;
    // Squares are numbered row by row: row t begins at t·(t + 1)/2.
    auto t = static_cast<int64_t>((sqrtf(8.0f * static_cast<float>(place) + 1) - 1) / 2);
    while (t * (t + 1) / 2 > place) --t;
    while ((t + 1) * (t + 2) / 2 <= place) ++t;
    const int64_t row = t * tile, col = (place - t * (t + 1) / 2) * tile, half = panels.numel();
    const int i = static_cast<int>(threadIdx.x) % tile, top = static_cast<int>(threadIdx.x) / tile;
    T* const of_matrix = static_cast<T*>(args.out) + matrix * n * n;
    for (int r = top; r < tile; r += tile_rows) {
        const int64_t y = row + r, x = col + i;
        if (y >= n || x > y) continue;
        const int64_t panel = y / panels.panel,
                      at = matrix * half + panels.place(panel) +
                           (y - panels.first_row(panel)) * panels.cols(panel) + x;
        float value = args.b * to_float(first[at]);
        if (second) value += args.c * to_float(second[at]);
        if (x == y) value += args.a;
        square[r][i] = value;
        of_matrix[y * n + x] = from_float<T>(value);
    }
    __syncthreads();
    for (int r = top; r < tile; r += tile_rows) {
        const int64_t y = col + r, x = row + i;  // of the mirror image
        if (x < n && y < x) of_matrix[y * n + x] = from_float<T>(square[i][r]);
    }
}

int64_t norm_blocks(int64_t rows, int64_t cols) { return ceil_div(rows * cols, norm_elements); }

/// How much of the memory for norms the partial sums take; the scales are after them.
size_t partial_bytes(int64_t count, int64_t rows, int64_t cols) {
    return static_cast<size_t>(count * norm_blocks(rows, cols)) * sizeof(double);
}

/// The transpose of each matrix times its scale; scales may be null.
template <class T>
void launch_transpose(Stream& stream, const Transposition& args, const float* scales) {
    const int64_t squares = ceil_div<int64_t>(args.rows, tile) * ceil_div<int64_t>(args.cols, tile);
    transpose_matrices<T>
        <<<static_cast<unsigned>(args.count * squares), threads, 0, stream_of(stream)>>>(
            static_cast<T*>(args.y), static_cast<const T*>(args.x), scales, args.rows, args.cols);
    CUDA_CHECK_LAUNCH();
}

}  // namespace

size_t norm_bytes(int64_t count, int64_t rows, int64_t cols) {
    return (partial_bytes(count, rows, cols) + static_cast<size_t>(count) * sizeof(float) + 255) /
           256 * 256;
}

void normalize(Stream& stream, const Normalization& args) {
    auto* const partials = static_cast<double*>(args.norms);
    auto* const scales = reinterpret_cast<float*>(static_cast<char*>(args.norms) +
                                                  partial_bytes(args.count, args.rows, args.cols));
    const int64_t blocks = norm_blocks(args.rows, args.cols), numel = args.rows * args.cols;
    const auto all = static_cast<unsigned>(args.count * blocks);
    with_element_type(args.dtype, [&](auto type) {
        using T = decltype(type);
        const T* const x = static_cast<const T*>(args.x);
        sum_squares<T><<<all, threads, 0, stream_of(stream)>>>(partials, x, numel, blocks);
        CUDA_CHECK_LAUNCH();
        find_scales<<<static_cast<unsigned>(args.count), threads, 0, stream_of(stream)>>>(
            scales, partials, blocks, args.safety, args.epsilon);
        CUDA_CHECK_LAUNCH();
        if (args.transposed)
            return launch_transpose<T>(
                stream, {args.y, args.x, args.dtype, args.count, args.rows, args.cols}, scales);
        scale_matrices<T><<<all, threads, 0, stream_of(stream)>>>(static_cast<T*>(args.y), x,
                                                                  scales, numel, blocks);
        CUDA_CHECK_LAUNCH();
    });
}

void transpose(Stream& stream, const Transposition& args) {
    with_element_type(args.dtype,
                      [&](auto type) { launch_transpose<decltype(type)>(stream, args, nullptr); });
}

void symmetric_polynomial(Stream& stream, const SymmetricPolynomial& args) {
    const int64_t tiles = ceil_div<int64_t>(args.panels.n, tile), squares = tiles * (tiles + 1) / 2;
    with_element_type(args.dtype, [&](auto type) {
        using T = decltype(type);
        combine_panels<T>
            <<<static_cast<unsigned>(args.count * squares), threads, 0, stream_of(stream)>>>(
                args, squares);
        CUDA_CHECK_LAUNCH();
    });
}

void multiply(Stream& stream, const BatchedProduct& args) {
    gemm(stream, {.op = args.transposed ? GemmOp::nt : GemmOp::nn,
                  .in = args.dtype,
                  .out = args.dtype,
                  .m = args.m,
                  .n = args.n,
                  .k = args.k,
                  .d = args.out,
                  .a = args.x,
                  .b = args.y,
                  .batch = args.batch,
                  .count = args.count,
                  .strides = {args.x_stride, args.y_stride, args.out_stride}});
}

size_t multiply_scratch_bytes(int64_t m, int64_t n, int64_t batch) {
    return gemm_workspace_bytes(batch * m, n);
}

}  // namespace train_gpt::cuda
