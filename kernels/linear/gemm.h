// Matrix products on the CPU: what linear.cpp asks of the libraries behind it. Matrices are
// row-major and contiguous; sums are taken in fp32. Two back ends: oneDNN where the build found it,
// and a kernel of our own that is always there.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace train_gpt {

enum class GemmOp : uint8_t {
    nt,  // C = A·Bᵀ    A [m, k], B [n, k]    forward: x·wᵀ
    nn,  // C = A·B     A [m, k], B [k, n]    gradient of the input: dy·w
    tn,  // C = Aᵀ·B    A [k, m], B [k, n]    gradient of the weight: dyᵀ·x
};

/// Everything about a product but its addresses. a, b, bias [n] and residual [m, n] are of dtype
/// `in`, c of dtype `out`.
///   c = A∘B (+ bias) (+ residual) (+ c, where accumulate; c is then fp32)
struct GemmShape {
    GemmOp op = GemmOp::nt;
    DType in = DType::fp32, out = DType::fp32;
    bool bias = false, residual = false, accumulate = false;
    int64_t m = 0, n = 0, k = 0;
    bool packed = false;  // b is what onednn_pack made of it; for oneDNN alone

    bool operator==(const GemmShape&) const = default;
};

struct GemmOperands {
    void* c = nullptr;
    const void *a = nullptr, *b = nullptr;
    const void *bias = nullptr, *residual = nullptr;
};

/// The own kernel: any shape. Each element of c is summed in an order that depends on k alone: not
/// on m, n, the thread count or the address. scratch: own_gemm_scratch_bytes(shape), 64-byte
/// aligned; c overlaps nothing else.
void own_gemm(const GemmShape& shape, const GemmOperands& operands, void* scratch);
size_t own_gemm_scratch_bytes(const GemmShape& shape);

#ifdef TRAIN_GPT_ONEDNN
/// False where oneDNN has no fast implementation of this product for this CPU (bf16 on a CPU with
/// AVX2 only, say).
bool onednn_supports(const GemmShape& shape);
/// Requires onednn_supports(shape). Repeatable bit for bit with the same shape and thread count;
/// the order of sums may depend on m and n. Safe to call from several threads.
void onednn_gemm(const GemmShape& shape, const GemmOperands& operands, void* scratch);
size_t onednn_gemm_scratch_bytes(const GemmShape& shape);

/// Whether the library copies what it multiplies into blocks of its own each time, as its kernels for
/// CPUs without AVX-512 do. Packing gains nothing for these.
bool onednn_copies(const GemmShape& shape);

/// Copies B [k, n], row-major or, for nt, transposed, into the blocks in which the library multiplies it fastest, for
/// products of a shape with `packed`. packed: onednn_packed_bytes(shape), a multiple of 64, 64-byte aligned.
void onednn_pack(const GemmShape& shape, const void* b, void* packed);
size_t onednn_packed_bytes(const GemmShape& shape);
/// Whether what was packed for a product serves another.
bool onednn_packs_alike(const GemmShape& one, const GemmShape& other);
#endif

}  // namespace train_gpt
