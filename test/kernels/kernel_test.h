// What the tests of kernels share: the device they run on, tensors that own their memory and start
// poisoned, a stream, and error bounds that follow from the dtype.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include "base/tensor.h"
#include "device/stream.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt {

/// A tensor that owns its memory on the device under test, where the host can read and write it
/// too. Without values, all its bits are ones: a NaN in both floating-point dtypes. Reading waits
/// for the device.
class Buffer {
  public:
    Buffer(DType dtype, std::initializer_list<int64_t> shape)
        : tensor_(nullptr, dtype, shape), memory_(tensor_.bytes()) {
        tensor_.data = memory_.data();
    }
    Buffer(DType dtype, std::initializer_list<int64_t> shape, const std::vector<float>& values)
        : Buffer(dtype, shape) {
        REQUIRE(static_cast<int64_t>(values.size()) == tensor_.numel());
        for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    Tensor tensor() const { return tensor_; }
    operator Tensor() const { return tensor_; }
    GradientSink sink(bool accumulate) const { return {tensor_.data, tensor_.dtype, accumulate}; }
    template <class T>
    T* as() const {
        memory_.settle();
        return tensor_.as<T>();
    }

    void set(size_t i, float value) {
        if (tensor_.dtype == DType::bf16) {
            tensor_.as<bf16>()[i] = bf16(value);
        } else {
            tensor_.as<float>()[i] = value;
        }
    }
    double operator[](size_t i) const {
        memory_.settle();
        return stored(i);
    }
    /// The elements as stored, exactly.
    std::vector<double> values() const {
        memory_.settle();
        std::vector<double> result(static_cast<size_t>(tensor_.numel()));
        for (size_t i = 0; i < result.size(); ++i) result[i] = stored(i);
        return result;
    }
    std::string bytes() const {
        memory_.settle();
        return {static_cast<const char*>(tensor_.data), tensor_.bytes()};
    }

  private:
    double stored(size_t i) const {
        return tensor_.dtype == DType::bf16 ? to_float(tensor_.as<bf16>()[i])
                                            : tensor_.as<float>()[i];
    }

    Tensor tensor_;
    TestMemory memory_;
};

/// A stream on the device under test with exactly this much scratch, poisoned.
class TestStream {
  public:
    explicit TestStream(size_t scratch_bytes = 0, const KernelSettings& settings = {})
        : scratch_(scratch_bytes), stream_(test_device()) {
        stream_.settings = settings;
        stream_.scratch = scratch_.data();
        stream_.scratch_bytes = scratch_bytes;
    }
    operator Stream&() { return stream_; }

  private:
    TestMemory scratch_;
    Stream stream_;
};

/// Values rounded as a tensor of the dtype stores them.
inline std::vector<double> stored_as(DType dtype, std::vector<double> values) {
    for (double& value : values) {
        const float rounded = static_cast<float>(value);
        value = dtype == DType::bf16 ? to_float(bf16(rounded)) : rounded;
    }
    return values;
}

/// Errors of results against the float64 reference, compared with the errors of a straightforward
/// computation in fp32 that is stored in the dtype ("plain").
class Errors {
  public:
    void add(const std::vector<double>& ours, const std::vector<double>& plain,
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
    /// Our errors may be at most 2.5 times the plain ones, both in the root mean square and in the
    /// worst element, plus one rounding of bf16 or four of fp32 (twice that in the worst element),
    /// because short sums may be exact. Tensor cores cut their sums off where additions round
    /// them, so `cut_off` such sums, one after the other, may add half a unit in the last place
    /// each. A NaN fails.
    void check(const std::string& what, DType dtype, int64_t cut_off = 0) const {
        const double n = static_cast<double>(std::max<size_t>(count_, 1));
        const double rounding =
            (dtype == DType::bf16 ? 0x1p-9 : 0x1p-22) + static_cast<double>(cut_off) * 0x1p-24;
        CAPTURE(what, name_of(dtype), count_, ours_worst_, plain_worst_, largest_);
        CHECK(finite_);
        CHECK(std::sqrt(ours_sum_ / n) <=
              2.5 * std::sqrt(plain_sum_ / n) + rounding * std::sqrt(reference_sum_ / n));
        CHECK(ours_worst_ <= 2.5 * plain_worst_ + 2 * rounding * largest_);
    }

  private:
    double ours_sum_ = 0, plain_sum_ = 0, reference_sum_ = 0, ours_worst_ = 0, plain_worst_ = 0,
           largest_ = 0;
    size_t count_ = 0;
    bool finite_ = true;
};

/// Judges results of many elements.
inline void check_accuracy(const std::string& what, DType dtype, const std::vector<double>& ours,
                           const std::vector<double>& plain, const std::vector<double>& reference,
                           int64_t cut_off = 0) {
    Errors errors;
    errors.add(ours, plain, reference);
    errors.check(what, dtype, cut_off);
}

/// Judges the results of several problems. The plain errors of a result with few elements may all
/// be small by chance, so such a result is judged only at the end, together with all others of its
/// name.
class Accuracy {
  public:
    Accuracy() = default;
    Accuracy(const Accuracy&) = delete;
    Accuracy& operator=(const Accuracy&) = delete;
    ~Accuracy() noexcept(false) {  // with Catch2's -a, a failed CHECK throws
        if (std::uncaught_exceptions() > 0) return;
        for (const auto& [of, found] : all_)
            found.errors.check("all " + of.first, of.second, found.cut_off);
    }
    void check(const std::string& what, DType dtype, const std::vector<double>& ours,
               const std::vector<double>& plain, const std::vector<double>& reference,
               int64_t cut_off = 0) {
        All& all = all_[{what, dtype}];
        all.errors.add(ours, plain, reference);
        all.cut_off = std::max(all.cut_off, cut_off);
        if (reference.size() >= 64) check_accuracy(what, dtype, ours, plain, reference, cut_off);
    }

  private:
    struct All {
        Errors errors;
        int64_t cut_off = 0;
    };
    std::map<std::pair<std::string, DType>, All> all_;
};

/// run() returns the bytes of all results. They must be the same with teams of 1, 2, 3 and 7
/// threads; on CUDA these are repeated runs.
inline void check_thread_independence(const std::function<std::string()>& run) {
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
