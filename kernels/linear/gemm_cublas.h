// Matrix products through cuBLASLt. What a product needs besides its addresses (descriptors, the
// algorithm) is created when it is first seen and kept in a plan.
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

/// What cuBLASLt does to a product while it is still on chip.
enum class Epilogue : uint8_t {
    none,
    bias,         // d = product + vector
    gelu,         // aux = product, d = gelu(product)
    bias_gelu,    // aux = product + vector, d = gelu(product + vector)
    dgelu,        // d = product ⊙ gelu'(aux)
    column_sums,  // d = product, vector = column sums of a [k, m] (op tn)
};

/// d = A∘B (+ residual) (+ d, if accumulate), then the epilogue. Matrices are row-major and
/// contiguous: a and b as GemmOp says, of dtype `in`; d, residual and aux [m, n], of dtype `out`;
/// vector is a bias [n] of dtype `out`, or sums [m] in fp32. Products are summed in fp32, even if
/// an algorithm splits k.
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

/// Scratch for any product. NVIDIA recommends 32 MiB for Hopper and 4 MiB for older GPUs, but
/// planning does not know the GPU, and the difference is too small to be worth a distinction.
constexpr size_t gemm_workspace_bytes = size_t{32} << 20;

/// Submits the product. Returns false, with nothing done, if cuBLASLt cannot do this epilogue for
/// these shapes and addresses; throws Error if it cannot do a product without epilogue. The host
/// waits for the device only when a product is first seen while KernelSettings::autotune is on.
bool gemm(Stream& stream, const Gemm& args);

/// cuBLASLt and the plans of a queue: queue.kept<GemmPlans>().
class GemmPlans {
  public:
    explicit GemmPlans(const Queue& queue);
    ~GemmPlans();
    GemmPlans(const GemmPlans&) = delete;
    GemmPlans& operator=(const GemmPlans&) = delete;

    bool run(Stream& stream, const Gemm& args);
    cublasLtHandle_t handle() const { return handle_; }

    /// The algorithms chosen so far, one line per product. A run keeps this text so that a later
    /// run gets the same bits.
    std::string choices() const;
    /// Makes products use the algorithms in this text instead of choosing again, as far as it names
    /// them and this version of cuBLASLt has them; earlier choices are forgotten. Throws Error if
    /// the text is damaged.
    void set_choices(const std::string& text);

  private:
    /// What distinguishes products; each distinct problem has one plan. Whether a product
    /// accumulates makes no difference to cuBLASLt.
    struct Problem {
        GemmOp op;
        Epilogue epilogue;
        DType in, out;
        bool residual, tf32;
        int64_t m, n, k;
        // The alignment of a, b, residual, d and vector in bytes, up to 16: no algorithm gains from
        // more.
        std::array<int, 5> alignment;

        auto operator<=>(const Problem&) const = default;
    };
    struct Algorithm {
        cublasLtMatmulAlgo_t bits{};
        size_t workspace_bytes = 0;
    };
    /// An algorithm as choices() writes it. Its bits have the same meaning in every program that
    /// uses this version of cuBLASLt.
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
