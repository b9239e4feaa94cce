#include <array>
#include <cassert>
#include <cstdio>
#include <mutex>
#include <set>

#include "base/error.h"
#include "kernels/linear/fp8_operands.h"

namespace train_gpt::cuda {

namespace {

constexpr size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t rows_of(const Fp8Operand& operand) {
    return operand.transposed ? operand.x.cols() : operand.x.rows();
}
int64_t cols_of(const Fp8Operand& operand) {
    return operand.transposed ? operand.x.rows() : operand.x.cols();
}

void round(Stream& stream, const Fp8Operand& operand, void* codes, float* inverse) {
    const Tensor to(codes, DType::uint8, {rows_of(operand), cols_of(operand)});
    train_gpt::fp8_round(stream, {.codes = operand.transposed ? Tensor{} : to,
                                  .transposed = operand.transposed ? to : Tensor{},
                                  .inverse = inverse,
                                  .x = operand.x,
                                  .format = operand.format,
                                  .scaling = operand.scaling});
}

void say_refused(const Gemm& call, const Gemm& product) {
    static std::mutex mutex;
    static std::set<std::array<int64_t, 3>> said;
    const std::lock_guard lock(mutex);
    if (!said.insert({product.m, product.n, product.k}).second) return;
    std::fprintf(stderr, "%s",
                 concat("train_gpt: matrix products of ", product.m, "×", product.k, " by ",
                        product.k, "×", product.n, " run in ", name_of(call.in),
                        " instead of fp8, for which this cuBLASLt has no algorithm\n")
                     .c_str());
}

}  // namespace

void round_operands(Stream& stream, Gemm& call, const Fp8Operand& a, const Fp8Operand& b) {
    constexpr int first_with_fp8 = 89;
    if (const int architecture = limits_of(stream).architecture; architecture < first_with_fp8)
        throw Error("precision.fp8 needs a GPU that multiplies fp8, sm_", first_with_fp8,
                    " or newer, and this one is sm_", architecture,
                    "; set precision.fp8 to \"off\"");
    assert(b.format == Fp8Format::e4m3 && cols_of(a) == cols_of(b));
    Gemm product = call;
    product.op = GemmOp::nt;
    product.fp8 = a.format == Fp8Format::e4m3 ? Fp8Operands::e4m3 : Fp8Operands::e5m2;
    const int64_t m = product.m = rows_of(a), n = product.n = rows_of(b),
                  k = product.k = cols_of(a);
    auto* const scratch = stream.scratch_for<char>(fp8_product_bytes(m, n, k));
    char* const a_codes = scratch + padded(gemm_workspace_bytes(m, n));
    char* const b_codes = a_codes + padded(static_cast<size_t>(m * k));
    auto* const inverses = reinterpret_cast<float*>(b_codes + padded(static_cast<size_t>(n * k)));
    round(stream, a, a_codes, inverses);
    round(stream, b, b_codes, inverses + 1);
    product.a = a_codes, product.b = b_codes;
    product.a_inverse = inverses, product.b_inverse = inverses + 1;
    if (can_multiply(stream, product))
        call = product;
    else
        say_refused(call, product);
}

size_t fp8_product_bytes(int64_t m, int64_t n, int64_t k) {
    return padded(gemm_workspace_bytes(m, n)) + padded(static_cast<size_t>(m * k)) +
           padded(static_cast<size_t>(n * k)) + padded(2 * sizeof(float));
}

}  // namespace train_gpt::cuda
