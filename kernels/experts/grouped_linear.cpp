// On the CPU, threads take tasks in turn: tiles of an expert's product, each computed by one thread
// with the products of panel_products.h or, where the processor or the settings do not allow them,
// of gemm.h. The experts with the most rows come first, so that threads finish together even if one
// expert has half of all rows.
#include "kernels/experts/grouped_linear.h"

#include <algorithm>
#include <numeric>

#include <omp.h>

#include "device/profile.h"
#include "kernels/experts/grouped_fp8.h"
#include "kernels/experts/panel_products.h"
#include "kernels/experts/route.h"
#include "kernels/lanes.h"
#include "kernels/linear/column_sums.h"
#include "kernels/linear/gemm.h"

namespace train_gpt {

namespace {

using Library = KernelSettings::Gemm;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/// A task's tile has at most so many rows and columns: its operands stay in the second-level cache,
/// and oneDNN has to copy the weight's part of it for few enough tiles.
constexpr int64_t tile_edge = 256;
/// Rows that a gradient of a weight sums at a time: as own_gemm() does, so that the bits are those
/// of a single product.
constexpr int64_t sum_rows = 384;
/// oneDNN prepares a product for every number of rows that are summed. So that there are few, the
/// last rows of an expert are summed apart, with rows of zeros added to make so many.
constexpr int64_t last_rows = 32;

/// A range that is cut into blocks of nearly equal length.
struct Blocks {
    int64_t extent, length;

    explicit Blocks(int64_t extent_)
        : extent(extent_),
          length(ceil_div(ceil_div(extent, ceil_div(extent, tile_edge)), 16) * 16) {}
    int64_t count() const { return ceil_div(extent, length); }
    int64_t first(int64_t block) const { return block * length; }
    int64_t size(int64_t block) const { return std::min(length, extent - first(block)); }
};

/// The experts, those with the most rows first, and how many tasks come before each.
class TaskList {
  public:
    struct Task {
        int expert;
        int64_t first_row, rows;  // of the expert
        int64_t index;            // among its tasks
    };

    /// of_rows(n): the tasks of an expert with n rows.
    template <class F>
    TaskList(const Tensor& offsets, F&& of_rows)
        : offsets_(offsets.as<int32_t>()), experts_(static_cast<int>(offsets.numel() - 1)) {
        std::iota(order_, order_ + experts_, 0);
        std::stable_sort(order_, order_ + experts_,
                         [&](int a, int b) { return rows(a) > rows(b); });
        first_[0] = 0;
        for (int i = 0; i < experts_; ++i) first_[i + 1] = first_[i] + of_rows(rows(order_[i]));
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
    int experts_;
    int order_[most_experts];
    int64_t first_[most_experts + 1];
};

/// One thread's products, by oneDNN or our own.
class ThreadProducts {
  public:
    /// Called inside a parallel region, or while an OneThread lives.
    ThreadProducts(Library library, void* scratch, size_t scratch_bytes)
        : library_(library), scratch_(scratch), scratch_bytes_(scratch_bytes) {}

    void operator()(const GemmShape& shape, const GemmOperands& operands) const {
#ifdef TRAIN_GPT_ONEDNN
        if (by_library(shape) && onednn_gemm_scratch_bytes(shape) <= scratch_bytes_)
            return onednn_gemm(shape, operands, scratch_);
#endif
        own_gemm(shape, operands, scratch_);
    }

    /// Whether the library computes a product, if it has the scratch memory.
    bool by_library(const GemmShape& shape) const { return by_library(library_, shape); }
    static bool by_library([[maybe_unused]] Library library,
                           [[maybe_unused]] const GemmShape& shape) {
#ifdef TRAIN_GPT_ONEDNN
        if (library == Library::own || !onednn_supports(shape)) return false;
        // Where B is read in place, rows that are a multiple of a page apart fall into the same
        // cache sets (linear.cpp).
        return shape.in != DType::fp32 || shape.op == GemmOp::nt || shape.ldb % 1024 != 0 ||
               onednn_copies(shape);
#else
        return false;
#endif
    }
    static size_t scratch_bytes([[maybe_unused]] Library library, const GemmShape& shape) {
        size_t bytes = own_gemm_scratch_bytes(shape);
#ifdef TRAIN_GPT_ONEDNN
        if (by_library(library, shape)) bytes = std::max(bytes, onednn_gemm_scratch_bytes(shape));
#endif
        return bytes;
    }

  private:
    Library library_;
    void* scratch_;
    size_t scratch_bytes_;
};

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

/// out [R, n] = in [R, k] ∘ w_e: forward (nt: n = N, k = K) or backward (nn: n = K, k = N).
struct RowShape {
    GemmOp op;
    DType dtype, out;
    int64_t n, k;

    RowShape(GemmOp op_, const GroupedLinearShape& layer, DType out_)
        : op(op_),
          dtype(layer.dtype),
          out(out_),
          n(op == GemmOp::nt ? layer.N : layer.K),
          k(op == GemmOp::nt ? layer.K : layer.N) {}

    GemmShape tile(int64_t rows, int64_t cols, bool bias) const {
        return {.op = op,
                .in = dtype,
                .out = out,
                .bias = bias,
                .m = rows,
                .n = cols,
                .k = k,
                .lda = k,
                .ldb = op == GemmOp::nt ? k : n,
                .ldc = n};
    }
};

/// dw [n, k] of a tile (+)= dyᵀ·x of some rows.
GemmShape sum_tile(const GroupedLinearShape& layer, int64_t rows, int64_t n, int64_t k,
                   bool accumulate) {
    return {.op = GemmOp::tn,
            .in = layer.dtype,
            .out = DType::fp32,
            .accumulate = accumulate,
            .m = n,
            .n = k,
            .k = rows,
            .lda = layer.N,
            .ldb = layer.K,
            .ldc = layer.K};
}

#if TRAIN_GPT_PANELS
/// Whether products are those of panel_products.h; `depth`: the number of products that are summed.
bool by_panels(Library library, DType dtype, int64_t depth) {
    // Two bf16 are read at a time.
    return library == Library::automatic && panels::supports(dtype) &&
           (dtype == DType::fp32 || depth % 2 == 0);
}
constexpr size_t panel_bytes =
    aligned(std::max(panels::row_product_bytes, panels::sum_product_bytes));
#else
bool by_panels(Library, DType, int64_t) { return false; }
constexpr size_t panel_bytes = 0;
#endif

/// What products of rows and of gradients need for a thread.
size_t product_bytes(Library library, const GroupedLinearShape& layer) {
    const OneThread one_thread;
    size_t bytes = 0;
    const auto cover = [&](const GemmShape& shape) {
        bytes = std::max(bytes, ThreadProducts::scratch_bytes(library, shape));
    };
    for (const GemmOp op : {GemmOp::nt, GemmOp::nn})
        for (const DType out : {layer.dtype, DType::fp32}) {
            const RowShape shape(op, layer, out);
            for (const int64_t rows : {int64_t{1}, int64_t{17}, tile_edge})
                for (const bool bias : {false, true})
                    cover(shape.tile(rows, Blocks(shape.n).size(0), bias && out == layer.dtype));
        }
    for (const int64_t rows : {last_rows, sum_rows})
        for (const bool accumulate : {false, true})
            cover(sum_tile(layer, rows, Blocks(layer.N).size(0), Blocks(layer.K).size(0),
                           accumulate));
    return library == Library::automatic ? std::max(aligned(bytes), panel_bytes) : aligned(bytes);
}

/// The last rows of an expert's tile of dy, and of x.
size_t last_rows_bytes(const GroupedLinearShape& layer) {
    return aligned(static_cast<size_t>(last_rows * tile_edge) * size_of(layer.dtype));
}
/// x is gathered in the forward pass and for the gradients of weights.
size_t gathered_bytes(Library library, const GroupedLinearShape& layer) {
    if (by_panels(library, layer.dtype, layer.K) && by_panels(library, layer.dtype, 2)) return 0;
    return aligned(static_cast<size_t>(layer.R * layer.K) * size_of(layer.dtype));
}

size_t plain_scratch_bytes(const Stream& stream, const GroupedLinearShape& shape);

/// The stream's scratch memory: gathered rows, then for each thread its product's and last rows.
struct Scratch {
    char* gathered;
    char* threads;
    size_t product, last;

    Scratch(const Stream& stream, const GroupedLinearShape& layer)
        : gathered(stream.scratch_for<char>(plain_scratch_bytes(stream, layer))),
          threads(gathered + gathered_bytes(stream.settings.gemm, layer)),
          product(product_bytes(stream.settings.gemm, layer)),
          last(last_rows_bytes(layer)) {}

    char* own() const {
        return threads + static_cast<size_t>(omp_get_thread_num()) * (product + 2 * last);
    }
};

/// The rows of x as the products read them: in scratch, if they have to be gathered.
template <class T>
const T* gathered(const Tensor& x, const Tensor& row_token, const Tensor& offsets, char* scratch) {
    if (!row_token) return x.as<T>();
    const int64_t R = offsets.as<int32_t>()[offsets.numel() - 1], K = x.cols();
    const int32_t* const token = row_token.as<int32_t>();
    auto* const rows = reinterpret_cast<T*>(scratch);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < R; ++r) std::copy_n(x.as<T>() + token[r] * K, K, rows + r * K);
    return rows;
}

struct RowOperands {
    Tensor out, in, w, offsets, row_token = {}, bias = {};
};

#if TRAIN_GPT_PANELS
/// The columns of a task: all, unless there are too few experts and rows for all threads. Threads
/// finish at about the same time if each takes 16 tasks. The number of columns changes no bit.
int64_t task_columns(const Tensor& offsets, int64_t n) {
    const auto* const first = offsets.as<int32_t>();
    int64_t tiles = 0;
    for (int64_t e = 0; e + 1 < offsets.numel(); ++e)
        tiles += ceil_div(first[e + 1] - first[e], panels::max_rows);
    const int64_t pieces = ceil_div(16 * omp_get_max_threads(), std::max<int64_t>(tiles, 1));
    return ceil_div(ceil_div(n, pieces), panels::group_columns) * panels::group_columns;
}

template <class T>
void multiply_panels(const Scratch& scratch, const GroupedLinearShape& layer, GemmOp op,
                     const RowOperands& args) {
    const RowShape shape(op, layer, layer.dtype);
    const int64_t columns = task_columns(args.offsets, shape.n),
                  pieces = ceil_div(shape.n, columns);
    const int32_t* const token = args.row_token ? args.row_token.as<int32_t>() : nullptr;
    const T* const in = args.in.as<T>();
    const TaskList tasks(args.offsets,
                         [&](int64_t rows) { return ceil_div(rows, panels::max_rows) * pieces; });
    // The first columns of the weight for task i.
    const auto weight = [&](int64_t i) {
        const TaskList::Task task = tasks[i];
        const int64_t col = task.index / ceil_div(task.rows, panels::max_rows) * columns;
        return args.w.as<T>() + task.expert * layer.N * layer.K +
               (op == GemmOp::nt ? col * shape.k : col);
    };
    const int64_t threads = omp_get_max_threads();
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks.count(); ++i) {
        const TaskList::Task task = tasks[i];
        const int64_t tiles = ceil_div(task.rows, panels::max_rows),
                      col = task.index / tiles * columns;
        // Tiles of nearly equal height.
        const int64_t height = ceil_div(ceil_div(task.rows, tiles), panels::tile_rows) *
                               panels::tile_rows,
                      begin = task.index % tiles * height,
                      rows = std::min(height, task.rows - begin), row = task.first_row + begin;
        if (rows <= 0) continue;
        const panels::RowProduct<T> product{
            .out = args.out.as<T>() + row * shape.n + col,
            .b = weight(i),
            .bias = args.bias ? args.bias.as<T>() + task.expert * shape.n + col : nullptr,
            .next_b = i + threads < tasks.count() ? weight(i + threads) : nullptr,
            .rows = rows,
            .cols = std::min(columns, shape.n - col),
            .words = shape.k / panels::EngineOf<T>::depth,
            .ldb = op == GemmOp::nt ? shape.k : shape.n,
            .ldo = shape.n,
            .transposed = op == GemmOp::nt};
        panels::multiply_rows(
            product, [&](int64_t r) { return in + (token ? token[row + r] : row + r) * shape.k; },
            scratch.own());
    }
}

template <class T>
void sum_panels(const Scratch& scratch, const GroupedLinearShape& layer,
                const GroupedLinearBackwardWeight& args) {
    const int64_t of_n = ceil_div(layer.N, panels::most_n),
                  of_k = ceil_div(layer.K, panels::most_k);
    const int32_t* const token = args.row_token ? args.row_token.as<int32_t>() : nullptr;
    const T *const x = args.x.as<T>(), *const dy = args.dy.as<T>();
    auto* const dw = static_cast<float*>(args.dw.data);
    // Gradients of many experts leave the caches before they are read.
    constexpr int64_t cached = 8 << 20;
    const bool stream = !args.dw.accumulate && layer.E * layer.N * layer.K > cached &&
                        layer.K % panels::lanes == 0 && reinterpret_cast<uintptr_t>(dw) % 64 == 0;
    const TaskList tasks(args.offsets, [&](int64_t) { return of_n * of_k; });
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks.count(); ++i) {
        const TaskList::Task task = tasks[i];
        const int64_t n = task.index / of_k * panels::most_n,
                      k = task.index % of_k * panels::most_k;
        const panels::SumProduct p{dw + (task.expert * layer.N + n) * layer.K + k,
                                   task.rows,
                                   std::min(panels::most_n, layer.N - n),
                                   std::min(panels::most_k, layer.K - k),
                                   layer.K,
                                   args.dw.accumulate,
                                   stream};
        if (task.rows == 0 && !args.dw.accumulate)
            for (int64_t j = 0; j < p.n; ++j) std::fill_n(p.dw + j * p.ld, p.k, 0.0f);
        const int64_t first = task.first_row;
        panels::add_products<T>(
            p, [&](int64_t r) { return dy + (first + r) * layer.N + n; },
            [&](int64_t r) { return x + (token ? token[first + r] : first + r) * layer.K + k; },
            scratch.own());
    }
}
#endif

template <class T>
void multiply_rows(const Stream& stream, const GroupedLinearShape& layer, GemmOp op,
                   const RowOperands& args) {
    const Scratch scratch(stream, layer);
    const RowShape shape(op, layer, args.out.dtype);
    const auto out_at = [&](int64_t element) {
        return static_cast<char*>(args.out.data) +
               element * static_cast<int64_t>(size_of(args.out.dtype));
    };
#if TRAIN_GPT_PANELS
    if (args.out.dtype == layer.dtype && by_panels(stream.settings.gemm, layer.dtype, shape.k))
        return multiply_panels<T>(scratch, layer, op, args);
#endif
    const T* const in = gathered<T>(args.in, args.row_token, args.offsets, scratch.gathered);
    const Blocks columns(shape.n);
    const TaskList tasks(args.offsets,
                         [&](int64_t rows) { return ceil_div(rows, tile_edge) * columns.count(); });
#pragma omp parallel
    {
        const ThreadProducts product(stream.settings.gemm, scratch.own(), scratch.product);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks.count(); ++i) {
            // Tiles with the same columns of the weight follow each other.
            const TaskList::Task task = tasks[i];
            const int64_t tiles = ceil_div(task.rows, tile_edge), block = task.index / tiles,
                          col = columns.first(block), begin = task.index % tiles * tile_edge,
                          rows = std::min(tile_edge, task.rows - begin),
                          row = task.first_row + begin;
            const T* const w = args.w.as<T>() + task.expert * layer.N * layer.K;
            product(shape.tile(rows, columns.size(block), bool{args.bias}),
                    {out_at(row * shape.n + col), in + row * shape.k,
                     w + (op == GemmOp::nt ? col * shape.k : col),
                     args.bias ? args.bias.as<T>() + task.expert * shape.n + col : nullptr});
        }
    }
}

/// Copies [rows, cols] of a matrix, and adds rows of zeros.
template <class T>
void copy_last_rows(T* to, const T* from, int64_t ld, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * ld, cols, to + r * cols);
    std::fill_n(to + rows * cols, (last_rows - rows) * cols, T{});
}

/// A tile [n, k] of dw_e, and the expert's rows of dy and x from the tile's columns on.
template <class T>
struct SumTile {
    float* dw;
    const T *dy, *x;
    int64_t rows, n, k;
    bool accumulate;
};

/// A thread's memory for the last rows of an expert's tile of dy, and of x (last_rows_bytes).
template <class T>
struct LastRows {
    T *dy, *x;
};

template <class T>
void sum_rows_of(const SumTile<T>& tile, const GroupedLinearShape& layer,
                 const ThreadProducts& product, const LastRows<T>& last) {
    if (tile.rows == 0 && !tile.accumulate)
        for (int64_t i = 0; i < tile.n; ++i) std::fill_n(tile.dw + i * layer.K, tile.k, 0.0f);
    for (int64_t done = 0; done < tile.rows;) {
        int64_t here = std::min(sum_rows, tile.rows - done);
        const T *dy = tile.dy + done * layer.N, *x = tile.x + done * layer.K;
        GemmShape shape = sum_tile(layer, sum_rows, tile.n, tile.k, tile.accumulate || done > 0);
        const bool rounds = product.by_library(shape);
        shape.k = here;
        if (rounds && here < last_rows) {
            copy_last_rows(last.dy, dy, layer.N, here, tile.n);
            copy_last_rows(last.x, x, layer.K, here, tile.k);
            dy = last.dy, x = last.x;
            shape.k = last_rows;
            shape.lda = shape.ldb = 0;
        } else if (rounds) {
            shape.k = here = here / last_rows * last_rows;
        }
        product(shape, {tile.dw, dy, x});
        done += here;
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
void backward_weight(const Stream& stream, const GroupedLinearShape& layer,
                     const GroupedLinearBackwardWeight& args) {
    const Scratch scratch(stream, layer);
#if TRAIN_GPT_PANELS
    if (by_panels(stream.settings.gemm, layer.dtype, 2)) {
        sum_panels<T>(scratch, layer, args);
        if (args.dbias) sum_columns(args.dbias, args.dy.as<T>(), args.offsets, layer.N);
        return;
    }
#endif
    const T* const x = gathered<T>(args.x, args.row_token, args.offsets, scratch.gathered);
    const T* const dy = args.dy.as<T>();
    const Blocks of_n(layer.N), of_k(layer.K);
    const TaskList tasks(args.offsets, [&](int64_t) { return of_n.count() * of_k.count(); });
#pragma omp parallel
    {
        char* const own = scratch.own();
        const ThreadProducts product(stream.settings.gemm, own, scratch.product);
        const LastRows<T> last{reinterpret_cast<T*>(own + scratch.product),
                               reinterpret_cast<T*>(own + scratch.product + scratch.last)};
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks.count(); ++i) {
            const TaskList::Task task = tasks[i];
            const int64_t n_block = task.index / of_k.count(), k_block = task.index % of_k.count(),
                          n = of_n.first(n_block), k = of_k.first(k_block);
            const SumTile<T> tile{
                static_cast<float*>(args.dw.data) + (task.expert * layer.N + n) * layer.K + k,
                dy + task.first_row * layer.N + n,
                x + task.first_row * layer.K + k,
                task.rows,
                of_n.size(n_block),
                of_k.size(k_block),
                args.dw.accumulate};
            sum_rows_of(tile, layer, product, last);
        }
    }
    if (args.dbias) sum_columns(args.dbias, dy, args.offsets, layer.N);
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
    assert(are_experts(args.w.values, args.offsets, args.x.dtype, N, K));
    assert(args.out.dtype == args.x.dtype || (args.out.dtype == DType::fp32 && !args.bias));
    assert(args.row_token ? args.row_token.numel() == R : args.x.rows() == R);
    assert(!args.bias || args.bias.numel() == E * N);
    if (args.w.scales) return grouped_linear_forward_fp8(stream, args);
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_forward(stream, args));
    with_float_type(args.x.dtype, [&](auto type) {
        multiply_rows<decltype(type)>(
            stream, {args.x.dtype, E, R, N, K}, GemmOp::nt,
            {args.out, args.x, args.w.values, args.offsets, args.row_token, args.bias});
    });
}

void grouped_linear_backward_input(Stream& stream, const GroupedLinearBackwardInput& args) {
    const Profiled profiled(stream, cost_of(args));
    const int64_t R = args.dy.rows(), N = args.dy.cols(), K = args.dx.cols(),
                  E = args.offsets.numel() - 1;
    assert(are_experts(args.w.values, args.offsets, args.dy.dtype, N, K));
    assert(args.dx.dtype == args.dy.dtype || args.dx.dtype == DType::fp32);
    assert(args.dx.rows() == R);
    if (args.w.scales) return grouped_linear_backward_input_fp8(stream, args);
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_backward_input(stream, args));
    with_float_type(args.dy.dtype, [&](auto type) {
        multiply_rows<decltype(type)>(stream, {args.dy.dtype, E, R, N, K}, GemmOp::nn,
                                      {args.dx, args.dy, args.w.values, args.offsets});
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
        backward_weight<decltype(type)>(stream, {args.dy.dtype, E, R, N, K}, args);
    });
}

namespace {

size_t plain_scratch_bytes(const Stream& stream, const GroupedLinearShape& shape) {
    TRAIN_GPT_ON_CUDA(stream.device, grouped_linear_scratch_bytes(shape));
    const auto threads = static_cast<size_t>(omp_get_max_threads());
    return gathered_bytes(stream.settings.gemm, shape) +
           threads * (product_bytes(stream.settings.gemm, shape) + 2 * last_rows_bytes(shape));
}

}  // namespace

size_t grouped_linear_scratch_bytes(const Stream& stream, const GroupedLinearShape& shape) {
    const size_t plain = plain_scratch_bytes(stream, shape);
    if (!stream.settings.fp8) return plain;
    const size_t fp8 = grouped_fp8_scratch_bytes(stream, shape);
    // On the CPU, a product of codes runs in what they leave.
    return stream.device.is_cuda() ? std::max(plain, fp8) : plain + fp8;
}

namespace {

double grouped_flops(int64_t R, int64_t N, int64_t K) {
    return 2.0 * static_cast<double>(R) * static_cast<double>(N) * static_cast<double>(K);
}

}  // namespace

Cost cost_of(const GroupedLinearForward& a) {
    return {"grouped_linear_forward",
            bytes_of(a.out) + bytes_of(a.x) + bytes_of(a.w.values) + bytes_of(a.bias) +
                bytes_of(a.row_token),
            grouped_flops(a.out.rows(), a.out.cols(), a.x.cols())};
}

Cost cost_of(const GroupedLinearBackwardInput& a) {
    return {"grouped_linear_backward_input", bytes_of(a.dx) + bytes_of(a.dy) + bytes_of(a.w.values),
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
