// Which GPUs multiply fp8, and in which layouts cuBLASLt takes the operands.
#pragma once
#include <cstdint>

namespace train_gpt {

/// The layouts of two operands in fp8 with one scale each, as cuBLASLt takes them.
enum class Fp8Layouts : uint8_t {
    none,  // there are no tensor cores for fp8
    tn,    // both along k, the dimension over which products sum: GemmOp::nt here
    all,   // either along k or along its other dimension
};

/// By compute capability, 90 for sm_90: the documentation of cublasLtMatmul(), and for those to
/// come NVIDIA's Transformer Engine (common/gemm/cublaslt_gemm.cu).
constexpr Fp8Layouts fp8_layouts(int architecture) {
    constexpr struct {
        int first;  // up to the next row's
        Fp8Layouts layouts;
    } table[] = {{0, Fp8Layouts::none},
                 {89, Fp8Layouts::tn},    // Ada, Hopper
                 {100, Fp8Layouts::all},  // Blackwell in data centres
                 {120, Fp8Layouts::tn},   // GeForce and RTX Blackwell
                 {130, Fp8Layouts::all}};
    Fp8Layouts found = Fp8Layouts::none;
    for (const auto& row : table)
        if (architecture >= row.first) found = row.layouts;
    return found;
}

/// The first architecture with fp8.
constexpr int first_with_fp8 = [] {
    int architecture = 0;
    while (fp8_layouts(architecture) == Fp8Layouts::none) ++architecture;
    return architecture;
}();

struct Stream;

namespace cuda {  // fp8_operands.cu
/// Throws Error on a GPU without fp8.
void require_fp8(const Stream& stream);
}  // namespace cuda

}  // namespace train_gpt
