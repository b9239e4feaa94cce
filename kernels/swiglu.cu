#include <algorithm>

#include "device/cuda_queue.h"
#include "kernels/cuda_block.cuh"
#include "kernels/exp_math.cuh"
#include "kernels/fp8_tile.cuh"
#include "kernels/swiglu.h"

namespace train_gpt::cuda {

namespace {

// A block takes `rows` rows and up to `most_threads` vectors of each; a thread takes the same
// columns of each row. It issues all its loads before the first use: 128 bytes or more per thread.
constexpr int most_threads = 256;
constexpr int forward_rows = 4, backward_rows = 2;

/// What the result and the gradients of an element are products of: out = value·up,
/// dgate = dout·up·slope, dup = dout·value, or 0 unless `passes`.
struct Factors {
    float value, slope, up;
    bool passes;
};

/// value = x·σ(x), slope = σ + x·σ·(1 − σ). T is the type in which results are stored.
struct Plain {
    template <class T>
    __device__ __forceinline__ Factors of(float x, float up) const {
        // Below −87, both are 0 up to 2·10⁻³⁶; above, the exponential is finite. A NaN stays a NaN.
        const float z = x < -87.0f ? -87.0f : x;
        const float e = exp_for<T>(-z), sigma = quotient_for<T>(1.0f, 1.0f + e), value = z * sigma;
        return {value, sigma + value * (e * sigma), up, true};
    }
};

/// value = g·σ(α·g), slope = σ + α·g·σ·(1 − σ), or 0 where the gate was clamped; up = u + 1.
struct Clamped {
    float alpha, limit, lowest;

    explicit Clamped(const ClampedSwiglu& of)
        : alpha(of.alpha), limit(of.limit), lowest(-87.0f / of.alpha) {}

    template <class T>
    __device__ __forceinline__ Factors of(float gate, float up) const {
        const bool gate_passes = !(gate > limit);
        const float g = !gate_passes    ? limit
                        : gate < lowest ? lowest
                                        : gate,
                    u = up > limit    ? limit
                        : up < -limit ? -limit
                                      : up;
        const float e = exp_for<T>(-(g * alpha)), sigma = quotient_for<T>(1.0f, 1.0f + e),
                    value = g * sigma, slope = sigma + value * alpha * (e * sigma);
        return {value, gate_passes ? slope : 0.0f, u + 1.0f, !(fabsf(up) > limit)};
    }
};

/// The thread's first column. width divides F, so that vectors do not cross from gate to up.
template <int width>
__device__ __forceinline__ int64_t own_column() {
    return (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * width;
}

template <class T, int width, class Form>
__global__ void __launch_bounds__(most_threads)
    forward_kernel(T* out, const T* gate_up, int64_t M, const int32_t* row_count, int64_t F,
                   Form form) {
    if (row_count) M = *row_count;
    const int64_t column = own_column<width>(), first_row = int64_t{blockIdx.x} * forward_rows;
    if (column >= F) return;
    Vector<T, width> gates[forward_rows], ups[forward_rows];
#pragma unroll
    for (int r = 0; r < forward_rows; ++r) {
        if (first_row + r >= M) break;
        const T* from = gate_up + (first_row + r) * 2 * F + column;
        gates[r] = Vector<T, width>::load(from);
        ups[r] = Vector<T, width>::load(from + F);
    }
#pragma unroll
    for (int r = 0; r < forward_rows; ++r) {
        if (first_row + r >= M) break;
        float gate[width], up[width];
        unpack(gate, gates[r]);
        unpack(up, ups[r]);
#pragma unroll
        for (int i = 0; i < width; ++i) {
            const Factors of = form.template of<T>(gate[i], up[i]);
            gate[i] = of.value * of.up;
        }
        vector_of<T>(gate).store(out + (first_row + r) * F + column);
    }
}

/// The arrays of SwigluBackward. dgate_up may be gate_up, and out may be dout; out and row_count
/// may be null.
template <class T>
struct BackwardArrays {
    T *dgate_up, *out;
    const T *dout, *gate_up;
    const int32_t* row_count;
};

template <class T, int width, class Form>
__global__ void __launch_bounds__(most_threads)
    backward_kernel(BackwardArrays<T> a, int64_t M, int64_t F, Form form) {
    if (a.row_count) M = *a.row_count;
    const int64_t column = own_column<width>(), first_row = int64_t{blockIdx.x} * backward_rows;
    if (column >= F) return;
    Vector<T, width> gates[backward_rows], ups[backward_rows], douts[backward_rows];
#pragma unroll
    for (int r = 0; r < backward_rows; ++r) {
        if (first_row + r >= M) break;
        const T* from = a.gate_up + (first_row + r) * 2 * F + column;
        gates[r] = Vector<T, width>::load(from);
        ups[r] = Vector<T, width>::load(from + F);
        douts[r] = Vector<T, width>::load(a.dout + (first_row + r) * F + column);
    }
#pragma unroll
    for (int r = 0; r < backward_rows; ++r) {
        if (first_row + r >= M) break;
        float gate[width], up[width], gradient[width], product[width];
        unpack(gate, gates[r]);
        unpack(up, ups[r]);
        unpack(gradient, douts[r]);
#pragma unroll
        for (int i = 0; i < width; ++i) {
            const Factors of = form.template of<T>(gate[i], up[i]);
            gate[i] = gradient[i] * of.up * of.slope;
            gradient[i] = of.passes ? gradient[i] * of.value : 0.0f;
            product[i] = of.value * of.up;
        }
        T* const to = a.dgate_up + (first_row + r) * 2 * F + column;
        vector_of<T>(gate).store(to);
        vector_of<T>(gradient).store(to + F);
        if (a.out) vector_of<T>(product).store(a.out + (first_row + r) * F + column);
    }
}

/// The elements of `out`, as they would be stored.
template <class T, class Form>
struct Results {
    const T* gate_up;
    int64_t F;
    Form form;

    template <int width>
    __device__ __forceinline__ void load(float (&values)[width], int64_t row, int64_t col) const {
        float gate[width], up[width];
        unpack(gate, Vector<T, width>::load(gate_up + row * 2 * F + col));
        unpack(up, Vector<T, width>::load(gate_up + row * 2 * F + F + col));
#pragma unroll
        for (int i = 0; i < width; ++i) {
            const Factors of = form.template of<T>(gate[i], up[i]);
            gate[i] = of.value * of.up;
        }
        unpack(values, vector_of<T>(gate));
    }
};

/// Calls f(width, grid, threads) for the widest vectors that rows of F columns at these addresses
/// consist of.
template <class T, class F, class... Tensors>
void with_grid(int64_t rows, int64_t columns, int rows_per_block, F&& f,
               const Tensors&... tensors) {
    with_width<T>(columns, (is_aligned(tensors.data) && ...), [&](auto width) {
        const int64_t vectors = columns / width, tiles = ceil_div<int64_t>(vectors, most_threads);
        const int64_t threads = ceil_div(ceil_div(vectors, tiles), int64_t{warp_size}) * warp_size;
        f(width,
          dim3(static_cast<unsigned>(ceil_div<int64_t>(rows, rows_per_block)),
               static_cast<unsigned>(tiles)),
          static_cast<unsigned>(threads));
    });
}

/// Calls f(Plain) or f(Clamped).
template <class F>
void with_form(const std::optional<ClampedSwiglu>& clamped, F&& f) {
    clamped ? f(Clamped(*clamped)) : f(Plain{});
}

template <class T, class Form>
void forward(Stream& stream, const SwigluForward& args, const Form& form) {
    const int64_t M = args.out.rows(), F = args.out.cols();
    with_grid<T>(
        M, F, forward_rows,
        [&](auto width, dim3 grid, unsigned threads) {
            forward_kernel<T, width><<<grid, threads, 0, stream_of(stream)>>>(
                static_cast<T*>(args.out.data), static_cast<const T*>(args.gate_up.data), M,
                static_cast<const int32_t*>(args.row_count.data), F, form);
            CUDA_CHECK_LAUNCH();
        },
        args.out, args.gate_up);
}

template <class T, class Form>
void forward_rounded(Stream& stream, const SwigluForward& args, const Form& form) {
    const int64_t M = args.gate_up.rows(), F = args.gate_up.cols() / 2;
    const bool aligned = is_aligned(args.gate_up.data) && is_aligned(args.rounded.codes.data);
    with_width<T>(F, aligned, [&](auto width) {
        launch_round_tile<E4M3, width>(
            stream, round_tile_of(args.rounded, M, F),
            Results<T, Form>{static_cast<const T*>(args.gate_up.data), F, form});
    });
}

template <class T, class Form>
void backward(Stream& stream, const SwigluBackward& args, const Form& form) {
    const int64_t M = args.dout.rows(), F = args.dout.cols();
    with_grid<T>(
        M, F, backward_rows,
        [&](auto width, dim3 grid, unsigned threads) {
            const BackwardArrays<T> arrays{
                static_cast<T*>(args.dgate_up.data), static_cast<T*>(args.out.data),
                static_cast<const T*>(args.dout.data), static_cast<const T*>(args.gate_up.data),
                static_cast<const int32_t*>(args.row_count.data)};
            backward_kernel<T, width><<<grid, threads, 0, stream_of(stream)>>>(arrays, M, F, form);
            CUDA_CHECK_LAUNCH();
        },
        args.dgate_up, args.out, args.dout, args.gate_up);
}

}  // namespace

void swiglu_forward(Stream& stream, const SwigluForward& args) {
    with_element_type(args.gate_up.dtype, [&](auto type) {
        with_form(args.clamped, [&](const auto& form) {
            if (args.rounded)
                forward_rounded<decltype(type)>(stream, args, form);
            else
                forward<decltype(type)>(stream, args, form);
        });
    });
}

void swiglu_backward(Stream& stream, const SwigluBackward& args) {
    with_element_type(args.dout.dtype, [&](auto type) {
        with_form(args.clamped,
                  [&](const auto& form) { backward<decltype(type)>(stream, args, form); });
    });
}

}  // namespace train_gpt::cuda
