// Operands of products in fp8 on a GPU.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/fp8.h"
#include "kernels/linear/gemm_cublas.h"

namespace train_gpt::cuda {

/// x, or xᵀ, rounded to a format.
struct Fp8Operand {
    Tensor x;
    Fp8Format format = Fp8Format::e4m3;
    Fp8Scaling scaling = {};
    bool transposed = false;
    Fp8Matrix rounded = {};  // has been rounded already
    bool has_values = true;  // x has, too
};

/// Rounds a [m, k] and b [n, k], unless they have been rounded, into scratch memory behind the
/// product's workspace and makes `call` the product a·bᵀ of their codes: cuBLASLt takes fp8 of both
/// operands along k only on most GPUs (fp8_layout.h). b is e4m3. Where cuBLASLt has no algorithm
/// for such a product, `call` stays as it is, and fp8_refusals() says so; throws Error if an
/// operand has no values. Throws Error on a GPU without fp8. name: ProductScales::name, for these
/// sentences.
void round_operands(Stream& stream, Gemm& call, const std::string& name, const Fp8Operand& a,
                    const Fp8Operand& b);

/// The scratch memory of such a product.
size_t fp8_product_bytes(int64_t m, int64_t n, int64_t k);

}  // namespace train_gpt::cuda
