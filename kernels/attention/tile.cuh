// Shared by the tensor-core kernels of attention: tile sizes, swizzled tiles of heads in shared
// memory, the matrix products of a warp, and the order of the blocks.
//
// A block holds block_m rows of one operand (queries, or keys in the pass for dk and dv) and
// streams the rows of the other past it, block_n at a time. Each warp owns warp_m of the held rows
// and processes all streamed ones, so scores stay in its registers: the accumulator fragments of
// the first product have the layout of the left operand of the second.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numbers>

#include "device/cuda_queue.h"
#include "kernels/attention/attention.h"
#include "kernels/cuda_block.cuh"

namespace train_gpt::cuda::tiles {

using Element = __nv_bfloat16;

constexpr int warps = 4, threads = warps * warp_size;
constexpr unsigned all_lanes = 0xffffffffu;

/// The tile sizes of a kernel for a head size, which is padded to the next of 16, 32, 64, 96, 128.
struct Tiling {
    int warp_m;   // held rows per warp
    int block_n;  // rows of a streamed tile; two stages of such tiles are in shared memory
    // How many 16-row pieces of the held operands a warp keeps in registers; it reads the others
    // again.
    int in_registers;
    int blocks_per_sm;  // per multiprocessor; limits the registers of a thread to 512 / blocks

    constexpr int block_m() const { return warps * warp_m; }
};

/// 32 rows per warp if there are enough registers: each fragment read from shared memory then feeds
/// two products. With 16 rows, a 64×64 step takes as long to read as to multiply: 128 bytes per
/// clock compared with the rate of mma.sync on Hopper. Registers per thread for 32 rows of D = 64:
/// out 64, scores 64, queries 32. For a larger D the queries stay in shared memory.
constexpr Tiling forward_tiling(int head) {
    return head <= 64 ? Tiling{32, 64, 2, 2} : Tiling{32, 32, 0, 2};
}

/// The pass for dq holds queries and dout. Scores are computed and used 16 keys at a time, so they
/// need few registers. D = 64, 32 rows: dq 64, queries and dout 64, scores and their gradients 32.
constexpr Tiling backward_queries_tiling(int head) {
    return head <= 64 ? Tiling{32, 64, 4, 2} : Tiling{16, 64, 2, 2};
}

/// The pass for dk and dv holds keys and values and has two sums. D = 64, 32 rows: dk and dv 128,
/// keys and values 64, scores and their gradients 32, which together take all registers; with a
/// soft-cap, half of the values are read again instead.
constexpr Tiling backward_keys_tiling(int head, bool capped = false) {
    return head <= 64   ? Tiling{32, 64, capped ? 3 : 4, 2}
           : head <= 96 ? Tiling{16, 64, 2, 2}
                        : Tiling{16, 64, 1, 2};
}

/// Reads the index again each time. That costs less than the registers that would otherwise hold
/// values computed from it throughout the loops.
__device__ __forceinline__ int thread_index() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    // The remainder shows the compiler that the index is not negative, so that a division becomes a
    // shift.
    return static_cast<int>(index % threads);
}
__device__ __forceinline__ int warp_index() {
    return static_cast<int>(threadIdx.x % threads) / warp_size;
}
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % warp_size); }

/// The shared memory of a block, with opt-in, on the smallest supported GPUs (sm_86, sm_89).
constexpr int shared_bytes_limit = 99 << 10;

// ------------------------------------------------------------------------------------------- tiles

/// Rows of `head` elements in shared memory, swizzled: ldmatrix reads 8 rows of 16 bytes at a time,
/// and the 16-byte chunks of a row are permuted, by flipping bits of the chunk number, so that
/// these 8 chunks lie in different banks. `period`: the number of chunks that are permuted among
/// themselves.
template <int head>
struct SwizzledTile {
    static_assert(head % 16 == 0);
    static constexpr int row_bytes = head * int{sizeof(Element)}, chunks = row_bytes / 16;
    static constexpr int period = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;

    static constexpr int bytes(int rows) { return rows * row_bytes; }

    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        return row * row_bytes + (chunk ^ (row / (8 / period) % period)) * 16;
    }
    /// Turns an address in the 16×16 submatrix at the origin of a tile into the corresponding
    /// address in the 16×16 submatrix (row16, column16). Tiles begin at multiples of 128 bytes.
    static __device__ __forceinline__ uint32_t submatrix(uint32_t address, int row16,
                                                         int column16) {
        return (address ^ (column16 * 2 % period * 16)) + column16 * 2 / period * period * 16 +
               row16 * bytes(16);
    }
};

__device__ __forceinline__ uint32_t shared_address(const void* memory) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
}

/// Reads 16 bytes.
template <class T>
__device__ __forceinline__ T load_shared(uint32_t from) {
    static_assert(sizeof(T) == 16);
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(from)
                 : "memory");
    T result;
    __builtin_memcpy(&result, &bits, sizeof bits);
    return result;
}

/// Starts copying 16 bytes to shared memory or, if not `valid`, clearing them there.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Starts copying `rows` rows of a head, beginning with row `first`; writes zeros for rows from
/// `end` on and for elements from D on.
template <int head, int rows>
__device__ __forceinline__ void load_tile(uint32_t tile, const Element* from, int64_t stride,
                                          int first, int end, int D) {
    using To = SwizzledTile<head>;
    constexpr int rows_at_once = threads / To::period;
    // The swizzle repeats every 8 rows.
    static_assert(rows % rows_at_once == 0 && rows_at_once % 8 == 0);
    const int thread = thread_index(), row = thread / To::period, chunk = thread % To::period;
    const uint32_t to = tile + To::offset(row, chunk);
    const Element* mine = from + (first + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < rows; i += rows_at_once, mine += rows_at_once * stride) {
#pragma unroll
        for (int j = 0; j < To::chunks; j += To::period) {
            const bool valid = first + row + i < end && (chunk + j) * 8 < D;
            copy_async(to + To::bytes(i) + j * 16, valid ? mine + j * 8 : from, valid);
        }
    }
}

/// The rows of a head: row 0, and the elements from one row to the next.
struct RowsFrom {
    const Element* data;
    int64_t stride;
};

/// A stage is a tile of `first` and behind it one of `second`: keys and values, or queries and
/// dout.
template <int head, int rows>
__device__ __forceinline__ void load_stage(uint32_t stage, const RowsFrom& first,
                                           const RowsFrom& second, int row, int end, int D) {
    load_tile<head, rows>(stage, first.data, first.stride, row, end, D);
    load_tile<head, rows>(stage + SwizzledTile<head>::bytes(rows), second.data, second.stride, row,
                          end, D);
}

// ---------------------------------------------------------------------------------------- products
// mma.sync.m16n8k16: of an accumulator fragment, lane l holds columns 2·(l % 4) and 2·(l % 4) + 1
// in rows l / 4 and l / 4 + 8.

__device__ __forceinline__ void load_fragment(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_fragment_transposed(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t packed(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    __builtin_memcpy(&bits, &pair, sizeof bits);
    return bits;
}
/// 2^x, to 2 ulp.
__device__ __forceinline__ float power_of_2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// tanh x, with an absolute error below 10⁻⁶.
__device__ __forceinline__ float tanh_of(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(reciprocal)
        : "f"(1.0f + power_of_2(x * (2 * std::numbers::log2e_v<float>))));
    return 1.0f - 2.0f * reciprocal;
}

/// A score's soft-cap, of products q·k that are not scaled yet. Kernels without one get zeros.
struct ScoreCap {
    float to_tanh = 0, from_tanh = 0;  // scale / softcap and its reciprocal

    explicit ScoreCap(const AttentionShape& shape) {
        if (shape.softcap == 0) return;
        to_tanh = shape.scale / shape.softcap;
        from_tanh = shape.softcap / shape.scale;
    }
};

/// A lane's ldmatrix offset in a 16×16 submatrix. Here its four 8×8 matrices come in the order
/// down, then right: for a left operand, and for a right operand that is loaded transposed.
template <int head>
__device__ __forceinline__ uint32_t lane_offset_down(int lane) {
    return SwizzledTile<head>::offset(lane % 16, lane / 16);
}
/// The same in the order right, then down: for a right operand whose columns are the rows of the
/// tile.
template <int head>
__device__ __forceinline__ uint32_t lane_offset_right(int lane) {
    return SwizzledTile<head>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

/// The warp's rows of a held operand, in 16-row pieces, of which the first `in_registers` are in
/// registers.
template <int head, int warp_m, int in_registers>
class OperandFragments {
  public:
    static constexpr int row_tiles = warp_m / 16, depth = head / 16,
                         kept = std::clamp(in_registers, 0, row_tiles);

    /// The tile must have arrived in shared memory.
    __device__ __forceinline__ OperandFragments(uint32_t tile, int warp, int lane)
        : from_(tile + SwizzledTile<head>::bytes(warp * warp_m) + lane_offset_down<head>(lane)) {
#pragma unroll
        for (int k = 0; k < depth; ++k)
#pragma unroll
            for (int m = 0; m < kept; ++m)
                load_fragment(fragments_[k][m], SwizzledTile<head>::submatrix(from_, m, k));
    }
    /// Columns 16·k to 16·k + 15.
    __device__ __forceinline__ void get(uint32_t (&to)[row_tiles][4], int k) const {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
            if (m >= kept) {
                load_fragment(to[m], SwizzledTile<head>::submatrix(from_, m, k));
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) to[m][i] = fragments_[k][m][i];
        }
    }

  private:
    uint32_t from_;
    uint32_t fragments_[depth][std::max(kept, 1)][4];
};

/// scores[m][n] += left · tileᵀ, for 8·columns rows of the tile, beginning with the 16 rows that
/// `from` points into. `from` contains lane_offset_right.
template <int head, int row_tiles, int columns, class Fragments>
__device__ __forceinline__ void multiply(float (&scores)[row_tiles][columns][4],
                                         const Fragments& left, uint32_t from) {
    static_assert(columns % 2 == 0);
#pragma unroll
    for (int k = 0; k < head / 16; ++k) {
        uint32_t a[row_tiles][4];
        left.get(a, k);
#pragma unroll
        for (int n = 0; n < columns; n += 2) {
            uint32_t b[4];
            load_fragment(b, SwizzledTile<head>::submatrix(from, n / 2, k));
#pragma unroll
            for (int m = 0; m < row_tiles; ++m) {
                multiply_add(scores[m][n], a[m], b[0], b[1]);
                multiply_add(scores[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/// sums += weights · tile, over the 16 rows of the tile that `from` points into. `from` contains
/// lane_offset_down.
template <int head, int row_tiles>
__device__ __forceinline__ void add_product(float (&sums)[row_tiles][head / 8][4],
                                            const uint32_t (&weights)[row_tiles][4],
                                            uint32_t from) {
#pragma unroll
    for (int d = 0; d < head / 16; ++d) {
        uint32_t b[4];
        load_fragment_transposed(b, SwizzledTile<head>::submatrix(from, 0, d));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
            multiply_add(sums[m][2 * d], weights[m], b[0], b[1]);
            multiply_add(sums[m][2 * d + 1], weights[m], b[2], b[3]);
        }
    }
}

/// Converts two neighbouring accumulator fragments to a left operand.
__device__ __forceinline__ void to_weights(uint32_t (&weights)[4], const float (&left)[4],
                                           const float (&right)[4]) {
    weights[0] = packed(left[0], left[1]);
    weights[1] = packed(left[2], left[3]);
    weights[2] = packed(right[0], right[1]);
    weights[3] = packed(right[2], right[3]);
}

/// The same for 16 columns of several pieces of rows.
template <int row_tiles>
__device__ __forceinline__ void to_weights(uint32_t (&weights)[row_tiles][4],
                                           const float (&columns)[row_tiles][2][4]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) to_weights(weights[m], columns[m][0], columns[m][1]);
}

/// Rows to write, of a head or of a matrix: the first row, the elements from one row to the next,
/// and how many rows and columns there are.
template <class T>
struct RowsTo {
    T* data;
    int64_t stride;
    int rows, columns;
};

/// Writes factor[row]·sums to the rows. Neighbouring lanes exchange values, so that each lane has
/// four adjacent ones and a row's 16 columns fill a 32-byte sector.
template <int head, int row_tiles>
__device__ __forceinline__ void store_rows(const RowsTo<Element>& to, int lane,
                                           const float (&sums)[row_tiles][head / 8][4],
                                           const float (&factor)[row_tiles][2]) {
    const bool odd = lane % 2;
    const int column = (odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + lane / 4;
            const float f = factor[m][half];
#pragma unroll
            for (int d = 0; d < head / 16; ++d) {
                const float(&left)[4] = sums[m][2 * d], (&right)[4] = sums[m][2 * d + 1];
                const uint32_t mine = packed(left[2 * half] * f, left[2 * half + 1] * f),
                               other = packed(right[2 * half] * f, right[2 * half + 1] * f);
                const uint32_t received = __shfl_xor_sync(all_lanes, odd ? mine : other, 1);
                if (row < to.rows && d * 16 + column < to.columns)
                    *reinterpret_cast<uint2*>(to.data + row * to.stride + d * 16 + column) =
                        odd ? uint2{received, other} : uint2{mine, received};
            }
        }
    }
}

/// The same with one factor for all rows.
template <int head, int row_tiles>
__device__ __forceinline__ void store_rows(const RowsTo<Element>& to, int lane,
                                           const float (&sums)[row_tiles][head / 8][4],
                                           float factor) {
    float factors[row_tiles][2];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) factors[m][0] = factors[m][1] = factor;
    store_rows<head>(to, lane, sums, factors);
}

/// The same in fp32, or added to what the rows hold. Four lanes fill a 32-byte sector.
template <int head, int row_tiles>
__device__ __forceinline__ void store_rows(const RowsTo<float>& to, int lane,
                                           const float (&sums)[row_tiles][head / 8][4],
                                           float factor, bool add) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < head / 8; ++n) {
                if (row >= to.rows || n * 8 >= to.columns) continue;
                auto* const two =
                    reinterpret_cast<float2*>(to.data + row * to.stride + n * 8 + lane % 4 * 2);
                const float2 before = add ? *two : float2{0, 0};
                *two = {before.x + sums[m][n][2 * half] * factor,
                        before.y + sums[m][n][2 * half + 1] * factor};
            }
        }
    }
}

/// Reductions over the four lanes that share a row of an accumulator fragment.
__device__ __forceinline__ float row_max_of_lanes(float value) {
    value = fmaxf(value, __shfl_xor_sync(all_lanes, value, 1));
    return fmaxf(value, __shfl_xor_sync(all_lanes, value, 2));
}
__device__ __forceinline__ float row_sum_of_lanes(float value) {
    value += __shfl_xor_sync(all_lanes, value, 1);
    return value + __shfl_xor_sync(all_lanes, value, 2);
}

// ----------------------------------------------------------------------------- documents and order

/// The smallest and the largest of `count` first keys; the same in all lanes of a full warp.
__device__ __forceinline__ int2 range_of(const int32_t* first_keys, int count) {
    int least = std::numeric_limits<int>::max(), most = 0;
#pragma unroll 1
    for (int i = lane_index(); i < count; i += warp_size) {
        least = min(least, first_keys[i]);
        most = max(most, first_keys[i]);
    }
    return {__reduce_min_sync(all_lanes, least), __reduce_max_sync(all_lanes, most)};
}

/// Which block does what. Heads are processed in groups whose streamed operands fit into the L2
/// cache; within a group, the tiles with the most work go first, so that blocks finish together.
/// The order does not affect results.
struct TileScheduler {
    int heads, tiles, group;

    struct Assignment {
        int head, rank;  // rank 0: the tiles with the most work
    };
    __device__ __forceinline__ Assignment operator()(unsigned block) const {
        const int index = static_cast<int>(block), first_head = index / (group * tiles) * group;
        const int in_group = index % (group * tiles), size = min(group, heads - first_head);
        return {first_head + in_group % size, in_group / size};
    }
};

/// `heads` heads of `tiles` tiles; `bytes` are streamed per head.
inline TileScheduler tile_scheduler(const Stream& stream, int heads, int tiles, int64_t bytes) {
    const auto fitting =
        static_cast<int64_t>(limits_of(stream).l2_bytes) / 2 / std::max<int64_t>(bytes, 1);
    return {heads, tiles, static_cast<int>(std::clamp<int64_t>(fitting, 1, heads))};
}

template <class Kernel, class... Arguments>
void launch(const Stream& stream, Kernel* kernel, const TileScheduler& scheduler, int shared_bytes,
            const Arguments&... arguments) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    kernel<<<static_cast<unsigned>(scheduler.heads) * static_cast<unsigned>(scheduler.tiles),
             threads, static_cast<size_t>(shared_bytes), stream_of(stream)>>>(arguments...,
                                                                              scheduler);
    CUDA_CHECK_LAUNCH();
}

/// Calls f with the padded head size, and whether scores are capped, as compile-time constants: a
/// branch for the cap would cost a tenth of the time of kernels without one.
template <class F>
void with_variant(const AttentionShape& shape, F&& f) {
    const auto with_head = [&](auto head) {
        if (shape.softcap == 0)
            f(head, std::false_type{});
        else
            f(head, std::true_type{});
    };
    if (shape.D <= 16) return with_head(std::integral_constant<int, 16>{});
    if (shape.D <= 32) return with_head(std::integral_constant<int, 32>{});
    if (shape.D <= 64) return with_head(std::integral_constant<int, 64>{});
    if (shape.D <= 96) return with_head(std::integral_constant<int, 96>{});
    return with_head(std::integral_constant<int, 128>{});
}

/// Row 0 of a head.
template <class T = Element>
__device__ __forceinline__ T* head_of(const HeadsView& view, int b, int h) {
    return static_cast<T*>(view.data) + b * view.batch + h * view.head;
}

/// Keys of a key head: from `first` on, a warp's keys, as far as they are before `end`.
struct KeyRows {
    int b, h_kv, first, end;
};

/// Writes the sums of a warp's keys as args.key_gradients says.
template <int head, int row_tiles>
__device__ __forceinline__ void store_key_gradients(const AttentionBackward& args,
                                                    const KeyRows& keys, int lane,
                                                    const float (&dk)[row_tiles][head / 8][4],
                                                    const float (&dv)[row_tiles][head / 8][4]) {
    const int b = keys.b, h_kv = keys.h_kv, row = keys.first, rows = keys.end - row,
              D = args.shape.D;
    const HeadsView &to_k = args.dk, &to_v = args.dv;
    if (args.key_gradients == KeyGradients::write) {
        store_rows<head>({head_of(to_v, b, h_kv) + row * to_v.token, to_v.token, rows, D}, lane, dv,
                         1);
        store_rows<head>({head_of(to_k, b, h_kv) + row * to_k.token, to_k.token, rows, D}, lane, dk,
                         args.shape.scale);
        return;
    }
    const bool add = args.key_gradients == KeyGradients::add_fp32;
    store_rows<head>({head_of<float>(to_v, b, h_kv) + row * to_v.token, to_v.token, rows, D}, lane,
                     dv, 1, add);
    store_rows<head>({head_of<float>(to_k, b, h_kv) + row * to_k.token, to_k.token, rows, D}, lane,
                     dk, args.shape.scale, add);
}

/// What a block for a tile of queries of one head works on.
struct QueryBlock {
    int head, b, h, h_kv;       // head: among all B·H
    int first_row, end_row;     // its queries
    int position;               // of query 0 among the keys
    int first_window;           // the first key in the window of query 0, or a negative number
    int first_shared_key;       // documents hide no key from here on
    int first_tile, last_tile;  // of the keys that its queries see
    const int32_t* doc_start;   // of the queries of sequence b; may be null

    __device__ __forceinline__ QueryBlock(const AttentionShape& shape, const Tiling& tiling,
                                          const TileScheduler& scheduler)
        : QueryBlock(shape, tiling.block_m(), tiling.block_n, scheduler, blockIdx.x) {}
    /// `index`: which of the scheduler's assignments.
    __device__ __forceinline__ QueryBlock(const AttentionShape& shape, int block_m, int block_n,
                                          const TileScheduler& scheduler, unsigned index) {
        const auto assigned = scheduler(index);
        head = assigned.head;
        b = head / shape.H;
        h = head % shape.H;
        h_kv = h / (shape.H / shape.H_kv);
        first_row = (scheduler.tiles - 1 - assigned.rank) * block_m;
        end_row = min(first_row + block_m, shape.T);
        position = shape.S - shape.T;
        first_window = position + 1 - shape.window;
        doc_start = shape.doc_start ? shape.doc_start + int64_t{b} * shape.T : nullptr;
        const int2 first_keys =
            doc_start ? range_of(doc_start + first_row, end_row - first_row) : int2{0, 0};
        first_shared_key = first_keys.y;
        first_tile = max(first_keys.x, first_row + first_window) / block_n;
        last_tile = (end_row - 1 + position) / block_n;
    }

    /// Gives `masked` to the scores of keys that a query does not see. The warp's rows are queries,
    /// from `row` on; the columns are keys, from `key` on.
    template <int row_tiles, int columns>
    __device__ __forceinline__ void mask(float (&scores)[row_tiles][columns][4], float masked,
                                         int row, int key, int T) const {
        if (key + columns * 8 - 1 <= row + position && key >= first_shared_key &&
            key >= row + row_tiles * 16 - 1 + first_window)
            return;
        const int lane = thread_index() % warp_size;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = row + m * 16 + half * 8 + lane / 4;
                const int first =
                    max(doc_start ? doc_start[min(query, T - 1)] : 0, query + first_window);
#pragma unroll
                for (int n = 0; n < columns; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int at = key + n * 8 + lane % 4 * 2 + i;
                        if (at < first || at > query + position)
                            scores[m][n][2 * half + i] = masked;
                    }
                }
            }
        }
    }
};

}  // namespace train_gpt::cuda::tiles
