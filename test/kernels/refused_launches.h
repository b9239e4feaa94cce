// A cuBLASLt that refuses products in fp8 when they are launched.
#pragma once
#ifdef TRAIN_GPT_CUDA
#include <limits>
#include <set>
#include <utility>

#include "device/cublas_lt.h"

namespace train_gpt {

/// While it lives, launches of products in fp8 are refused, as if cuBLASLt's heuristic had offered
/// algorithms that do not run: the first so many of them, or all of the first product.
class RefusedLaunches {
  public:
    static constexpr int all = std::numeric_limits<int>::max();

    explicit RefusedLaunches(int count, bool of_one_product = false) : saved_(cuda::cublas_lt()) {
        left_ = count, one_product_ = of_one_product, next_ = saved_;
        in_fp8_.clear(), first_ = {};
        cuda::CublasLt& library = cuda::cublas_lt();
        library.init_desc = [](cublasLtMatmulDesc_t operation, size_t bytes,
                               cublasComputeType_t compute, cudaDataType_t scale) {
            in_fp8_.erase(operation);
            return next_.init_desc(operation, bytes, compute, scale);
        };
        library.set_desc = [](cublasLtMatmulDesc_t operation,
                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                              size_t bytes) {
            if (attribute == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) in_fp8_.insert(operation);
            return next_.set_desc(operation, attribute, value, bytes);
        };
        library.matmul = [](cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                            const void* alpha, const void* a, cublasLtMatrixLayout_t of_a,
                            const void* b, cublasLtMatrixLayout_t of_b, const void* beta,
                            const void* c, cublasLtMatrixLayout_t of_c, void* d,
                            cublasLtMatrixLayout_t of_d, const cublasLtMatmulAlgo_t* algorithm,
                            void* workspace, size_t bytes, cudaStream_t stream) {
            if (is_refused(operation, {a, b})) return CUBLAS_STATUS_NOT_SUPPORTED;
            return next_.matmul(handle, operation, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d,
                                algorithm, workspace, bytes, stream);
        };
    }
    ~RefusedLaunches() { cuda::cublas_lt() = saved_; }
    RefusedLaunches(const RefusedLaunches&) = delete;
    RefusedLaunches& operator=(const RefusedLaunches&) = delete;

    static int left() { return left_; }

  private:
    using Operands = std::pair<const void*, const void*>;

    static bool is_refused(const void* operation, const Operands& operands) {
        if (left_ == 0 || !in_fp8_.contains(operation)) return false;
        if (!first_.first) first_ = operands;
        if (one_product_ && operands != first_) return false;
        --left_;
        return true;
    }

    cuda::CublasLt saved_;
    static inline cuda::CublasLt next_;
    static inline int left_ = 0;
    static inline bool one_product_ = false;
    static inline Operands first_;                // of the first product
    static inline std::set<const void*> in_fp8_;  // descriptions of products
};

}  // namespace train_gpt
#endif  // TRAIN_GPT_CUDA
