// Matrix products through cuBLASLt. What a product needs besides its addresses (descriptors, the algorithm) is made
// when it is first seen and kept in a plan.
#pragma once
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <cublasLt.h>

#include "base/dtype.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"
#include "kernels/linear/gemm.h"

namespace train_gpt::cuda {

/// What cuBLASLt does to a product while it is on chip.
enum class Epilogue : uint8_t {
    none,
    bias,         // d = product + vector
    gelu,         // aux = product, d = gelu(product)
    bias_gelu,    // aux = product + vector, d = gelu(product + vector)
    dgelu,        // d = product ⊙ gelu'(aux)
    column_sums,  // d = product, vector = column sums of a [k, m] (op tn)
};

/// d = A∘B (+ residual) (+ d, where accumulate), then the epilogue. Row-major and contiguous matrices: a and b as
/// GemmOp says, of dtype `in`; d, residual and aux [m, n], of dtype `out`; vector is a bias [n] of dtype `out`, or
/// sums [m] in fp32. Products are summed in fp32, also where an algorithm splits k.
struct Gemm {
    GemmOp op = GemmOp::nt;
    Epilogue epilogue = Epilogue::none;
    DType in = DType::fp32, out = DType::fp32;
    int64_t m = 0, n = 0, k = 0;
    bool accumulate = false;
    void* d = nullptr;
    const void *a = nullptr, *b = nullptr, *residual = nullptr;
    void *vector = nullptr, *aux = nullptr;
};

/// Scratch for any product. 32 MiB is what NVIDIA recommends on Hopper; older GPUs ask for 4 MiB, but planning knows no
/// GPU, and the difference is too small to tell them apart.
constexpr size_t gemm_workspace_bytes = size_t{32} << 20;

/// Submits the product. False, with nothing done, where cuBLASLt cannot do this epilogue for these shapes and
/// addresses; a product without epilogue that it cannot do is an Error. The host waits for the device only when a
/// product is first seen while GemmSettings::autotune is on.
bool gemm(Stream& stream, const Gemm& args);

/// How a queue multiplies matrices. Set before its first product.
struct GemmSettings {
    bool autotune =
        false;  // time cuBLASLt's candidates when a product is first seen; else take the first
    bool tf32 =
        false;  // fp32 matrices in tensor cores, their elements rounded to 10 bits of mantissa
    /// The bias gradient as a by-product of the weight gradient's product, where it overwrites; else by a kernel.
    bool bias_gradient_epilogue = false;
};

/// cuBLASLt and the plans of a queue: queue.kept<GemmPlans>().
class GemmPlans {
  public:
    explicit GemmPlans(const Queue& queue);
    ~GemmPlans();
    GemmPlans(const GemmPlans&) = delete;
    GemmPlans& operator=(const GemmPlans&) = delete;

    GemmSettings settings;

    bool run(Stream& stream, const Gemm& args);
    cublasLtHandle_t handle() const { return handle_; }

    /// The algorithms chosen so far, a line for each product: what a run keeps, so that a later one gets the same bits.
    std::string choices() const;
    /// Products take the algorithms of this text instead of choosing anew, as far as it names them and this version of
    /// cuBLASLt has them; what was chosen before is forgotten. Throws Error when the text is damaged.
    void set_choices(const std::string& text);

  private:
    /// What distinguishes products: one plan each. Whether a product accumulates makes no difference to cuBLASLt.
    struct Problem {
        GemmOp op;
        Epilogue epilogue;
        DType in, out;
        bool residual, tf32;
        int64_t m, n, k;
        std::array<int, 5>
            alignment;  // of a, b, residual, d and vector, in bytes, up to 16: more helps no algorithm

        auto operator<=>(const Problem&) const = default;
    };
    struct Algorithm {
        cublasLtMatmulAlgo_t bits{};
        size_t workspace_bytes = 0;
    };
    /// An algorithm as choices() writes it: its bits mean the same to every program that uses this version of cuBLASLt.
    struct Kept {
        size_t version = 0;
        cublasLtMatmulAlgo_t bits{};
    };
    struct Plan {
        cublasLtMatmulDescOpaque_t operation{};
        cublasLtMatrixLayoutOpaque_t a{}, b{}, d{};
        bool supported = false;
        Algorithm algorithm;
    };

    static Problem problem_of(const Gemm& args, bool tf32);
    static void describe(Plan& plan, const Problem& problem);
    static void write(std::string& text, const Problem& problem, const Kept& kept);
    static cublasStatus_t launch(Stream& stream, const Gemm& args, Plan& plan);
    Plan make_plan(Stream& stream, const Gemm& args, const Problem& problem) const;
    bool take_kept(Stream& stream, Plan& plan, const Problem& problem) const;
    static std::vector<Algorithm> candidates(Stream& stream, Plan& plan, const Problem& problem);
    static Algorithm fastest(Stream& stream, const Gemm& args, Plan plan,
                             const std::vector<Algorithm>& candidates);

    cublasLtHandle_t handle_ = nullptr;
    std::map<Problem, Plan> plans_;
    std::map<Problem, Kept> kept_;
};

}  // namespace train_gpt::cuda
