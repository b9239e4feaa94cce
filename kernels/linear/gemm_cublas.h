// Matrix products through cuBLASLt. What a product needs besides its addresses (descriptors, the
// algorithm) is created when it is first seen and kept in a plan.
#pragma once
#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
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

/// Whether a and b are codes of fp8 (kernels/fp8.h), and a's format. b is then e4m3.
enum class Fp8Operands : uint8_t { none, e4m3, e5m2 };

/// d = A∘B (+ residual) (+ d, if accumulate), then the epilogue. Matrices are row-major and
/// contiguous: a and b as GemmOp says, of dtype `in`; d, residual and aux [m, n], of dtype `out`;
/// vector is a bias [n] of dtype `out`, or sums [m] in fp32. Products are summed in fp32, even if
/// an algorithm splits k.
///
/// With fp8, a and b are codes, the op is nt, and the product is multiplied with *a_inverse ·
/// *b_inverse, in the device's memory at multiples of 16 bytes; `in` is the dtype that they were
/// rounded from.
///
/// batch > 1: `count` such products without epilogue, whose a, b and d are so many elements apart.
/// The algorithm is chosen for `batch` products and used for any number of them.
struct Gemm {
    GemmOp op = GemmOp::nt;
    Epilogue epilogue = Epilogue::none;
    DType in = DType::fp32, out = DType::fp32;
    int64_t m = 0, n = 0, k = 0;
    bool accumulate = false;
    void* d = nullptr;
    const void *a = nullptr, *b = nullptr, *residual = nullptr;
    void *vector = nullptr, *aux = nullptr;
    Fp8Operands fp8 = Fp8Operands::none;
    const float *a_inverse = nullptr, *b_inverse = nullptr;
    int64_t batch = 1, count = 1;
    std::array<int64_t, 3> strides = {};  // of a, b and d
};

/// Scratch for a product with an m×n result. NVIDIA recommends 32 MiB for Hopper and no more for
/// other GPUs. An algorithm that splits k keeps a sum of the result for each part, so large results
/// get more.
inline size_t gemm_workspace_bytes(int64_t m, int64_t n) {
    constexpr size_t least = size_t{32} << 20, most = size_t{128} << 20, parts = 32;
    return std::clamp(parts * static_cast<size_t>(m * n) * sizeof(float), least, most);
}

/// Submits the product. Returns false, with nothing done, if cuBLASLt cannot do this epilogue for
/// these shapes and addresses; throws Error if it cannot do a product without epilogue.
///
/// While KernelSettings::autotune is on, the host waits for the device when a product is first
/// seen, and the algorithms are timed with the actual arguments; a product in fp8 is tried with
/// them even without. So the operands must have values, and no output may be an operand. A product
/// that accumulates cannot be repeated; if it is seen before the same product that overwrites, it
/// uses the first algorithm (in fp8 the first that runs).
bool gemm(Stream& stream, const Gemm& args);

/// Whether cuBLASLt can do the product without its epilogue. It may time algorithms, as gemm()
/// does. For a product in fp8 an algorithm has run then, or had run when it was chosen, if it is
/// kept from an earlier run (set_choices()): what the library offers may still be refused when it
/// is launched. If the product accumulates and was not seen before, that was the
/// product itself: gemm() must follow, and does not add it once more.
bool can_multiply(Stream& stream, const Gemm& args);

/// Submits work that gives the same as a product with an epilogue.
using SeparateWork = std::function<void()>;

/// Submits the product and returns true, or calls `separate` and returns false, as
/// KernelSettings::epilogues says. `automatic`: whichever is faster, timed like the algorithms; if
/// that is not timed, the product, but column sums separately. cuBLASLt may not know the epilogue:
/// then `separate`.
bool gemm(Stream& stream, const Gemm& args, const SeparateWork& separate);

/// cuBLASLt and the plans of a queue: queue.kept<GemmPlans>().
class GemmPlans {
  public:
    explicit GemmPlans(const Queue& queue);
    ~GemmPlans();
    GemmPlans(const GemmPlans&) = delete;
    GemmPlans& operator=(const GemmPlans&) = delete;

    /// gemm(). separate: null for a product that has no alternative.
    bool run(Stream& stream, const Gemm& args, const SeparateWork* separate);
    /// can_multiply()
    bool has_product(Stream& stream, const Gemm& args);
    cublasLtHandle_t handle() const { return handle_; }

    /// What was chosen so far, one line per product. A run keeps this text so that a later run gets
    /// the same bits.
    std::string choices() const;
    /// Makes products do as this text says instead of choosing again, as far as it names them and
    /// cuBLASLt can do that; earlier choices are forgotten. The text must come from such a GPU and
    /// the same version of cuBLASLt. Throws Error if it is damaged.
    void set_choices(const std::string& text);
    /// set_choices() with the lines of several ranks: where two name the same product, the earlier
    /// text holds. Keeps the plans that agree. Returns whether one did not.
    bool unite_choices(const std::vector<std::string>& texts);

  private:
    /// What distinguishes products; each distinct problem has one plan. Whether a product
    /// accumulates makes no difference to cuBLASLt.
    struct Problem {
        GemmOp op;
        Epilogue epilogue;
        DType in, out;
        Fp8Operands fp8;
        bool residual, tf32;
        int reserved_sms;
        int64_t m, n, k;
        // The alignment of a, b, residual, d and vector in bytes, up to 16: no algorithm gains from
        // more.
        std::array<int, 5> alignment;
        int64_t batch = 1;
        std::array<int64_t, 3> strides = {};

        auto operator<=>(const Problem&) const = default;
    };
    struct Algorithm {
        cublasLtMatmulAlgo_t bits{};
        size_t workspace_bytes = 0;
    };
    /// A line of choices(). An algorithm's bits have the same meaning in every program that uses
    /// this version of cuBLASLt.
    struct Kept {
        bool separate = false;
        cublasLtMatmulAlgo_t bits{};  // if not separate

        bool operator==(const Kept& other) const;
    };
    enum class Use : uint8_t { impossible, product, separate };
    struct Plan {
        cublasLtMatmulDescOpaque_t operation{};
        cublasLtMatrixLayoutOpaque_t a{}, b{}, d{};
        Use use = Use::impossible;
        Algorithm algorithm;
        /// Trying the algorithm has added the product, which run() is about to ask for.
        bool has_added = false;

        /// What is kept of it, unless it is impossible.
        Kept kept() const { return {use == Use::separate, algorithm.bits}; }
    };

    Plan& plan_of(Stream& stream, const Gemm& args, const SeparateWork* separate);
    static Problem problem_of(const Gemm& args, const KernelSettings& settings);
    static void describe(Plan& plan, const Problem& problem);
    static void set_count(Plan& plan, int64_t count);
    static void write(std::string& text, const Problem& problem, const Kept& kept);
    static std::map<Problem, Kept> read(const std::string& text);
    static cublasStatus_t launch(Stream& stream, const Gemm& args, Plan& plan);
    Plan make_plan(Stream& stream, const Gemm& args, const Problem& problem,
                   const SeparateWork* separate) const;
    bool take_kept(Stream& stream, Plan& plan, const Problem& problem) const;
    static std::vector<Algorithm> candidates(Stream& stream, Plan& plan, const Problem& problem);
    /// Nothing if none of them runs.
    static std::optional<Algorithm> fastest_of(Stream& stream, const Gemm& args, Plan plan,
                                               const std::vector<Algorithm>& candidates);
    /// The first that is not refused when it is launched; nothing if all are.
    static std::optional<Algorithm> first_that_runs(Stream& stream, const Gemm& args, Plan& plan,
                                                    const std::vector<Algorithm>& candidates);
    static Use faster_of(Stream& stream, const Gemm& args, Plan plan, const SeparateWork& separate);

    cublasLtHandle_t handle_ = nullptr;
    std::map<Problem, Plan> plans_;
    std::map<Problem, Kept> kept_;
};

}  // namespace train_gpt::cuda
