#include <algorithm>
#include <cassert>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "device/cublas_lt.h"
#include "kernels/linear/fp8_layout.h"
#include "kernels/linear/fp8_operands.h"
#include "kernels/linear/linear.h"

namespace train_gpt::cuda {

namespace {

constexpr size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t rows_of(const Fp8Operand& operand) {
    return operand.transposed ? operand.x.cols() : operand.x.rows();
}
int64_t cols_of(const Fp8Operand& operand) {
    return operand.transposed ? operand.x.rows() : operand.x.cols();
}

/// An operand as a product reads it.
struct Codes {
    const void* data;
    const float* inverse;
};

/// Rounds an operand to these addresses, unless its codes are elsewhere already.
Codes round(Stream& stream, const Fp8Operand& operand, void* codes, float* inverse) {
    if (const Fp8Matrix& rounded = operand.rounded; rounded)
        return {(operand.transposed ? rounded.transposed : rounded.codes).data, rounded.inverse};
    const Tensor to(codes, DType::uint8, {rows_of(operand), cols_of(operand)});
    train_gpt::fp8_round(stream, {.codes = operand.transposed ? Tensor{} : to,
                                  .transposed = operand.transposed ? to : Tensor{},
                                  .inverse = inverse,
                                  .x = operand.x,
                                  .format = operand.format,
                                  .scaling = operand.scaling});
    return {codes, inverse};
}

/// The products that cuBLASLt has refused: m, n, k and the dtype that they are computed in; and
/// their layers' names.
struct RefusedProducts {
    using Product = std::tuple<int64_t, int64_t, int64_t, DType>;
    std::map<Product, std::vector<std::string>> all;

    explicit RefusedProducts(const Queue&) {}

    void add(const Product& product, const std::string& name) {
        std::vector<std::string>& names = all[product];
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
};

/// "0.down, 1.down, 2.down and 29 more"
std::string list_of(const std::vector<std::string>& names) {
    constexpr size_t most = 3;
    std::string text;
    for (size_t i = 0; i < std::min(names.size(), most); ++i)
        text += (i > 0 ? ", " : "") + names[i];
    return names.size() > most ? concat(text, " and ", names.size() - most, " more") : text;
}

}  // namespace

void require_fp8(const Stream& stream) {
    const int architecture = limits_of(stream).architecture;
    if (fp8_layouts(architecture) == Fp8Layouts::none)
        throw Error("precision.fp8 needs a GPU that multiplies fp8, sm_", first_with_fp8,
                    " or newer, and this one is sm_", architecture,
                    "; set precision.fp8 to \"off\"");
}

void round_operands(Stream& stream, Gemm& call, const std::string& name, const Fp8Operand& a,
                    const Fp8Operand& b) {
    require_fp8(stream);
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
    const Codes of_a = round(stream, a, a_codes, inverses),
                of_b = round(stream, b, b_codes, inverses + fp8_inverse_stride);
    product.a = of_a.data, product.b = of_b.data;
    product.a_inverse = of_a.inverse, product.b_inverse = of_b.inverse;
    if (can_multiply(stream, product))
        call = product;
    else if (a.has_values && b.has_values)
        stream.queue->kept<RefusedProducts>().add({m, n, k, call.in}, name);
    else
        throw Error("cuBLASLt ", cublas_lt().version(), " refuses a product of ", name, " in fp8 (",
                    m, "×", k, " by ", k, "×", n, "), and an operand is in fp8 alone; add \"", name,
                    "\" to precision.fp8_skip, which keeps it in ", name_of(call.in));
}

bool fp8_was_refused(const Stream& stream) {
    return !stream.queue->kept<RefusedProducts>().all.empty();
}

std::vector<std::string> fp8_refusals(const Stream& stream) {
    std::vector<std::string> sentences;
    for (const auto& [product, names] : stream.queue->kept<RefusedProducts>().all) {
        const auto& [m, n, k, dtype] = product;
        sentences.push_back(concat("matrix products of ", m, "×", k, " by ", k, "×", n, " (",
                                   list_of(names), ") run in ", name_of(dtype),
                                   " instead of fp8, for which cuBLASLt ", cublas_lt().version(),
                                   " has no algorithm that runs"));
    }
    return sentences;
}

size_t fp8_product_bytes(int64_t m, int64_t n, int64_t k) {
    return padded(gemm_workspace_bytes(m, n)) + padded(static_cast<size_t>(m * k)) +
           padded(static_cast<size_t>(n * k)) + padded(2 * fp8_inverse_stride * sizeof(float));
}

}  // namespace train_gpt::cuda
