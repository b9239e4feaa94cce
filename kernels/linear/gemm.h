// Matrix products on the CPU: what linear.cpp uses. Matrices are row-major; sums are taken in fp32.
// Two back ends: oneDNN, if the build found it, and our own kernel, which is always available.
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

/// Everything about a product except its addresses. a, b, bias [n] and residual [m, n] are of dtype
/// `in`, c of dtype `out`.
///   c = A∘B (+ bias) (+ residual) (+ c, if accumulate; c is then fp32)
struct GemmShape {
    GemmOp op = GemmOp::nt;
    DType in = DType::fp32, out = DType::fp32;
    bool bias = false, residual = false, accumulate = false;
    int64_t m = 0, n = 0, k = 0;
    bool packed = false;  // b was packed by onednn_pack; only for oneDNN
    // Elements from one row to the next of a matrix as it lies in memory; 0: it is contiguous.
    int64_t lda = 0, ldb = 0, ldc = 0;  // with ldc, no residual

    bool operator==(const GemmShape&) const = default;
};

struct GemmOperands {
    void* c = nullptr;
    const void *a = nullptr, *b = nullptr;
    const void *bias = nullptr, *residual = nullptr;
};

/// Our own kernel: any shape. Each element of c is summed in an order that depends only on k, not
/// on m, n, the thread count or the address. scratch: own_gemm_scratch_bytes(shape), 64-byte
/// aligned; c overlaps nothing else.
void own_gemm(const GemmShape& shape, const GemmOperands& operands, void* scratch);
size_t own_gemm_scratch_bytes(const GemmShape& shape);

#ifdef TRAIN_GPT_ONEDNN
/// False if oneDNN has no fast implementation of this product for this CPU (for example, bf16 on a
/// CPU with AVX2 only).
bool onednn_supports(const GemmShape& shape);
/// Requires onednn_supports(shape). Repeatable bit for bit with the same shape and thread count;
/// the order of sums may depend on m and n. Safe to call from several threads.
void onednn_gemm(const GemmShape& shape, const GemmOperands& operands, void* scratch);
size_t onednn_gemm_scratch_bytes(const GemmShape& shape);

/// Whether the library copies its operands into its own blocks each time, as its kernels for CPUs
/// without AVX-512 do. These gain nothing from packing.
bool onednn_copies(const GemmShape& shape);

/// Copies B [k, n], row-major or, for nt, transposed, into the block layout that the library
/// multiplies fastest, for products of a shape with `packed`. packed: onednn_packed_bytes(shape), a
/// multiple of 64, 64-byte aligned.
void onednn_pack(const GemmShape& shape, const void* b, void* packed);
size_t onednn_packed_bytes(const GemmShape& shape);
/// Whether a B packed for one of the products can be used for the other.
bool onednn_packs_alike(const GemmShape& one, const GemmShape& other);
#endif

}  // namespace train_gpt
