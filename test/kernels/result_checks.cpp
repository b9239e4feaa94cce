#include "test/kernels/result_checks.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include <omp.h>

#include "test/catch.h"

namespace train_gpt {

void Errors::add(const std::vector<double>& ours, const std::vector<double>& plain,
                 const std::vector<double>& reference) {
    REQUIRE(ours.size() == reference.size());
    REQUIRE(plain.size() == reference.size());
    for (size_t i = 0; i < reference.size(); ++i) {
        const double ours_error = std::abs(ours[i] - reference[i]),
                     plain_error = std::abs(plain[i] - reference[i]);
        finite_ = finite_ && std::isfinite(ours[i]);
        ours_sum_ += ours_error * ours_error;
        plain_sum_ += plain_error * plain_error;
        reference_sum_ += reference[i] * reference[i];
        ours_worst_ = std::max(ours_worst_, ours_error);
        plain_worst_ = std::max(plain_worst_, plain_error);
        largest_ = std::max(largest_, std::abs(reference[i]));
    }
    count_ += reference.size();
}

void Errors::check(const std::string& what, DType dtype, int64_t cut_off) const {
    const double n = static_cast<double>(std::max<size_t>(count_, 1));
    const double rounding =
        (dtype == DType::bf16 ? 0x1p-9 : 0x1p-22) + static_cast<double>(cut_off) * 0x1p-24;
    CAPTURE(what, name_of(dtype), count_, ours_worst_, plain_worst_, largest_);
    CHECK(finite_);
    CHECK(std::sqrt(ours_sum_ / n) <=
          2.5 * std::sqrt(plain_sum_ / n) + rounding * std::sqrt(reference_sum_ / n));
    CHECK(ours_worst_ <= 2.5 * plain_worst_ + 2 * rounding * largest_);
}

void check_accuracy(const std::string& what, DType dtype, const std::vector<double>& ours,
                    const std::vector<double>& plain, const std::vector<double>& reference,
                    int64_t cut_off) {
    Errors errors;
    errors.add(ours, plain, reference);
    errors.check(what, dtype, cut_off);
}

Accuracy::~Accuracy() noexcept(false) {  // with Catch2's -a, a failed CHECK throws
    if (std::uncaught_exceptions() > 0) return;
    for (const auto& [of, found] : all_)
        found.errors.check("all " + of.first, of.second, found.cut_off);
}

void Accuracy::check(const std::string& what, DType dtype, const std::vector<double>& ours,
                     const std::vector<double>& plain, const std::vector<double>& reference,
                     int64_t cut_off) {
    All& all = all_[{what, dtype}];
    all.errors.add(ours, plain, reference);
    all.cut_off = std::max(all.cut_off, cut_off);
    if (reference.size() >= 64) check_accuracy(what, dtype, ours, plain, reference, cut_off);
}

void check_thread_independence(const std::function<std::string()>& run) {
    const int threads_before = omp_get_max_threads();
    omp_set_num_threads(1);
    const std::string expected = run();
    for (int threads : {2, 3, 7}) {
        omp_set_num_threads(threads);
        CAPTURE(threads);
        CHECK((run() == expected));
    }
    omp_set_num_threads(threads_before);
}

}  // namespace train_gpt
