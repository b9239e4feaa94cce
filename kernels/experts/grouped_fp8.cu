// Products of experts in fp8 with mma.sync: blocks stay on the GPU and take tiles of 128×128 in
// turn, as those of grouped_tile.cu do. A slice of both operands has 128 codes of 128 rows, in as
// many bytes as 64 elements of bf16, and two codes lie where an element of bf16 would lie: ldmatrix
// loads the fragments of both alike. Both operands lie along the dimension that is summed over.
//
// Ada's tensor cores sum fp8 products with about 14 bits, as Hopper's wgmma does (Zhang et al.,
// SageAttention2, arXiv 2411.10958; DeepSeek-AI, arXiv 2412.19437, section 3.3.2). So the products
// of a slice are summed by themselves, and these sums are added in fp32. sm_90 and sm_100 would not
// need it: they have no mma.sync for fp8, and ptxas makes of it conversions, two products of fp16
// and additions in fp32.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/error.h"
#include "kernels/attention/tile.cuh"
#include "kernels/experts/group_tiles.cuh"
#include "kernels/experts/grouped_fp8.h"
#include "kernels/experts/grouped_fp8_rows.h"
#include "kernels/experts/grouped_ways.h"
#include "kernels/fp8_math.h"
#include "kernels/linear/fp8_layout.h"

namespace train_gpt::cuda {

namespace {

using tiles::Element;

constexpr int edge = 128, depth = 128, stages = 3, warp_edge = 64;
/// Elements of bf16 in a row of a slice.
constexpr int pairs = depth / 2;
using Slice = tiles::SwizzledTile<pairs>;
constexpr int operand_bytes = Slice::bytes(edge), stage_bytes = 2 * operand_bytes;
constexpr int threads = tiles::threads, warp_tiles = warp_edge / 16;
constexpr int band = 16;  // as in grouped_tile.cu

constexpr int codes_of_copy = 16, copies_of_row = depth / codes_of_copy,
              rows_at_once = threads / copies_of_row, copies = edge / rows_at_once;
static_assert(rows_at_once % 8 == 0);  // the swizzle repeats every 8 rows

using Sums = float[warp_tiles][2 * warp_tiles][4];

/// sum += a·b of 16×32 and 32×8 codes.
template <class Left>
__device__ __forceinline__ void multiply_codes(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
#if __CUDA_ARCH__ >= 890
    if constexpr (std::is_same_v<Left, E4M3>)
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// A slice is multiplied with 16 of the warp's columns at a time, since registers hold no second
/// sums for more. The left operand's fragments are loaded for each: shared memory is then read for
/// 5/8 of the time of the products on Ada (128 bytes and 1024 products a clock).
template <class Left>
__device__ __forceinline__ void multiply_stage(Sums& sums, uint32_t left, uint32_t right) {
#pragma unroll
    for (int column = 0; column < warp_tiles; ++column) {
        float of_slice[warp_tiles][2][4] = {};
#pragma unroll 1
        for (int step = 0; step < pairs / 16; ++step) {
            uint32_t a[warp_tiles][4], b[4];
#pragma unroll
            for (int m = 0; m < warp_tiles; ++m)
                tiles::load_fragment(a[m], Slice::submatrix(left, m, step));
            tiles::load_fragment(b, Slice::submatrix(right, column, step));
#pragma unroll
            for (int m = 0; m < warp_tiles; ++m) {
                multiply_codes<Left>(of_slice[m][0], a[m], b[0], b[1]);
                multiply_codes<Left>(of_slice[m][1], a[m], b[2], b[3]);
            }
        }
#pragma unroll
        for (int m = 0; m < warp_tiles; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[m][2 * column][i] += of_slice[m][0][i];
                sums[m][2 * column + 1][i] += of_slice[m][1][i];
            }
    }
}

/// out [R, n] = in [R, k]·w_eᵀ (+ bias_e) · *in_inverse · *w_inverse. w_e [n, k] begins at w + e ·
/// w_expert, and its rows are w_row apart.
template <class Out>
struct RowsArgs {
    Out* out;
    const uint8_t *in, *w;
    const Out* bias;  // may be null
    const float *in_inverse, *w_inverse;
    const int32_t *offsets, *row_token;  // row_token may be null
    int64_t w_expert, w_row;
    int E, n, k;
};

__device__ __forceinline__ void store(Element* to, int64_t stride, int rows, int columns, int lane,
                                      const Sums& sums) {
    tiles::store_rows<warp_edge>({to, stride, rows, columns}, lane, sums, 1.0f);
}
__device__ __forceinline__ void store(float* to, int64_t stride, int rows, int columns, int lane,
                                      const Sums& sums) {
    tiles::store_rows<warp_edge>({to, stride, rows, columns}, lane, sums, 1.0f, false);
}

template <class Left, class Out>
__global__ void __launch_bounds__(threads, 2) fp8_rows_kernel(RowsArgs<Out> a) {
    extern __shared__ __align__(128) unsigned char memory[];
    int* const rows_of_tile = reinterpret_cast<int*>(memory + stages * stage_bytes);
    int* const first_tiles = rows_of_tile + edge;
    const experts::RowTiles tiles(first_tiles, a.offsets, a.E, edge);
    const uint32_t shared = tiles::shared_address(memory);
    const int thread = tiles::thread_index(), warp = tiles::warp_index(),
              lane = tiles::lane_index(), warp_row = warp / 2 * warp_edge,
              warp_col = warp % 2 * warp_edge;
    const uint32_t left = tiles::lane_offset_down<pairs>(lane) + Slice::bytes(warp_row),
                   right = operand_bytes + tiles::lane_offset_right<pairs>(lane) +
                           Slice::bytes(warp_col);
    const int copy_row = thread / copies_of_row, copy_chunk = thread % copies_of_row;
    const uint32_t place = Slice::offset(copy_row, copy_chunk);
    const int slices = (a.k + depth - 1) / depth, blocks = (a.n + edge - 1) / edge;
    const int64_t count = int64_t{tiles.count()} * blocks;
    const float factor = *a.in_inverse * *a.w_inverse;
#pragma unroll 1
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
        const experts::RowTile at = tiles.find(index, blocks, band);
        const int column = static_cast<int>(at.block) * edge;
        // Rows beyond the last are copied from the last.
        const int own_row = at.first_row + min(thread, at.rows - 1);
        rows_of_tile[thread] = a.row_token ? a.row_token[own_row] : own_row;
        __syncthreads();

        const uint8_t* const w = a.w + int64_t{at.expert} * a.w_expert;
        const auto load = [&](int slice, uint32_t stage) {
            const int k = slice * depth + copy_chunk * codes_of_copy;
#pragma unroll
            for (int i = 0; i < copies; ++i) {
                const int row = copy_row + i * rows_at_once, n = column + row;
                const uint32_t to = stage + place + Slice::bytes(i * rows_at_once);
                const bool in_depth = k < a.k, valid = in_depth && n < a.n;
                tiles::copy_async(to, a.in + (in_depth ? int64_t{rows_of_tile[row]} * a.k + k : 0),
                                  in_depth);
                tiles::copy_async(to + operand_bytes, w + (valid ? n * a.w_row + k : 0), valid);
            }
        };
        Sums sums = {};
#pragma unroll
        for (int s = 0; s < stages - 1; ++s) {
            if (s < slices) load(s, shared + s * stage_bytes);
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        int stage = 0, next = stages - 1;
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            asm volatile("cp.async.wait_group %0;" ::"n"(stages - 2) : "memory");
            __syncthreads();
            // All warps have multiplied the slice before, whose stage the next copies overwrite.
            if (slice + stages - 1 < slices) load(slice + stages - 1, shared + next * stage_bytes);
            asm volatile("cp.async.commit_group;" ::: "memory");
            const uint32_t base = shared + stage * stage_bytes;
            if (warp_row < at.rows) multiply_stage<Left>(sums, base + left, base + right);
            stage = stage + 1 == stages ? 0 : stage + 1;
            next = next + 1 == stages ? 0 : next + 1;
        }
        __syncthreads();  // the next tile's copies overwrite the stages

        const int n = column + warp_col;
        const Out* const bias = a.bias ? a.bias + int64_t{at.expert} * a.n : nullptr;
#pragma unroll
        for (int c = 0; c < 2 * warp_tiles; ++c) {
            const int col = n + c * 8 + lane % 4 * 2;
            const bool adds = bias && col < a.n;
            const float low = adds ? to_float(bias[col]) : 0.0f,
                        high = adds ? to_float(bias[col + 1]) : 0.0f;
#pragma unroll
            for (int m = 0; m < warp_tiles; ++m) {
                float(&sum)[4] = sums[m][c];
                sum[0] = sum[0] * factor + low;
                sum[1] = sum[1] * factor + high;
                sum[2] = sum[2] * factor + low;
                sum[3] = sum[3] * factor + high;
            }
        }
        store(a.out + int64_t{at.first_row + warp_row} * a.n + n, a.n, at.rows - warp_row, a.n - n,
              lane, sums);
    }
}

constexpr int shared_bytes = stages * stage_bytes + (edge + most_experts + 1) * int{sizeof(int)};
static_assert(shared_bytes <= tiles::shared_bytes_limit);

template <class Kernel>
unsigned grid_for(const Stream& stream, Kernel* kernel, int64_t tile_count) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    int blocks = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads,
                                                             size_t{shared_bytes}));
    const int64_t multiprocessors =
        std::max(1, limits_of(stream).multiprocessors - stream.settings.reserved_sms);
    return static_cast<unsigned>(std::min(multiprocessors * std::max(blocks, 1), tile_count));
}

constexpr size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Scratch memory: what fp8_round() needs, reciprocals of scales, codes of rows and of weights.
struct Scratch {
    float* inverses;
    uint8_t *rows, *weights;

    Scratch(const Stream& stream, int64_t rows_codes, int64_t weight_codes)
        : Scratch(stream.scratch_for<char>(bytes(rows_codes, weight_codes)), rows_codes) {}
    static size_t bytes(int64_t rows_codes, int64_t weight_codes) {
        return begin() + padded(2 * fp8_inverse_stride * sizeof(float)) +
               padded(static_cast<size_t>(rows_codes)) + padded(static_cast<size_t>(weight_codes));
    }

  private:
    static size_t begin() { return padded(fp8_round_scratch_bytes()); }
    Scratch(char* memory, int64_t rows_codes)
        : inverses(reinterpret_cast<float*>(memory + begin())),
          rows(reinterpret_cast<uint8_t*>(inverses) +
               padded(2 * fp8_inverse_stride * sizeof(float))),
          weights(rows + padded(static_cast<size_t>(rows_codes))) {}
};

struct Product {
    Tensor out, in, w, offsets, row_token, bias;
    Fp8Format format;  // of the rows
    const ProductScales& scales;
    const Fp8Scaling& rows;
    const Fp8Matrix& rounded;  // of w, unless it is to be rounded
    bool by_inputs;            // w_e is read as [K, N]
};

template <class Left, class Out>
void launch(Stream& stream, const Fp8Rows& rows) {
    auto* const kernel = fp8_rows_kernel<Left, Out>;
    const RowsArgs<Out> args{.out = static_cast<Out*>(rows.out.data),
                             .in = static_cast<const uint8_t*>(rows.in.data),
                             .w = rows.w,
                             .bias = static_cast<const Out*>(rows.bias.data),
                             .in_inverse = rows.in_inverse,
                             .w_inverse = rows.w_inverse,
                             .offsets = static_cast<const int32_t*>(rows.offsets.data),
                             .row_token = static_cast<const int32_t*>(rows.row_token.data),
                             .w_expert = rows.w_expert,
                             .w_row = rows.w_row,
                             .E = static_cast<int>(rows.experts()),
                             .n = static_cast<int>(rows.n()),
                             .k = static_cast<int>(rows.k())};
    const int64_t tile_count =
        experts::most_row_tiles(rows.out.rows(), args.E, edge) * ceil_div<int64_t>(args.n, edge);
    kernel<<<grid_for(stream, kernel, tile_count), threads, shared_bytes, stream_of(stream)>>>(
        args);
    CUDA_CHECK_LAUNCH();
}

void mma_fp8_rows(Stream& stream, const Fp8Rows& rows) {
    with_element_type(rows.out.dtype, [&](auto type) {
        using Out = decltype(type);
        if (rows.format == Fp8Format::e4m3)
            launch<E4M3, Out>(stream, rows);
        else
            launch<E5M2, Out>(stream, rows);
    });
}

void multiply(Stream& stream, const Product& p) {
    require_fp8(stream);
    const int64_t E = p.offsets.numel() - 1, n = p.out.cols(), k = p.in.cols(), weights = E * n * k;
    const Scratch scratch(stream, p.in.numel(), p.rounded ? 0 : weights);
    const auto* const row_count = static_cast<const int32_t*>(p.offsets.data) + E;
    train_gpt::fp8_round(stream, {.codes = Tensor(scratch.rows, DType::uint8, {p.in.rows(), k}),
                                  .inverse = scratch.inverses,
                                  .x = p.in,
                                  .format = p.format,
                                  .scaling = p.rows,
                                  .row_count = p.row_token ? Tensor{}
                                                           : Tensor(const_cast<int32_t*>(row_count),
                                                                    DType::int32, {1})});
    Fp8Matrix w = p.rounded;
    if (!w) {
        // By experts: [E·N, K]; of the transpose, whose rows have the columns of all experts.
        const Tensor all = p.w.reshaped({p.w.rows(), p.w.cols()});
        (p.by_inputs ? w.transposed : w.codes) =
            Tensor(scratch.weights, DType::uint8,
                   {p.by_inputs ? all.cols() : all.rows(), p.by_inputs ? all.rows() : all.cols()});
        w.inverse = scratch.inverses + fp8_inverse_stride;
        train_gpt::fp8_round(stream, {.codes = w.codes,
                                      .transposed = w.transposed,
                                      .inverse = scratch.inverses + fp8_inverse_stride,
                                      .x = all,
                                      .format = Fp8Format::e4m3,
                                      .scaling = p.scales.w});
    }
    const Fp8Rows rows{
        .out = p.out,
        .bias = p.bias,
        .in = Tensor(scratch.rows, DType::uint8, {p.in.rows(), k}),
        .offsets = p.offsets,
        .row_token = p.row_token,
        .format = p.format,
        .w = static_cast<const uint8_t*>((p.by_inputs ? w.transposed : w.codes).data),
        .in_inverse = scratch.inverses,
        .w_inverse = w.inverse,
        .w_expert = p.by_inputs ? k : n * k,
        .w_row = p.by_inputs ? E * k : k};
    const char* const product = p.by_inputs   ? "fp8_backward_input"
                                : p.row_token ? "fp8_gathering"
                                              : "fp8_forward";
    stream.queue->kept<GroupedWays>().run(
        stream,
        concat(product, " E=", E, ",R=", p.out.rows(), ",N=", p.by_inputs ? k : n,
               ",K=", p.by_inputs ? n : k),
        true, edge,
        [&](GroupedWay way) {
            if (way != GroupedWay::mma)
                return way == GroupedWay::wgmma_128 && wgmma_fp8_rows(stream, rows);
            mma_fp8_rows(stream, rows);
            return true;
        },
        // sm_90 has no mma.sync for fp8.
        GroupedWay::wgmma_128);
}

}  // namespace

void grouped_linear_forward_fp8(Stream& stream, const GroupedLinearForward& args) {
    multiply(stream, {args.out, args.x, args.w.values, args.offsets, args.row_token, args.bias,
                      Fp8Format::e4m3, *args.w.scales, args.w.scales->x, args.w.rounded, false});
}

void grouped_linear_backward_input_fp8(Stream& stream, const GroupedLinearBackwardInput& args) {
    multiply(stream, {args.dx,
                      args.dy,
                      args.w.values,
                      args.offsets,
                      {},
                      {},
                      Fp8Format::e5m2,
                      *args.w.scales,
                      args.w.scales->dy,
                      args.w.rounded,
                      true});
}

size_t grouped_fp8_scratch_bytes(const GroupedLinearShape& shape) {
    return Scratch::bytes(shape.R * std::max(shape.N, shape.K),
                          shape.rounds_weights ? shape.E * shape.N * shape.K : 0);
}

}  // namespace train_gpt::cuda
