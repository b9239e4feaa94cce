#include "kernels/muon/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include <omp.h>

#include "base/tensor.h"
#include "device/copy.h"
#include "kernels/lanes.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

namespace {

constexpr NewtonSchulzStep constant{3.4445f, -4.7750f, 2.0315f};
// K. Jordan, "Muon", 2024: the steepest at 0 of those that keep values within 0.3 of 1.
constexpr NewtonSchulzStep quintic[] = {constant, constant, constant, constant, constant};
// One step after the other tuned for five steps: modded-nanogpt, 2025.
constexpr NewtonSchulzStep tuned[] = {{4.0848f, -6.8946f, 2.9270f},
                                      {3.9505f, -6.3029f, 2.6377f},
                                      {3.7418f, -5.5913f, 2.3037f},
                                      {2.8769f, -3.1427f, 1.2046f},
                                      {2.8366f, -3.0525f, 1.2012f}};
// Amsel et al., "The Polar Express", arXiv 2505.16932: the best list for five steps.
constexpr NewtonSchulzStep polar_express[] = {{8.156554525f, -22.48329293f, 15.87876992f},
                                              {4.042929935f, -2.808917466f, 0.5000178451f},
                                              {3.891667802f, -2.772484153f, 0.5060648178f},
                                              {3.285753658f, -2.368129493f, 0.4644902423f},
                                              {2.346541326f, -1.709782838f, 0.4232355117f}};
// The same for eight steps, which end nearer to 1.
constexpr NewtonSchulzStep polar_express_8[] = {
    {8.2051f, -22.9019f, 16.4607f}, {4.0664f, -2.8612f, 0.5184f}, {3.9096f, -2.8234f, 0.5250f},
    {3.2856f, -2.4153f, 0.4853f},   {2.2779f, -1.6198f, 0.3985f}, {1.8726f, -1.2307f, 0.3585f},
    {1.8564f, -1.2132f, 0.3568f},   {1.8750f, -1.2500f, 0.3750f}};
// Grishina et al., CANS, arXiv 2506.10935.
constexpr NewtonSchulzStep cans[] = {{8.4703f, -25.1081f, 18.6293f},
                                     {4.1828f, -3.1087f, 0.5806f},
                                     {3.9619f, -2.9541f, 0.5630f},
                                     {3.2866f, -2.4647f, 0.5074f},
                                     {2.2737f, -1.6447f, 0.4162f}};
// Without A², arXiv 2606.00371.
constexpr NewtonSchulzStep cubic[] = {{3.36566f, -3.34210f, 0},
                                      {2.57440f, -1.49574f, 0},
                                      {2.53690f, -1.43126f, 0},
                                      {2.44189f, -1.27640f, 0},
                                      {2.22305f, -0.96306f, 0}};
// DeepSeek-V4: eight steps that raise small values, and two that bring all near 1.
constexpr NewtonSchulzStep deepseek[] = {constant,         constant,        constant, constant,
                                         constant,         constant,        constant, constant,
                                         {2, -1.5f, 0.5f}, {2, -1.5f, 0.5f}};

/// A shape as the iteration works on it: [short, long].
struct Shape {
    int64_t m, n;
    bool transposed;
    SymmetricPanels panels;

    explicit Shape(const MatrixShape& shape)
        : m(std::min(shape.rows, shape.cols)),
          n(std::max(shape.rows, shape.cols)),
          transposed(shape.rows > shape.cols),
          panels{m, panel_rows(m)} {}

  private:
    /// Few panels compute more than half, (1 + 1/panels)/2; narrow ones multiply slowly.
    static int64_t panel_rows(int64_t m) {
        constexpr int64_t least = 64, most_panels = 8;
        return (std::max(least, m / most_panels) + least - 1) / least * least;
    }
};

/// So many matrices of a shape are multiplied at a time. This depends on nothing else, so that
/// products are the same whichever rank has which matrices.
int64_t batch_of(const Device& device, const MatrixShape& shape) {
    constexpr int64_t most = 16, most_elements = int64_t{1} << 24;
    return device.is_cuda()
               ? std::clamp<int64_t>(most_elements / (shape.rows * shape.cols), 1, most)
               : 1;
}

/// On a CPU: too small for all threads to share the work on it well.
bool is_small(const MatrixShape& shape) { return std::min(shape.rows, shape.cols) <= 1024; }

size_t aligned(int64_t elements, size_t element_bytes) {
    constexpr size_t alignment = 256;
    return (static_cast<size_t>(elements) * element_bytes + alignment - 1) / alignment * alignment;
}

/// What the workspace has, for a whole batch.
struct Workspace {
    char *y, *full, *first, *second, *norms;
    size_t bytes;

    Workspace(void* base, DType dtype, const Shape& shape, int64_t batch) {
        auto* next = static_cast<char*>(base);
        const auto take = [&](size_t n) { return std::exchange(next, next + n); };
        const size_t e = size_of(dtype);
        y = take(aligned(batch * shape.m * shape.n, e));
        full = take(aligned(batch * shape.m * shape.m, e));
        first = take(aligned(batch * shape.panels.numel(), e));
        second = take(aligned(batch * shape.panels.numel(), e));
#ifdef TRAIN_GPT_CUDA
        norms = take(cuda::norm_bytes(batch, shape.m, shape.n));
#else
        norms = nullptr;
#endif
        bytes = static_cast<size_t>(next - static_cast<char*>(base));
    }
};

// --- on the CPU ----------------------------------------------------------------------------------

// Transposes go through squares that stay in the first-level cache.
constexpr int64_t tile = 32;

template <class T>
struct Tile {
    alignas(64) T rows[tile][tile];

    /// Writes [rows, cols] of it as [cols, rows] to `to`, whose rows are `stride` elements apart.
    void write_transposed(T* to, int64_t stride, int64_t row_count, int64_t col_count) const {
        for (int64_t c = 0; c < col_count; ++c)
            for (int64_t r = 0; r < row_count; ++r) to[c * stride + r] = rows[r][c];
    }
};

/// 1 / (safety·‖x‖ + epsilon). Rows are added up in order.
template <class T>
float scale_of(const T* x, int64_t rows, int64_t cols, float safety, float epsilon) {
    std::vector<double> sums(static_cast<size_t>(rows));
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const T* const row = x + r * cols;
        sums[static_cast<size_t>(r)] = lane_sum<double>(cols, [=](int64_t i) {
            const float value = to_float(row[i]);
            return value * value;
        });
    }
    const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
    return 1.0f / (safety * static_cast<float>(std::sqrt(total)) + epsilon);
}

/// y = scale·x, [cols, rows] if transposed.
template <class T>
void scale_into(T* y, const T* x, int64_t rows, int64_t cols, bool transposed, float scale) {
    if (!transposed) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < rows * cols; ++i) store(y[i], scale * to_float(x[i]));
        return;
    }
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t c = 0; c < cols; c += tile)
        for (int64_t r = 0; r < rows; r += tile) {
            Tile<T> square;
            const int64_t height = std::min(tile, rows - r), width = std::min(tile, cols - c);
            for (int64_t i = 0; i < height; ++i) {
                const T* const from = x + (r + i) * cols + c;
#pragma omp simd
                for (int64_t j = 0; j < width; ++j)
                    store(square.rows[i][j], scale * to_float(from[j]));
            }
            square.write_transposed(y + c * rows + r, rows, height, width);
        }
}

template <class T>
void polynomial(const SymmetricPolynomial& p, int64_t which) {
    const SymmetricPanels& panels = p.panels;
    const int64_t n = panels.n;
    T* const out = static_cast<T*>(p.out) + which * n * n;
    const T *first = static_cast<const T*>(p.first) + which * panels.numel(),
            *second = p.second ? static_cast<const T*>(p.second) + which * panels.numel() : nullptr;
    // Squares on and below the diagonal, each with its mirror image.
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t top = 0; top < n; top += tile)
        for (int64_t left = 0; left <= top; left += tile) {
            Tile<T> square;
            const int64_t height = std::min(tile, n - top), width = std::min(tile, n - left);
            for (int64_t i = 0; i < height; ++i) {
                const int64_t panel = (top + i) / panels.panel,
                              at = panels.place(panel) +
                                   (top + i - panels.first_row(panel)) * panels.cols(panel) + left;
                const T *const a = first + at, *const b = second ? second + at : a;
                const float c = second ? p.c : 0.0f;
                T* const to = square.rows[i];
#pragma omp simd
                for (int64_t j = 0; j < width; ++j)
                    store(to[j], p.b * to_float(a[j]) + c * to_float(b[j]));
                if (left == top) {
                    store(to[i], p.a + p.b * to_float(a[i]) + c * to_float(b[i]));
                    for (int64_t j = 0; j < i; ++j) square.rows[j][i] = to[j];
                }
            }
            for (int64_t i = 0; i < height; ++i)
                std::copy_n(square.rows[i], width, out + (top + i) * n + left);
            if (left < top) square.write_transposed(out + left * n + top, n, height, width);
        }
}

// --- on any device -------------------------------------------------------------------------------

/// Up to a batch of matrices, their workspace, and the operations on all of them.
class Batch {
  public:
    Batch(Stream& stream, DType dtype, const MatrixGroup& matrices, void* workspace)
        : stream_(stream),
          dtype_(dtype),
          shape_(matrices.shape),
          count_(matrices.count),
          batch_(batch_of(stream.device, matrices.shape)),
          x_(static_cast<char*>(matrices.data)),
          work_(workspace, dtype, shape_, batch_) {}

    void run(const NewtonSchulzCoefficients& coefficients) {
        // The products write into the other of two buffers. The last one is x, or for transposed
        // matrices y, if that can be.
        char *from = x_, *to = work_.y;
        if (shape_.transposed || coefficients.steps.size() % 2 == 1) from = work_.y, to = x_;
        normalize(from, coefficients);
        for (const NewtonSchulzStep& step : coefficients.steps) {
            take_step(to, from, step);
            std::swap(from, to);
        }
        if (!shape_.transposed) return;
        transpose_back(from == x_ ? work_.y : x_, from);
        if (from == x_) copy(stream_, x_, work_.y, bytes_of(shape_.m * shape_.n));
    }

  private:
    size_t bytes_of(int64_t elements) const {
        return static_cast<size_t>(count_ * elements) * size_of(dtype_);
    }
    Tensor matrix(const void* data, int64_t which, int64_t stride, int64_t offset, int64_t rows,
                  int64_t cols) const {
        return {static_cast<char*>(const_cast<void*>(data)) +
                    static_cast<size_t>(which * stride + offset) * size_of(dtype_),
                dtype_,
                {rows, cols}};
    }

    void normalize(char* to, const NewtonSchulzCoefficients& k) {
        const int64_t rows = shape_.transposed ? shape_.n : shape_.m,
                      cols = shape_.transposed ? shape_.m : shape_.n;
#ifdef TRAIN_GPT_CUDA
        if (stream_.device.is_cuda())
            return cuda::normalize(stream_, {to, x_, dtype_, count_, rows, cols, shape_.transposed,
                                             k.safety, k.epsilon, work_.norms});
#endif
        with_float_type(dtype_, [&]<class T>(T) {
            for (int64_t b = 0; b < count_; ++b) {
                const T* const x = reinterpret_cast<const T*>(x_) + b * rows * cols;
                scale_into(reinterpret_cast<T*>(to) + b * rows * cols, x, rows, cols,
                           shape_.transposed, scale_of(x, rows, cols, k.safety, k.epsilon));
            }
        });
    }

    void transpose_back(char* to, const char* from) {
#ifdef TRAIN_GPT_CUDA
        if (stream_.device.is_cuda())
            return cuda::transpose(stream_, {to, from, dtype_, count_, shape_.m, shape_.n});
#endif
        with_float_type(dtype_, [&]<class T>(T) {
            const int64_t n = shape_.m * shape_.n;
            for (int64_t b = 0; b < count_; ++b)
                scale_into(reinterpret_cast<T*>(to) + b * n,
                           reinterpret_cast<const T*>(from) + b * n, shape_.m, shape_.n, true, 1);
        });
    }

    void take_step(char* to, const char* from, const NewtonSchulzStep& step) {
        multiply_half(work_.first, from, shape_.n);
        if (step.c != 0) {
            combine(nullptr, 0, 1, 0);
            multiply_half(work_.second, work_.full, shape_.m);
        }
        combine(step.c != 0 ? work_.second : nullptr, step.a, step.b, step.c);
        multiply(to, work_.full, from);
    }

    /// panels = half of x·xᵀ with x [m, k].
    void multiply_half(char* panels, const char* x, int64_t k) {
        const SymmetricPanels& p = shape_.panels;
        for (int64_t i = 0; i < p.count(); ++i) {
#ifdef TRAIN_GPT_CUDA
            if (stream_.device.is_cuda()) {
                cuda::multiply(stream_, {.transposed = true,
                                         .out = matrix(panels, 0, 0, p.place(i), 1, 1).data,
                                         .x = matrix(x, 0, 0, p.first_row(i) * k, 1, 1).data,
                                         .y = x,
                                         .dtype = dtype_,
                                         .m = p.rows(i),
                                         .n = p.cols(i),
                                         .k = k,
                                         .out_stride = p.numel(),
                                         .x_stride = shape_.m * k,
                                         .y_stride = shape_.m * k,
                                         .count = count_,
                                         .batch = batch_});
                continue;
            }
#endif
            for (int64_t b = 0; b < count_; ++b)
                linear_forward(
                    stream_, {.out = matrix(panels, b, p.numel(), p.place(i), p.rows(i), p.cols(i)),
                              .x = matrix(x, b, shape_.m * k, p.first_row(i) * k, p.rows(i), k),
                              .w = matrix(x, b, shape_.m * k, 0, p.cols(i), k)});
        }
    }

    /// full = a·I + b·first + c·second.
    void combine(const char* second, float a, float b, float c) {
        const SymmetricPolynomial args{work_.full,    work_.first, second, dtype_, count_,
                                       shape_.panels, a,           b,      c};
#ifdef TRAIN_GPT_CUDA
        if (stream_.device.is_cuda()) return cuda::symmetric_polynomial(stream_, args);
#endif
        with_float_type(dtype_, [&]<class T>(T) {
            for (int64_t which = 0; which < count_; ++which) polynomial<T>(args, which);
        });
    }

    /// to = square·from, [m, n].
    void multiply(char* to, const char* square, const char* from) {
        const int64_t m = shape_.m, n = shape_.n;
#ifdef TRAIN_GPT_CUDA
        if (stream_.device.is_cuda())
            return cuda::multiply(stream_, {.out = to,
                                            .x = square,
                                            .y = from,
                                            .dtype = dtype_,
                                            .m = m,
                                            .n = n,
                                            .k = m,
                                            .out_stride = m * n,
                                            .x_stride = m * m,
                                            .y_stride = m * n,
                                            .count = count_,
                                            .batch = batch_});
#endif
        for (int64_t b = 0; b < count_; ++b)
            linear_backward_input(stream_, {.dx = matrix(to, b, m * n, 0, m, n),
                                            .dy = matrix(square, b, m * m, 0, m, m),
                                            .w = matrix(from, b, m * n, 0, m, n)});
    }

    Stream& stream_;
    DType dtype_;
    Shape shape_;
    int64_t count_, batch_;
    char* x_;
    Workspace work_;
};

}  // namespace

const NewtonSchulzCoefficients& coefficients_of(NewtonSchulzList list) {
    static constexpr NewtonSchulzCoefficients in_order[] = {
        {quintic}, {tuned},    {polar_express, 1.01f, 1e-6f}, {polar_express_8}, {cans},
        {cubic},   {deepseek},
    };
    return in_order[static_cast<size_t>(list)];
}

namespace {

/// `count` matrices of a group, from `first` on.
MatrixGroup part_of(const MatrixGroup& group, DType dtype, int64_t first, int64_t count) {
    const int64_t numel = group.shape.rows * group.shape.cols;
    return {group.shape, count,
            static_cast<char*>(group.data) + static_cast<size_t>(first * numel) * size_of(dtype)};
}

size_t workspace_bytes(const Device& device, DType dtype, const MatrixShape& shape) {
    return Workspace(nullptr, dtype, Shape(shape), batch_of(device, shape)).bytes;
}

size_t scratch_bytes(const Stream& stream, DType dtype, const MatrixShape& of) {
    const Shape shape(of);
#ifdef TRAIN_GPT_CUDA
    if (stream.device.is_cuda())
        return cuda::multiply_scratch_bytes(shape.m, shape.n, batch_of(stream.device, of));
#endif
    size_t bytes = linear_scratch_bytes(stream, dtype, shape.m, shape.m, shape.n);
    for (const int64_t k : {shape.m, shape.n})
        for (int64_t p = 0; p < shape.panels.count(); ++p)
            bytes = std::max(bytes, linear_scratch_bytes(stream, dtype, shape.panels.rows(p),
                                                         shape.panels.cols(p), k));
    return (bytes + 63) / 64 * 64;
}

/// The most that one thread needs for matrices that each has for itself.
template <class BytesOf>
size_t most_of_thread(std::span<const MatrixShape> shapes, const BytesOf& bytes_of) {
    size_t most = 0;
    // Products are planned for one thread where several run.
#pragma omp parallel num_threads(2)
#pragma omp master
    for (const MatrixShape& shape : shapes)
        if (is_small(shape)) most = std::max(most, bytes_of(shape));
    return most;
}

/// The most that a call needs, with `of_thread` for each thread that has a matrix for itself.
template <class BytesOf>
size_t most_of_all(const Device& device, std::span<const MatrixShape> shapes,
                   const BytesOf& bytes_of) {
    size_t most = 0;
    for (const MatrixShape& shape : shapes)
        if (device.is_cuda() || !is_small(shape)) most = std::max(most, bytes_of(shape));
    if (device.is_cuda()) return most;
    return std::max(most,
                    static_cast<size_t>(omp_get_max_threads()) * most_of_thread(shapes, bytes_of));
}

/// On the CPU: each thread takes a matrix, the largest first.
void take_small_ones(Stream& stream, const NewtonSchulz& args,
                     const NewtonSchulzCoefficients& coefficients) {
    std::vector<MatrixGroup> matrices;
    std::vector<MatrixShape> shapes;
    for (const MatrixGroup& group : args.groups) {
        if (!is_small(group.shape)) continue;
        shapes.push_back(group.shape);
        for (int64_t i = 0; i < group.count; ++i)
            matrices.push_back(part_of(group, args.dtype, i, 1));
    }
    if (matrices.empty()) return;
    std::ranges::stable_sort(matrices, std::greater(), [](const MatrixGroup& matrix) {
        const Shape shape(matrix.shape);
        return shape.m * shape.m * (shape.m + 3 * shape.n);
    });
    const size_t workspace = most_of_thread(
                     shapes,
                     [&](const auto&s) { return workspace_bytes(stream.device, args.dtype, s); }),
                 scratch = most_of_thread(
                     shapes, [&](const auto&s) { return scratch_bytes(stream, args.dtype, s); });
    stream.scratch_for<void>(scratch * static_cast<size_t>(omp_get_max_threads()));
    std::exception_ptr failure;
#pragma omp parallel
    {
        const auto thread = static_cast<size_t>(omp_get_thread_num());
        Stream own = stream;
        own.is_part = true;
        own.scratch = static_cast<char*>(stream.scratch) + thread * scratch;
        own.scratch_bytes = scratch;
#pragma omp for schedule(dynamic, 1)
        for (const MatrixGroup& matrix : matrices) try {
                Batch(own, args.dtype, matrix,
                      static_cast<char*>(args.workspace) + thread * workspace)
                    .run(coefficients);
            } catch (...) {
#pragma omp critical
                failure = std::current_exception();
            }
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace

size_t newton_schulz_workspace_bytes(const Device& device, DType dtype,
                                     std::span<const MatrixShape> shapes) {
    return most_of_all(device, shapes, [&](const MatrixShape& shape) {
        return workspace_bytes(device, dtype, shape);
    });
}

size_t newton_schulz_scratch_bytes(const Stream& stream, DType dtype,
                                   std::span<const MatrixShape> shapes) {
    return most_of_all(stream.device, shapes, [&](const MatrixShape& shape) {
        return scratch_bytes(stream, dtype, shape);
    });
}

void newton_schulz(Stream& stream, const NewtonSchulz& args) {
    const Profiled profiled(stream, cost_of(args));
    const NewtonSchulzCoefficients& coefficients = coefficients_of(args.coefficients);
    const bool on_cpu = !stream.device.is_cuda();
    if (on_cpu) take_small_ones(stream, args, coefficients);
    for (const MatrixGroup& group : args.groups) {
        if (on_cpu && is_small(group.shape)) continue;
        const int64_t batch = batch_of(stream.device, group.shape);
        for (int64_t first = 0; first < group.count; first += batch)
            Batch(stream, args.dtype,
                  part_of(group, args.dtype, first, std::min(batch, group.count - first)),
                  args.workspace)
                .run(coefficients);
    }
}

Cost cost_of(const NewtonSchulz& args) {
    double flops = 0, bytes = 0;
    for (const MatrixGroup& group : args.groups) {
        const auto m = static_cast<double>(std::min(group.shape.rows, group.shape.cols)),
                   n = static_cast<double>(std::max(group.shape.rows, group.shape.cols)),
                   count = static_cast<double>(group.count);
        bytes += count * 2 * m * n * static_cast<double>(size_of(args.dtype));
        for (const NewtonSchulzStep& step : coefficients_of(args.coefficients).steps)
            flops += count * (3 * m * m * n + (step.c != 0 ? m * m * m : 0));
    }
    return {"newton_schulz", bytes, flops};
}

}  // namespace train_gpt
