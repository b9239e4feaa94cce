#include <algorithm>
#include <bit>
#include <cassert>
#include <limits>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "device/cublas_lt.h"
#include "kernels/fastest.h"
#include "kernels/linear/gemm_cublas.h"

namespace train_gpt::cuda {

namespace {

constexpr int most_candidates = 32;

void require(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
        throw Error("cuBLASLt, ", what, ": ", cublas_lt().status_string(status));
}

template <class Value>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
         const Value& value) {
    require(cublas_lt().set_desc(operation, attribute, &value, sizeof value),
            "describing a product");
}

template <class Value>
void set(cublasLtMatrixLayout_t matrix, cublasLtMatrixLayoutAttribute_t attribute,
         const Value& value) {
    require(cublas_lt().set_layout(matrix, attribute, &value, sizeof value), "describing a matrix");
}

template <class Value>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const Value& value) {
    require(cublas_lt().set_preference(preference, attribute, &value, sizeof value),
            "asking for algorithms");
}

cublasLtHandle_t handle_of(const Stream& stream) {
    return stream.queue->kept<GemmPlans>().handle();
}

cudaDataType_t cuda_type(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

/// Of an operand.
cudaDataType_t cuda_type(DType dtype, Fp8Operands fp8) {
    return fp8 == Fp8Operands::none   ? cuda_type(dtype)
           : fp8 == Fp8Operands::e4m3 ? CUDA_R_8F_E4M3
                                      : CUDA_R_8F_E5M2;
}

cublasComputeType_t compute_type(bool tf32) {
    return tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

/// cuBLASLt matrices are column-major, so it sees the transpose of each matrix here and is asked
/// for dᵀ = bᵀ∘aᵀ: its A is b.
cublasLtEpilogue_t cublas_epilogue(Epilogue epilogue) {
    switch (epilogue) {
        case Epilogue::bias:
            return CUBLASLT_EPILOGUE_BIAS;
        case Epilogue::gelu:
            return CUBLASLT_EPILOGUE_GELU_AUX;
        case Epilogue::bias_gelu:
            return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        case Epilogue::dgelu:
            return CUBLASLT_EPILOGUE_DGELU;
        case Epilogue::column_sums:
            return CUBLASLT_EPILOGUE_BGRADB;
        case Epilogue::none:
            break;
    }
    return CUBLASLT_EPILOGUE_DEFAULT;
}

bool reads_bias(Epilogue epilogue) {
    return epilogue == Epilogue::bias || epilogue == Epilogue::bias_gelu;
}
bool has_aux(Epilogue epilogue) {
    return epilogue == Epilogue::gelu || epilogue == Epilogue::bias_gelu ||
           epilogue == Epilogue::dgelu;
}

int alignment_of(const void* address) {
    return 1 << std::min(4, std::countr_zero(reinterpret_cast<uintptr_t>(address)));
}

/// Partial sums over k must be kept in fp32 and added in a fixed order. INPLACE and OUTPUT_TYPE
/// keep them in the output's dtype, and the order in which INPLACE adds them is not documented.
/// Algorithms that do not split k are always allowed.
constexpr uint32_t allowed_reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

bool reduction_is_allowed(const cublasLtMatmulAlgo_t& algorithm) {
    uint32_t scheme = 0;
    require(cublas_lt().algo_attribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                       sizeof scheme, nullptr),
            "reading an algorithm");
    return (scheme & ~allowed_reductions) == 0;
}

bool is_usable(const cublasLtMatmulAlgo_t& algorithm,
               const cublasLtMatmulHeuristicResult_t& checked, size_t workspace_bytes) {
    return checked.state == CUBLAS_STATUS_SUCCESS && checked.workspaceSize <= workspace_bytes &&
           reduction_is_allowed(algorithm);
}

/// Seconds that the device takes for one of `runs` runs of the work.
template <class Work>
double seconds_per_run(Stream& stream, int runs, const Work& work) {
    const std::shared_ptr<void> first = create_event(stream.device, true),
                                last = create_event(stream.device, true);
    record(first.get(), stream);
    for (int run = 0; run < runs; ++run) work();
    record(last.get(), stream);
    return seconds_between(first.get(), last.get()) / runs;
}

// The words in a line of choices.
constexpr const char* op_names[] = {"nt", "nn", "tn"};
constexpr const char* epilogue_names[] = {"none",      "bias",  "gelu",
                                          "bias_gelu", "dgelu", "column_sums"};
constexpr const char* dtype_names[] = {"fp32", "bf16"};
constexpr const char* operand_names[] = {"fp32",      "bf16",      "e4m3/fp32",
                                         "e4m3/bf16", "e5m2/fp32", "e5m2/bf16"};
constexpr const char* residual_names[] = {"-", "residual"};
constexpr const char* tf32_names[] = {"-", "tf32"};
constexpr const char* separate_names[] = {"product", "separate"};

template <class Value, size_t n>
void read_name(std::istream& from, Value& value, const char* const (&names)[n]) {
    std::string word;
    from >> word;
    const auto found = std::find(std::begin(names), std::end(names), word);
    if (found == std::end(names))
        from.setstate(std::ios::failbit);
    else
        value = static_cast<Value>(found - std::begin(names));
}

}  // namespace

/// How many multiprocessors the heuristic counts on where a product leaves some free.
static int32_t sm_target(const Stream& stream, int reserved) {
    const int sms = limits_of(stream).multiprocessors;
    if (reserved >= sms)
        throw Error("parallel.reserved_sms is ", reserved, ", but this GPU has only ", sms,
                    " multiprocessors; choose fewer, or 0");
    return sms - reserved;
}

GemmPlans::Problem GemmPlans::problem_of(const Gemm& args, const KernelSettings& settings) {
    return {.op = args.op,
            .epilogue = args.epilogue,
            .in = args.in,
            .out = args.out,
            .fp8 = args.fp8,
            .residual = args.residual != nullptr,
            .tf32 = settings.tf32 && args.in == DType::fp32 && args.fp8 == Fp8Operands::none,
            .reserved_sms = settings.reserved_sms,
            .m = args.m,
            .n = args.n,
            .k = args.k,
            .alignment = {alignment_of(args.a), alignment_of(args.b), alignment_of(args.residual),
                          alignment_of(args.d), alignment_of(args.vector)},
            .batch = args.batch,
            .strides = args.batch > 1 ? args.strides : std::array<int64_t, 3>{}};
}

/// Fills in everything but the algorithm and the addresses.
void GemmPlans::describe(Plan& plan, const Problem& p) {
    const bool a_transposed = p.op == GemmOp::tn, b_transposed = p.op == GemmOp::nt;
    require(cublas_lt().init_desc(&plan.operation, sizeof plan.operation, compute_type(p.tf32),
                                  CUDA_R_32F),
            "describing a product");
    set(&plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(&plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(&plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, cublas_epilogue(p.epilogue));
    if (reads_bias(p.epilogue))
        set(&plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(p.out));
    if (p.epilogue == Epilogue::column_sums)
        set(&plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F);
    if (has_aux(p.epilogue)) set(&plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n);

    const auto layout = [](cublasLtMatrixLayoutOpaque_t& matrix, cudaDataType_t type, int64_t rows,
                           int64_t cols) {
        require(cublas_lt().init_layout(&matrix, sizeof matrix, type, static_cast<uint64_t>(cols),
                                        static_cast<uint64_t>(rows), cols),
                "describing a matrix");
    };
    const Fp8Operands of_b = p.fp8 == Fp8Operands::none ? p.fp8 : Fp8Operands::e4m3;
    layout(plan.a, cuda_type(p.in, p.fp8), a_transposed ? p.k : p.m, a_transposed ? p.m : p.k);
    layout(plan.b, cuda_type(p.in, of_b), b_transposed ? p.n : p.k, b_transposed ? p.k : p.n);
    layout(plan.d, cuda_type(p.out), p.m, p.n);
    if (p.batch == 1) return;
    cublasLtMatrixLayoutOpaque_t* const matrices[] = {&plan.a, &plan.b, &plan.d};
    for (size_t i = 0; i < 3; ++i)
        set(matrices[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, p.strides[i]);
    set_count(plan, p.batch);
}

void GemmPlans::set_count(Plan& plan, int64_t count) {
    for (cublasLtMatrixLayoutOpaque_t* matrix : {&plan.a, &plan.b, &plan.d})
        set(matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(count));
}

/// Sets the addresses in the plan's descriptor that are not arguments of cublasLtMatmul.
static void set_addresses(cublasLtMatmulDesc_t operation, const Gemm& args) {
    if (args.vector) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.vector);
    if (args.aux) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args.aux);
    // cuBLASLt's heuristic finds algorithms for others too, and each then refuses to run.
    assert(alignment_of(args.a_inverse) == 16 && alignment_of(args.b_inverse) == 16);
    if (args.a_inverse) set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args.a_inverse);
    if (args.b_inverse) set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, args.b_inverse);
}

cublasStatus_t GemmPlans::launch(Stream& stream, const Gemm& args, Plan& plan) {
    const float one = 1, beta = args.accumulate || args.residual ? 1 : 0;
    const void* addend = args.residual ? args.residual : args.d;
    return cublas_lt().matmul(handle_of(stream), &plan.operation, &one, args.b, &plan.b, args.a,
                              &plan.a, &beta, addend, &plan.d, args.d, &plan.d,
                              &plan.algorithm.bits,
                              stream.scratch_for<void>(plan.algorithm.workspace_bytes),
                              plan.algorithm.workspace_bytes, stream_of(stream));
}

std::vector<GemmPlans::Algorithm> GemmPlans::candidates(Stream& stream, Plan& plan,
                                                        const Problem& p) {
    const size_t workspace_bytes = gemm_workspace_bytes(p.batch * p.m, p.n);
    cublasLtMatmulPreferenceOpaque_t preference{};
    require(cublas_lt().init_preference(&preference, sizeof preference), "asking for algorithms");
    const auto alignment = [&](int which) {
        return static_cast<uint32_t>(p.alignment[static_cast<size_t>(which)]);
    };
    set(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace_bytes});
    set(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, allowed_reductions);
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(1));
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(0));
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        p.residual ? alignment(2) : alignment(3));
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(3));

    cublasLtMatmulHeuristicResult_t found[most_candidates] = {};
    int count = 0;
    const cublasStatus_t status =
        cublas_lt().algo_heuristic(handle_of(stream), &plan.operation, &plan.b, &plan.a, &plan.d,
                                   &plan.d, &preference, most_candidates, found, &count);
    // Either status can mean that the epilogue is not available for these shapes.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
    require(status, "asking for algorithms");
    std::vector<Algorithm> usable;
    for (int i = 0; i < count; ++i)
        if (is_usable(found[i].algo, found[i], workspace_bytes))
            usable.push_back({found[i].algo, found[i].workspaceSize});
    return usable;
}

std::optional<GemmPlans::Algorithm> GemmPlans::fastest_of(
    Stream& stream, const Gemm& args, Plan plan, const std::vector<Algorithm>& candidates) {
    const size_t best = fastest(candidates.size(), [&](size_t i, int runs) {
        plan.algorithm = candidates[i];
        bool ran = true;  // cuBLASLt does not guarantee that its heuristic's result runs
        const double seconds = seconds_per_run(stream, runs, [&] {
            ran = ran && launch(stream, args, plan) == CUBLAS_STATUS_SUCCESS;
        });
        return ran ? seconds : std::numeric_limits<double>::infinity();
    });
    if (best == candidates.size()) return {};
    return candidates[best];
}

std::optional<GemmPlans::Algorithm> GemmPlans::first_that_runs(
    Stream& stream, const Gemm& args, Plan& plan, const std::vector<Algorithm>& candidates) {
    for (const Algorithm& candidate : candidates) {
        plan.algorithm = candidate;
        const cublasStatus_t status = launch(stream, args, plan);
        if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)
            continue;
        require(status, "trying a product in fp8");
        return candidate;
    }
    return {};
}

GemmPlans::Use GemmPlans::faster_of(Stream& stream, const Gemm& args, Plan plan,
                                    const SeparateWork& separate) {
    const auto product = [&] { require(launch(stream, args, plan), "timing a product"); };
    const size_t best = fastest(2, [&](size_t i, int runs) {
        return i == 0 ? seconds_per_run(stream, runs, product)
                      : seconds_per_run(stream, runs, separate);
    });
    return best == 0 ? Use::product : Use::separate;
}

bool GemmPlans::take_kept(Stream& stream, Plan& plan, const Problem& problem) const {
    const auto kept = kept_.find(problem);
    if (kept == kept_.end()) return false;
    if (kept->second.separate) {
        plan.use = Use::separate;
        return true;
    }
    const cublasLtMatmulAlgo_t& bits = kept->second.bits;
    cublasLtMatmulHeuristicResult_t checked{};
    const cublasStatus_t status = cublas_lt().algo_check(
        handle_of(stream), &plan.operation, &plan.b, &plan.a, &plan.d, &plan.d, &bits, &checked);
    if (status != CUBLAS_STATUS_SUCCESS ||
        !is_usable(bits, checked, gemm_workspace_bytes(problem.batch * problem.m, problem.n)))
        return false;
    plan.use = Use::product;
    plan.algorithm = {bits, checked.workspaceSize};
    return true;
}

GemmPlans::Plan GemmPlans::make_plan(Stream& stream, const Gemm& args, const Problem& problem,
                                     const SeparateWork* separate) const {
    Plan plan;
    describe(plan, problem);
    if (problem.reserved_sms > 0)
        set(&plan.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
            sm_target(stream, problem.reserved_sms));
    set_addresses(&plan.operation, args);
    if (take_kept(stream, plan, problem)) return plan;

    const std::vector<Algorithm> found = candidates(stream, plan, problem);
    if (found.empty()) return plan;
    if (args.batch > 1) set_count(plan, args.count);
    const bool timed = stream.settings.autotune && !args.accumulate;
    // Without timing, an algorithm that does not run is an error of run(), but not for a product in
    // fp8, which is tried.
    std::optional<Algorithm> chosen = found.front();
    if (timed && found.size() > 1) {
        chosen = fastest_of(stream, args, plan, found);
    } else if (problem.fp8 != Fp8Operands::none) {
        chosen = first_that_runs(stream, args, plan, found);
        plan.has_added = chosen && args.accumulate;
    }
    if (!chosen) return plan;
    plan.use = Use::product;
    plan.algorithm = *chosen;
    if (separate && stream.settings.epilogues == KernelSettings::Epilogues::automatic) {
        if (timed)
            plan.use = faster_of(stream, args, plan, *separate);
        else if (problem.epilogue == Epilogue::column_sums)
            plan.use = Use::separate;
    }
    return plan;
}

GemmPlans::GemmPlans(const Queue&) {
    if (const cublasStatus_t status = cublas_lt().create(&handle_); status != CUBLAS_STATUS_SUCCESS)
        throw Error("cuBLASLt does not start: ", cublas_lt().status_string(status));
}
GemmPlans::~GemmPlans() { cublas_lt().destroy(handle_); }

GemmPlans::Plan& GemmPlans::plan_of(Stream& stream, const Gemm& args,
                                    const SeparateWork* separate) {
    const Problem problem = problem_of(args, stream.settings);
    auto found = plans_.find(problem);
    if (found == plans_.end())
        found = plans_.emplace(problem, make_plan(stream, args, problem, separate)).first;
    return found->second;
}

bool GemmPlans::has_product(Stream& stream, const Gemm& args) {
    Gemm plain = args;
    plain.epilogue = Epilogue::none;
    plain.vector = plain.aux = nullptr;
    return plan_of(stream, plain, nullptr).use == Use::product;
}

bool GemmPlans::run(Stream& stream, const Gemm& args, const SeparateWork* separate) {
    // cuBLASLt's requirements for aux. They are checked here because some versions notice a
    // violation only when the product runs.
    if (has_aux(args.epilogue) && (args.n % 8 != 0 || alignment_of(args.aux) < 16)) return false;

    Plan& plan = plan_of(stream, args, separate);
    if (std::exchange(plan.has_added, false)) return true;
    if (plan.use == Use::product) {
        set_addresses(&plan.operation, args);
        if (args.batch > 1) set_count(plan, args.count);
        require(launch(stream, args, plan), "multiplying matrices");
    } else if (args.epilogue == Epilogue::none) {
        throw Error("cuBLASLt ", cublas_lt().version(),
                    " has no algorithm for a matrix product of ", args.m, "×", args.k, " by ",
                    args.k, "×", args.n, " (", name_of(args.in), " to ", name_of(args.out), ")");
    }
    return plan.use == Use::product;
}

void GemmPlans::write(std::string& text, const Problem& p, const Kept& kept) {
    std::ostringstream line;
    line << op_names[static_cast<int>(p.op)] << ' '
         << operand_names[2 * static_cast<int>(p.fp8) + static_cast<int>(p.in)] << ' '
         << dtype_names[static_cast<int>(p.out)] << ' '
         << epilogue_names[static_cast<int>(p.epilogue)] << ' ' << residual_names[p.residual] << ' '
         << tf32_names[p.tf32] << ' ' << p.m << ' ' << p.n << ' ' << p.k;
    for (int alignment : p.alignment) line << ' ' << alignment;
    line << ' ' << separate_names[kept.separate] << std::hex;
    if (!kept.separate)
        for (uint64_t word : kept.bits.data) line << ' ' << word;
    if (p.reserved_sms > 0 || p.batch > 1) line << ' ' << p.reserved_sms;
    if (p.batch > 1) line << ' ' << p.batch;
    for (size_t i = 0; p.batch > 1 && i < p.strides.size(); ++i) line << ' ' << p.strides[i];
    text += line.str() + '\n';
}

std::string GemmPlans::choices() const {
    std::map<Problem, Kept> chosen = kept_;
    for (const auto& [problem, plan] : plans_)
        if (plan.use != Use::impossible) chosen[problem] = plan.kept();
    std::string text;
    for (const auto& [problem, kept] : chosen) write(text, problem, kept);
    return text;
}

bool GemmPlans::Kept::operator==(const Kept& other) const {
    return separate == other.separate &&
           (separate || std::ranges::equal(bits.data, other.bits.data));
}

std::map<GemmPlans::Problem, GemmPlans::Kept> GemmPlans::read(const std::string& text) {
    std::map<Problem, Kept> all;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream from(line);
        Problem p{};
        Kept kept;
        read_name(from, p.op, op_names);
        int operands = 0;
        read_name(from, operands, operand_names);
        p.in = static_cast<DType>(operands % 2), p.fp8 = static_cast<Fp8Operands>(operands / 2);
        read_name(from, p.out, dtype_names);
        read_name(from, p.epilogue, epilogue_names);
        read_name(from, p.residual, residual_names);
        read_name(from, p.tf32, tf32_names);
        from >> p.m >> p.n >> p.k;
        for (int& alignment : p.alignment) from >> alignment;
        read_name(from, kept.separate, separate_names);
        from >> std::hex;
        if (!kept.separate)
            for (uint64_t& word : kept.bits.data) from >> word;
        if (from && !from.eof()) from >> p.reserved_sms;
        if (from && !from.eof()) from >> p.batch >> p.strides[0] >> p.strides[1] >> p.strides[2];
        std::string rest;
        if (!from || from >> rest)
            throw Error("The choices of matrix algorithms are damaged in the line \"", line,
                        "\"; remove them to choose again.");
        all[p] = kept;
    }
    return all;
}

void GemmPlans::set_choices(const std::string& text) {
    kept_ = read(text);
    plans_.clear();
}

bool GemmPlans::unite_choices(const std::vector<std::string>& texts) {
    std::map<Problem, Kept> all;
    for (const std::string& text : texts) all.merge(read(text));
    kept_ = std::move(all);
    return std::erase_if(plans_, [&](const auto& planned) {
               const auto& [problem, plan] = planned;
               const auto kept = kept_.find(problem);
               return kept != kept_.end() && !(kept->second == plan.kept());
           }) > 0;
}

bool can_multiply(Stream& stream, const Gemm& args) {
    return stream.queue->kept<GemmPlans>().has_product(stream, args);
}

bool gemm(Stream& stream, const Gemm& args) {
    return stream.queue->kept<GemmPlans>().run(stream, args, nullptr);
}

bool gemm(Stream& stream, const Gemm& args, const SeparateWork& separate) {
    if (stream.settings.epilogues != KernelSettings::Epilogues::separate &&
        stream.queue->kept<GemmPlans>().run(stream, args, &separate))
        return true;
    separate();
    return false;
}

}  // namespace train_gpt::cuda
