// Hopper's own instructions, for files that are compiled for sm_90a: products of a warpgroup,
// copies of boxes by the tensor copy engine, and barriers in shared memory that count arrivals and
// bytes.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Data Movement".
#pragma once
#include <cstdint>

#include <cuda.h>

namespace train_gpt::cuda::hopper {

constexpr int warpgroup_size = 128;

// ---------------------------------------------------------------------------------------- barriers
// A barrier is 8 bytes of shared memory. A phase of it ends when all arrivals and all bytes that
// were announced have come. wait(barrier, parity) returns when the phase of that parity has ended;
// the phase before the first has parity 1.

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
/// After init_barrier(), before __syncthreads(): the copy engine sees the barriers too.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::
                     : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and announces the bytes of copies.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/// The stages of a pipeline, in turn, and the parity of their phases.
template <int stages>
class Ring {
  public:
    __device__ __forceinline__ int stage() const {
        return place_ >= stages ? place_ - stages : place_;
    }
    __device__ __forceinline__ uint32_t parity() const { return place_ >= stages; }
    __device__ __forceinline__ void advance() {
        if (++place_ == 2 * stages) place_ = 0;
    }

  private:
    int place_ = 0;
};

/// Two groups of `threads` / 2 threads take turns: one syncs where the other arrives.
template <int threads>
__device__ __forceinline__ void sync_named(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}
template <int threads>
__device__ __forceinline__ void arrive_named(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

/// All warps of a warpgroup call this. A kernel begins with 65536 / threads registers, rounded down
/// to a multiple of 8.
template <int registers>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ------------------------------------------------------------------------------------------ copies

/// Starts copying a box that begins at `first`; what lies outside the tensor is filled with zeros.
/// All bytes of the box are counted on the barrier.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                         int4 first) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(first.x), "r"(first.y), "r"(first.z), "r"(first.w)
        : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                         int3 first) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(first.x), "r"(first.y), "r"(first.z)
        : "memory");
}
/// Starts copying bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// ---------------------------------------------------------------------------------------- operands
// Operands in bf16 lie in panels of 64 columns: rows of 128 bytes, one after the other, whose
// 16-byte chunks are permuted (swizzle of 128 bytes). A panel begins at a multiple of 1024 bytes. A
// box of 64 columns arrives like that.

constexpr int panel_columns = 64, row_bytes = 128;
constexpr int panel_bytes(int rows) { return rows * row_bytes; }
constexpr int panels(int columns) { return (columns + panel_columns - 1) / panel_columns; }

/// Where 16 bytes of a row lie in a panel.
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return static_cast<uint32_t>(row * row_bytes + (chunk ^ row % 8) * 16);
}

/// The descriptor of an operand, without its address: swizzled by 128 bytes; groups of 8 rows are
/// 1024 bytes apart; panels `panel` bytes.
constexpr uint64_t descriptor_of_panels(int panel) {
    return uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | static_cast<uint64_t>(panel / 16) << 16;
}
/// An operand of `rows` rows in shared memory, for products that are 16 deep. Along a row: the
/// product's depth runs along the tile's rows, and the operand's own rows begin with `row`.
template <int rows>
__device__ __forceinline__ uint64_t along_rows(uint32_t tile, int step, int row = 0) {
    const uint32_t address = tile + static_cast<uint32_t>(step / 4 * panel_bytes(rows) +
                                                          step % 4 * 32 + row * row_bytes);
    return descriptor_of_panels(16) | (address & 0x3ffff) >> 4;
}
/// The product's depth runs over the tile's rows; the operand's own columns begin with the panel of
/// `column`.
template <int rows>
__device__ __forceinline__ uint64_t across_rows(uint32_t tile, int step, int column = 0) {
    const uint32_t address =
        tile +
        static_cast<uint32_t>(step * 16 * row_bytes + column / panel_columns * panel_bytes(rows));
    return descriptor_of_panels(panel_bytes(rows)) | (address & 0x3ffff) >> 4;
}

// ---------------------------------------------------------------------------------------- products
// A warpgroup multiplies 64 rows. Its warp w has rows 16·w to 16·w + 15 of the sums, in the layout
// of mma.sync: lane l has columns 8·n + 2·(l % 4) and the next of rows l / 4 and l / 4 + 8 in
// sums[n]. A left operand in registers has the layout of mma.sync's.
//
// Products run beside other instructions from begin_products() on; end_products() closes a group of
// them. Until wait_for_products<n>() has returned, with which all groups but the latest n are
// complete, their sums and operands must not be touched; settle() then shows that to the compiler.

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int groups>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
template <int n>
__device__ __forceinline__ void settle(float (&sums)[n][4]) {
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sums[i][j])::"memory");
}
template <int n>
__device__ __forceinline__ void settle(uint32_t (&operand)[n][4]) {
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(operand[i][j])::"memory");
}

// clang-format off
#define TRAIN_GPT_1(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define TRAIN_GPT_4(n) TRAIN_GPT_1(n), TRAIN_GPT_1(n + 1), TRAIN_GPT_1(n + 2), TRAIN_GPT_1(n + 3)
#define TRAIN_GPT_8(n) TRAIN_GPT_4(n), TRAIN_GPT_4(n + 4)
#define TRAIN_GPT_12(n) TRAIN_GPT_8(n), TRAIN_GPT_4(n + 8)
#define TRAIN_GPT_16(n) TRAIN_GPT_8(n), TRAIN_GPT_8(n + 8)
#define TRAIN_GPT_32(n) TRAIN_GPT_16(n), TRAIN_GPT_16(n + 16)
#define TRAIN_GPT_SUMS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define TRAIN_GPT_SUMS_96 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
    "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
#define TRAIN_GPT_SUMS_128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
    "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63}, "
#define TRAIN_GPT_SUMS_256 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
    "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
    "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, " \
    "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, " \
    "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
    "%123, %124, %125, %126, %127}, "
// clang-format on

/// sums += left · right, 16 deep; without `add`, sums are only written. Left and right are
/// descriptors; `across`: across_rows, else along_rows.
template <bool left_across, bool right_across, int n>
__device__ __forceinline__ void multiply(float (&sums)[n][4], uint64_t left, uint64_t right,
                                         bool add = true) {
    static_assert(n == 8 || n == 12 || n == 16 || n == 32);
    if constexpr (n == 8)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " TRAIN_GPT_SUMS_64
            "%32, %33, add, 1, 1, %35, %36;\n}"
            : TRAIN_GPT_8(0)
            : "l"(left), "l"(right), "r"(int{add}), "n"(int{left_across}), "n"(int{right_across})
            : "memory");
    if constexpr (n == 12)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " TRAIN_GPT_SUMS_96
            "%48, %49, add, 1, 1, %51, %52;\n}"
            : TRAIN_GPT_12(0)
            : "l"(left), "l"(right), "r"(int{add}), "n"(int{left_across}), "n"(int{right_across})
            : "memory");
    if constexpr (n == 16)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " TRAIN_GPT_SUMS_128
            "%64, %65, add, 1, 1, %67, %68;\n}"
            : TRAIN_GPT_16(0)
            : "l"(left), "l"(right), "r"(int{add}), "n"(int{left_across}), "n"(int{right_across})
            : "memory");
    if constexpr (n == 32)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " TRAIN_GPT_SUMS_256
            "%128, %129, add, 1, 1, %131, %132;\n}"
            : TRAIN_GPT_32(0)
            : "l"(left), "l"(right), "r"(int{add}), "n"(int{left_across}), "n"(int{right_across})
            : "memory");
}
/// The same with a left operand in registers.
template <bool right_across, int n>
__device__ __forceinline__ void multiply(float (&sums)[n][4], const uint32_t (&left)[4],
                                         uint64_t right, bool add = true) {
    static_assert(n == 8 || n == 12 || n == 16);
    if constexpr (n == 8)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " TRAIN_GPT_SUMS_64
            "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
            : TRAIN_GPT_8(0)
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int{add}),
              "n"(int{right_across})
            : "memory");
    if constexpr (n == 12)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %53, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " TRAIN_GPT_SUMS_96
            "{%48, %49, %50, %51}, %52, add, 1, 1, %54;\n}"
            : TRAIN_GPT_12(0)
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int{add}),
              "n"(int{right_across})
            : "memory");
    if constexpr (n == 16)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " TRAIN_GPT_SUMS_128
            "{%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"
            : TRAIN_GPT_16(0)
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int{add}),
              "n"(int{right_across})
            : "memory");
}

/// sums += left · rightᵀ of codes of fp8, codes_of_product deep; without `add`, sums are only
/// written. left: e4m3, or e5m2; right: e4m3. Both are descriptors that along_rows() gives: two
/// codes lie where an element of bf16 would lie.
constexpr int codes_of_product = 32;
template <bool left_is_e5m2>
__device__ __forceinline__ void multiply_codes(float (&sums)[16][4], uint64_t left, uint64_t right,
                                               bool add = true) {
    if constexpr (left_is_e5m2)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 " TRAIN_GPT_SUMS_128
            "%64, %65, add, 1, 1;\n}"
            : TRAIN_GPT_16(0)
            : "l"(left), "l"(right), "r"(int{add})
            : "memory");
    else
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " TRAIN_GPT_SUMS_128
            "%64, %65, add, 1, 1;\n}"
            : TRAIN_GPT_16(0)
            : "l"(left), "l"(right), "r"(int{add})
            : "memory");
}

#undef TRAIN_GPT_1
#undef TRAIN_GPT_4
#undef TRAIN_GPT_8
#undef TRAIN_GPT_12
#undef TRAIN_GPT_16
#undef TRAIN_GPT_32
#undef TRAIN_GPT_SUMS_64
#undef TRAIN_GPT_SUMS_96
#undef TRAIN_GPT_SUMS_128
#undef TRAIN_GPT_SUMS_256

}  // namespace train_gpt::cuda::hopper
