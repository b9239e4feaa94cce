// On the CPU, threads take tasks in turn: blocks of an expert's product, each computed by one thread
// with linear.h's products. The experts with the most rows come first, so that threads finish
// together even if one expert has half of all rows.
#include "kernels/experts/grouped_linear.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <omp.h>

#include "device/profile.h"
#include "kernels/experts/route.h"
#include "kernels/lanes.h"
#include "kernels/linear/column_sums.h"
#include "kernels/linear/gemm.h"

namespace train_gpt {

namespace {

using Library = KernelSettings::Gemm;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/// A task multiplies at most so many rows, or as many as own_gemm() packs at a time.
constexpr int64_t task_rows = 1024;
/// Rows of the products that oneDNN is asked for, so that it has few kinds to prepare. For the last
/// rows of an expert it is asked for the next power of two, and rows of zeros are added.
constexpr int64_t library_rows = 128, least_library_rows = 8;
/// Rows that a gradient of a weight sums at a time: as own_gemm() does, so that the bits are those
/// of a single product.
constexpr int64_t sum_rows = 384, least_sum_rows = 32;

/// While it lives, oneDNN prepares products for one thread, as they run inside a parallel region.
class OneThread {
  public:
    OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before_); }
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

  private:
    int before_;
};

int64_t rounded_up_rows(int64_t rows, int64_t least, int64_t most) {
    int64_t rounded = least;
    while (rounded < rows) rounded *= 2;
    return std::min(rounded, most);
}

/// The experts, those with the most rows first, and how many tasks come before each.
class TaskList {
  public:
    struct Task {
        int expert;
        int64_t first_row, rows;  // of the expert
        int64_t block;            // of its task
    };

    /// blocks(rows): the tasks of an expert with so many rows.
    template <class F>
    TaskList(const Tensor& offsets, F&& blocks) : offsets_(offsets.as<int32_t>()) {
        const auto E = static_cast<int>(offsets.numel() - 1);
        experts_ = E;
        std::iota(order_, order_ + E, 0);
        std::stable_sort(order_, order_ + E, [&](int a, int b) { return rows(a) > rows(b); });
        first_[0] = 0;
        for (int i = 0; i < E; ++i) first_[i + 1] = first_[i] + blocks(rows(order_[i]));
    }
    int64_t count() const { return first_[experts_]; }
    Task operator[](int64_t task) const {
        const auto at = std::upper_bound(first_, first_ + experts_ + 1, task) - first_ - 1;
        const int expert = order_[at];
        return {expert, offsets_[expert], rows(expert), task - first_[at]};
    }

  private:
    int64_t rows(int expert) const { return offsets_[expert + 1] - offsets_[expert]; }

    const int32_t* offsets_;
    int experts_ = 0;
    int order_[most_experts];
    int64_t first_[most_experts + 1];
};

/// A range that is cut into blocks of equal length, except for the last.
struct Blocks {
    int64_t extent, length;

    int64_t count() const { return ceil_div(extent, length); }
    int64_t first(int64_t block) const { return block * length; }
    int64_t size(int64_t block) const { return std::min(length, extent - first(block)); }
};

bool has_library(Library library, const GemmShape& shape) {
#ifdef TRAIN_GPT_ONEDNN
    return library != Library::own && onednn_supports(shape);
#else
    (void)library, (void)shape;
    return false;
#endif
}

/// How a layer is computed with the threads there are.
struct Method {
    Library library;
    DType dtype;
    int64_t E, R, N, K;
    int threads;

    Method(const Stream& stream, const GroupedLinearShape& s)
        : library(stream.settings.gemm),
          dtype(s.dtype),
          E(s.E),
          R(s.R),
          N(s.N),
          K(s.K),
          threads(omp_get_max_threads()) {}

    size_t element_bytes() const { return size_of(dtype); }

    /// out [R, n] = rows [R, k] ∘ w_e: forward (nt, n = N) or backward (nn, n = K).
    struct Rows {
        GemmOp op;
        int64_t n, k;
    };
    Rows rows_of(GemmOp op) const {
        return op == GemmOp::nt ? Rows{op, N, K} : Rows{op, K, N};
    }
    /// The product of a task's rows with columns of the weight.
    GemmShape row_shape(const Rows& of, int64_t rows, int64_t cols, bool bias, bool packed) const {
        return {.op = of.op,
                .in = dtype,
                .out = dtype,
                .bias = bias,
                .m = rows,
                .n = cols,
                .k = of.k,
                .packed = packed,
                .ldb = of.op == GemmOp::nt ? of.k : of.n,
                .ldc = of.n};
    }
    bool rows_by_library(const Rows& of) const {
        const OneThread one_thread;
        return has_library(library, row_shape(of, library_rows, row_blocks(of).length, false, true));
    }
    /// Columns of a task. A packed block of the weight stays in the second-level cache of a thread
    /// while rows pass over it; our own products have blocks of their own.
    Blocks row_blocks(const Rows& of) const {
        constexpr int64_t cache_bytes = 512 << 10, least = 64;
        const int64_t fitting = cache_bytes / (of.k * static_cast<int64_t>(element_bytes()));
        const int64_t most = library == Library::own ? 512 : 256;
        int64_t length = std::clamp(fitting / least * least, least, most);
        if (library == Library::own) length = most;
        return {of.n, std::min(length, of.n)};
    }
    GemmShape sum_shape(int64_t rows, int64_t n, int64_t k, bool accumulate) const {
        return {.op = GemmOp::tn,
                .in = dtype,
                .out = DType::fp32,
                .accumulate = accumulate,
                .m = n,
                .n = k,
                .k = rows,
                .lda = N,
                .ldb = K,
                .ldc = K};
    }
    /// Blocks of a weight's gradient: so many that the threads can share an expert.
    struct SumBlocks {
        Blocks n, k;
        int64_t count() const { return n.count() * k.count(); }
    };
    SumBlocks sum_blocks() const {
        constexpr int64_t most = 512, least = 128;
        SumBlocks blocks{{N, std::min(N, most)}, {K, std::min(K, most)}};
        while (blocks.count() < 4 * threads) {
            Blocks& larger = blocks.n.length >= blocks.k.length ? blocks.n : blocks.k;
            if (larger.length <= least) break;
            larger.length = (larger.length / 2 + 15) / 16 * 16;
        }
        return blocks;
    }
    bool sums_by_library() const {
        const OneThread one_thread;
        const SumBlocks blocks = sum_blocks();
        return has_library(library, sum_shape(sum_rows, blocks.n.length, blocks.k.length, false));
    }
};

/// A thread's part of the scratch memory.
class Pieces {
  public:
    explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}
    void* take(size_t bytes) {
        void* const piece = base_ ? base_ + used_ : nullptr;
        used_ += aligned(bytes);
        return piece;
    }
    size_t used() const { return used_; }

  private:
    char* base_;
    size_t used_ = 0;
};

#ifdef TRAIN_GPT_ONEDNN
/// Calls f for every shape of a product of `rows` to `most` rows.
template <class F>
void for_row_counts(int64_t least, int64_t most, F&& f) {
    for (int64_t rows = least;; rows = std::min(2 * rows, most)) {
        f(rows);
        if (rows == most) return;
    }
}
#endif

/// Scratch memory of products of rows, for one thread.
struct RowPieces {
    void *product, *packed, *in, *out;  // what a product needs; B; rows with zeros added; results
    size_t bytes, product_bytes = 0;

    RowPieces(void* base, const Method& method, const Method::Rows& of, bool bias) {
        const Blocks blocks = method.row_blocks(of);
        size_t packed_bytes = 0, in_bytes = 0, out_bytes = 0;
        for (const int64_t block : {int64_t{0}, blocks.count() - 1}) {
            const int64_t cols = blocks.size(block);
            product_bytes =
                std::max(product_bytes, own_gemm_scratch_bytes(method.row_shape(
                                            of, std::min(task_rows, method.R), cols, bias, false)));
#ifdef TRAIN_GPT_ONEDNN
            if (!method.rows_by_library(of)) continue;
            for_row_counts(least_library_rows, library_rows, [&](int64_t rows) {
                for (const bool packed : {false, true}) {
                    GemmShape shape = method.row_shape(of, rows, cols, bias, packed);
                    for (const int64_t ldc : {shape.ldc, int64_t{0}}) {
                        shape.ldc = ldc;
                        if (!onednn_supports(shape)) continue;
                        product_bytes = std::max(product_bytes, onednn_gemm_scratch_bytes(shape));
                        if (packed)
                            packed_bytes = std::max(packed_bytes, onednn_packed_bytes(shape));
                    }
                }
            });
            in_bytes = static_cast<size_t>(library_rows * of.k) * method.element_bytes();
            out_bytes = std::max(out_bytes, static_cast<size_t>(library_rows * cols) *
                                                method.element_bytes());
#endif
        }
        Pieces pieces(base);
        product = pieces.take(product_bytes);
        packed = pieces.take(packed_bytes);
        in = pieces.take(in_bytes);
        out = pieces.take(out_bytes);
        bytes = pieces.used();
    }
};

/// Scratch memory of the gradients of weights, for one thread.
struct SumPieces {
    void *product, *dy, *x;  // what a product needs; the last rows, with zeros added
    size_t bytes;

    SumPieces(void* base, const Method& method) {
        const Method::SumBlocks blocks = method.sum_blocks();
        size_t product_bytes = 0, dy_bytes = 0, x_bytes = 0;
        for (const int64_t n_block : {int64_t{0}, blocks.n.count() - 1}) {
            for (const int64_t k_block : {int64_t{0}, blocks.k.count() - 1}) {
                const int64_t n = blocks.n.size(n_block), k = blocks.k.size(k_block);
                product_bytes = std::max(
                    product_bytes, own_gemm_scratch_bytes(method.sum_shape(sum_rows, n, k, false)));
#ifdef TRAIN_GPT_ONEDNN
                if (!method.sums_by_library()) continue;
                for_row_counts(least_sum_rows, sum_rows, [&](int64_t rows) {
                    for (const bool accumulate : {false, true}) {
                        GemmShape shape = method.sum_shape(rows, n, k, accumulate);
                        product_bytes = std::max(product_bytes, onednn_gemm_scratch_bytes(shape));
                        shape.lda = shape.ldb = 0;
                        product_bytes = std::max(product_bytes, onednn_gemm_scratch_bytes(shape));
                    }
                });
                dy_bytes = std::max(dy_bytes,
                                    static_cast<size_t>(sum_rows * n) * method.element_bytes());
                x_bytes = std::max(x_bytes,
                                   static_cast<size_t>(sum_rows * k) * method.element_bytes());
#endif
            }
        }
        Pieces pieces(base);
        product = pieces.take(product_bytes);
        dy = pieces.take(dy_bytes);
        x = pieces.take(x_bytes);
        bytes = pieces.used();
    }
};

template <class Pieces, class... Arguments>
size_t bytes_for_one(const Arguments&... arguments) {
    const OneThread one_thread;
    return Pieces(nullptr, arguments...).bytes;
}

/// Copies [rows, cols] of a matrix, and adds rows of zeros up to `padded`.
template <class T>
void copy_padded(T* to, const T* from, int64_t ld, int64_t rows, int64_t cols, int64_t padded) {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * ld, cols, to + r * cols);
    std::fill_n(to + rows * cols, (padded - rows) * cols, T{});
}

/// The rows of x as the products read them: in scratch, if they have to be gathered.
template <class T>
const T* gathered(const Tensor& x, const Tensor& row_token, T* scratch) {
    if (!row_token) return x.as<T>();
    const int64_t R = row_token.numel(), K = x.cols();
    const int32_t* const token = row_token.as<int32_t>();
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < R; ++r) std::copy_n(x.as<T>() + token[r] * K, K, scratch + r * K);
    return scratch;
}

size_t gathered_bytes(const Method& method) {
    return aligned(static_cast<size_t>(method.R * method.K) * method.element_bytes());
}

template <class T>
struct RowProduct {
    const Method& method;
    Method::Rows of;
    T* out;
    const T *rows, *w, *bias;  // bias may be null
    bool by_library;

    /// Rows [first, first + count) and columns [col, col + cols) of expert e.
    void operator()(int e, int64_t first, int64_t count, int64_t col, int64_t cols,
                    const RowPieces& pieces) const {
        const T* const b = w + e * method.N * method.K + (of.op == GemmOp::nt ? col * of.k : col);
        const T* const addend = bias ? bias + e * of.n + col : nullptr;
        if (by_library && library_product(b, addend, first, count, col, cols, pieces)) return;
        own_gemm(method.row_shape(of, count, cols, bias != nullptr, false),
                 {out + first * of.n + col, rows + first * of.k, b, addend}, pieces.product);
    }

  private:
    bool library_product([[maybe_unused]] const T* b, [[maybe_unused]] const T* addend,
                         [[maybe_unused]] int64_t first, [[maybe_unused]] int64_t count,
                         [[maybe_unused]] int64_t col, [[maybe_unused]] int64_t cols,
                         [[maybe_unused]] const RowPieces& pieces) const {
#ifdef TRAIN_GPT_ONEDNN
        // Packing a block of the weight costs about as much as 60 rows that use it (linear.cpp).
        const bool packs =
            count >= 64 &&
            onednn_supports(method.row_shape(of, library_rows, cols, bias != nullptr, true));
        const void* packed = nullptr;
        GemmShape packed_shape;
        for (int64_t done = 0; done < count; done += library_rows) {
            const int64_t here = std::min(library_rows, count - done),
                          padded = rounded_up_rows(here, least_library_rows, library_rows);
            GemmShape shape = method.row_shape(of, padded, cols, bias != nullptr, packs);
            T* const to = out + (first + done) * of.n + col;
            const T* const from = rows + (first + done) * of.k;
            if (here != padded) shape.ldc = 0;
            if (!onednn_supports(shape)) return false;
            if (packs && (!packed || !onednn_packs_alike(packed_shape, shape))) {
                onednn_pack(shape, b, pieces.packed);
                packed = pieces.packed;
                packed_shape = shape;
            }
            const void* const right = packs ? packed : b;
            if (here == padded) {
                onednn_gemm(shape, {to, from, right, addend}, pieces.product);
                continue;
            }
            copy_padded(static_cast<T*>(pieces.in), from, of.k, here, of.k, padded);
            onednn_gemm(shape, {pieces.out, pieces.in, right, addend}, pieces.product);
            for (int64_t r = 0; r < here; ++r)
                std::copy_n(static_cast<const T*>(pieces.out) + r * cols, cols, to + r * of.n);
        }
        return true;
#else
        return false;
#endif
    }
};

template <class T>
void multiply_rows(const Stream& stream, const Method& method, const Tensor& out, const Tensor& in,
                   const Tensor& w, const Tensor& offsets, GemmOp op, const Tensor& row_token,
                   const Tensor& bias) {
    auto* const scratch =
        stream.scratch_for<char>(grouped_linear_scratch_bytes(
            stream, {method.dtype, method.E, method.R, method.N, method.K}));
    const Method::Rows of = method.rows_of(op);
    const RowProduct<T> product{method,
                                of,
                                out.as<T>(),
                                gathered(in, row_token, reinterpret_cast<T*>(scratch)),
                                w.as<T>(),
                                bias ? bias.as<T>() : nullptr,
                                method.rows_by_library(of)};
    const Blocks columns = method.row_blocks(of);
    const TaskList tasks(offsets, [&](int64_t rows) {
        return ceil_div(rows, task_rows) * columns.count();
    });
    const size_t thread_bytes = bytes_for_one<RowPieces>(method, of, bool{bias});
#pragma omp parallel
    {
        const RowPieces pieces(
            scratch + gathered_bytes(method) +
                static_cast<size_t>(omp_get_thread_num()) * thread_bytes,
            method, of, bool{bias});
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks.count(); ++i) {
            const TaskList::Task task = tasks[i];
            const Blocks ranges{task.rows, task_rows};
            const int64_t range = task.block / columns.count(), block = task.block % columns.count();
            product(task.expert, task.first_row + ranges.first(range), ranges.size(range),
                    columns.first(block), columns.size(block), pieces);
        }
    }
}

/// dw [n, k] of a block (+)= Σ over the expert's rows.
template <class T>
void sum_block(const Method& method, float* dw, const T* dy, const T* x, int64_t rows, int64_t n,
               int64_t k, bool accumulate, bool by_library, const SumPieces& pieces) {
    if (rows == 0 && !accumulate)
        for (int64_t i = 0; i < n; ++i) std::fill_n(dw + i * method.K, k, 0.0f);
    for (int64_t done = 0; done < rows; done += sum_rows) {
        const int64_t here = std::min(sum_rows, rows - done);
        GemmShape shape = method.sum_shape(here, n, k, accumulate || done > 0);
        GemmOperands operands{dw, dy + done * method.N, x + done * method.K};
        if (!by_library) {
            own_gemm(shape, operands, pieces.product);
            continue;
        }
#ifdef TRAIN_GPT_ONEDNN
        shape.k = rounded_up_rows(here, least_sum_rows, sum_rows);
        if (shape.k != here) {
            shape.lda = shape.ldb = 0;
            copy_padded(static_cast<T*>(pieces.dy), dy + done * method.N, method.N, here, n,
                        shape.k);
            copy_padded(static_cast<T*>(pieces.x), x + done * method.K, method.K, here, k, shape.k);
            operands.a = pieces.dy;
            operands.b = pieces.x;
        }
        onednn_gemm(shape, operands, pieces.product);
#endif
    }
}

/// dbias_e (+)= column sums, in the order of linear_backward_weight().
template <class T>
void sum_columns(const GradientSink& dbias, const T* dy, const Tensor& offsets, int64_t N) {
    const int64_t E = offsets.numel() - 1;
    const int32_t* const first = offsets.as<int32_t>();
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t e = 0; e < E; ++e) {
        for (int64_t col = 0; col < N; col += slab_cols) {
            const int64_t cols = std::min(slab_cols, N - col);
            alignas(64) float total[slab_cols] = {}, sums[slab_cols];
            for (int64_t row = first[e]; row < first[e + 1]; row += slab_rows) {
                sum_slab(row == first[e] ? total : sums, dy + row * N + col,
                         std::min(slab_rows, first[e + 1] - row), cols, N);
                if (row == first[e]) continue;
                for (int64_t j = 0; j < cols; ++j) total[j] += sums[j];
            }
            float* const out = static_cast<float*>(dbias.data) + e * N + col;
            for (int64_t j = 0; j < cols; ++j)
                out[j] = dbias.accumulate ? out[j] + total[j] : total[j];
        }
    }
}

template <class T>
void backward_weight(const Stream& stream, const Method& method,
                     const GroupedLinearBackwardWeight& args) {
    auto* const scratch =
        stream.scratch_for<char>(grouped_linear_scratch_bytes(
            stream, {method.dtype, method.E, method.R, method.N, method.K}));
    const T* const x = gathered(args.x, args.row_token, reinterpret_cast<T*>(scratch));
    const T* const dy = args.dy.as<T>();
    auto* const dw = static_cast<float*>(args.dw.data);
    const Method::SumBlocks blocks = method.sum_blocks();
    const bool by_library = method.sums_by_library();
    const TaskList tasks(args.offsets, [&](int64_t) { return blocks.count(); });
    const size_t thread_bytes = bytes_for_one<SumPieces>(method);
#pragma omp parallel
    {
        const SumPieces pieces(scratch + gathered_bytes(method) +
                                   static_cast<size_t>(omp_get_thread_num()) * thread_bytes,
                               method);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks.count(); ++i) {
            const TaskList::Task task = tasks[i];
            const int64_t n_block = task.block / blocks.k.count(),
                          k_block = task.block % blocks.k.count(), n = blocks.n.first(n_block),
                          k = blocks.k.first(k_block);
            sum_block(method, dw + (task.expert * method.N + n) * method.K + k,
                      dy + task.first_row * method.N + n, x + task.first_row * method.K + k,
                      task.rows, blocks.n.size(n_block), blocks.k.size(k_block),
                      args.dw.accumulate, by_library, pieces);
        }
    }
    if (args.dbias) sum_columns(args.dbias, dy, args.offsets, method.N);
}

[[maybe_unused]] bool are_experts(const Tensor& w, const Tensor& offsets, DType dtype, int64_t N,
                                  int64_t K) {
    const int64_t E = offsets.numel() - 1;
    return E >= 1 && E <= most_experts && w.dtype == dtype && w.cols() == K && w.rows() == E * N;
}

}  // namespace

void grouped_linear_forward(Stream& stream, const GroupedLinearForward& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t R = args.out.rows(), N = args.out.cols(), K = args.x.cols(),
                  E = args.offsets.numel() - 1;
    assert(are_experts(args.w, args.offsets, args.x.dtype, N, K) && args.out.dtype == args.x.dtype);
    assert(args.row_token ? args.row_token.numel() == R : args.x.rows() == R);
    assert(!args.bias || args.bias.numel() == E * N);
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_forward(stream, args));
    with_float_type(args.x.dtype, [&](auto type) {
        multiply_rows<decltype(type)>(stream, Method(stream, {args.x.dtype, E, R, N, K}), args.out,
                                      args.x, args.w, args.offsets, GemmOp::nt, args.row_token,
                                      args.bias);
    });
}

void grouped_linear_backward_input(Stream& stream, const GroupedLinearBackwardInput& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t R = args.dy.rows(), N = args.dy.cols(), K = args.dx.cols(),
                  E = args.offsets.numel() - 1;
    assert(are_experts(args.w, args.offsets, args.dy.dtype, N, K));
    assert(args.dx.dtype == args.dy.dtype && args.dx.rows() == R);
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_backward_input(stream, args));
    with_float_type(args.dy.dtype, [&](auto type) {
        multiply_rows<decltype(type)>(stream, Method(stream, {args.dy.dtype, E, R, N, K}), args.dx,
                                      args.dy, args.w, args.offsets, GemmOp::nn, {}, {});
    });
}

void grouped_linear_backward_weight(Stream& stream, const GroupedLinearBackwardWeight& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t R = args.dy.rows(), N = args.dy.cols(), K = args.x.cols(),
                  E = args.offsets.numel() - 1;
    assert(args.x.dtype == args.dy.dtype && args.dw.dtype == DType::fp32 && E <= most_experts);
    assert(args.row_token ? args.row_token.numel() == R : args.x.rows() == R);
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_backward_weight(stream, args));
    with_float_type(args.dy.dtype, [&](auto type) {
        backward_weight<decltype(type)>(stream, Method(stream, {args.dy.dtype, E, R, N, K}), args);
    });
}

size_t grouped_linear_scratch_bytes(const Stream& stream, const GroupedLinearShape& shape) {
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_scratch_bytes(shape));
    const Method method(stream, shape);
    size_t thread_bytes = bytes_for_one<SumPieces>(method);
    for (const GemmOp op : {GemmOp::nt, GemmOp::nn})
        for (const bool bias : {false, true})
            thread_bytes =
                std::max(thread_bytes, bytes_for_one<RowPieces>(method, method.rows_of(op), bias));
    return gathered_bytes(method) + static_cast<size_t>(method.threads) * thread_bytes;
}

namespace {

double grouped_flops(int64_t R, int64_t N, int64_t K) {
    return 2.0 * static_cast<double>(R) * static_cast<double>(N) * static_cast<double>(K);
}

}  // namespace

Cost cost_of(const GroupedLinearForward& a) {
    return {"grouped_linear_forward",
            bytes_of(a.out) + bytes_of(a.x) + bytes_of(a.w) + bytes_of(a.bias) +
                bytes_of(a.row_token),
            grouped_flops(a.out.rows(), a.out.cols(), a.x.cols())};
}

Cost cost_of(const GroupedLinearBackwardInput& a) {
    return {"grouped_linear_backward_input", bytes_of(a.dx) + bytes_of(a.dy) + bytes_of(a.w),
            grouped_flops(a.dy.rows(), a.dy.cols(), a.dx.cols())};
}

Cost cost_of(const GroupedLinearBackwardWeight& a) {
    const int64_t E = a.offsets.numel() - 1, N = a.dy.cols(), K = a.x.cols();
    return {"grouped_linear_backward_weight",
            bytes_of(a.x) + bytes_of(a.dy) + bytes_of(a.dw, E * N * K) + bytes_of(a.dbias, E * N) +
                bytes_of(a.row_token),
            grouped_flops(a.dy.rows(), N, K)};
}

}  // namespace train_gpt
