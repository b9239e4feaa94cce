// Checks of kernels' results: error bounds that follow from the dtype, and equal bytes with any
// number of threads.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace train_gpt {

/// Errors of results against the float64 reference, compared with the errors of a straightforward
/// computation in fp32 that is stored in the dtype ("plain").
class Errors {
  public:
    void add(const std::vector<double>& ours, const std::vector<double>& plain,
             const std::vector<double>& reference);
    /// Our errors may be at most 2.5 times the plain ones, both in the root mean square and in the
    /// worst element, plus one rounding of bf16 or four of fp32 (twice that in the worst element),
    /// because short sums may be exact. Tensor cores cut their sums off where additions round
    /// them, so `cut_off` such sums, one after the other, may add half a unit in the last place
    /// each. A NaN fails.
    void check(const std::string& what, DType dtype, int64_t cut_off = 0) const;

  private:
    double ours_sum_ = 0, plain_sum_ = 0, reference_sum_ = 0, ours_worst_ = 0, plain_worst_ = 0,
           largest_ = 0;
    size_t count_ = 0;
    bool finite_ = true;
};

/// Judges results of many elements.
void check_accuracy(const std::string& what, DType dtype, const std::vector<double>& ours,
                    const std::vector<double>& plain, const std::vector<double>& reference,
                    int64_t cut_off = 0);

/// Judges the results of several problems. The plain errors of a result with few elements may all
/// be small by chance, so such a result is judged only at the end, together with all others of its
/// name.
class Accuracy {
  public:
    Accuracy() = default;
    Accuracy(const Accuracy&) = delete;
    Accuracy& operator=(const Accuracy&) = delete;
    ~Accuracy() noexcept(false);
    void check(const std::string& what, DType dtype, const std::vector<double>& ours,
               const std::vector<double>& plain, const std::vector<double>& reference,
               int64_t cut_off = 0);

  private:
    struct All {
        Errors errors;
        int64_t cut_off = 0;
    };
    std::map<std::pair<std::string, DType>, All> all_;
};

/// run() returns the bytes of all results. They must be the same with teams of 1, 2, 3 and 7
/// threads; on CUDA these are repeated runs.
void check_thread_independence(const std::function<std::string()>& run);

}  // namespace train_gpt
