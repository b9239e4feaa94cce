// What the tests of kernels share: the device they run on, owned tensors that start poisoned, a stream, and error bounds
// that come from the dtype.
#pragma once
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include "kernels/device.h"
#include "kernels/tensor.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt {

/// A tensor that owns its memory on the device under test, where the host can read and write it too. Without values its
/// bytes are all ones: a NaN in both floating dtypes. Reading waits for the device.
class Buffer {
  public:
    Buffer(DType dtype, std::initializer_list<int64_t> shape) : tensor_(nullptr, dtype, shape), memory_(tensor_.bytes()) {
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
        return tensor_.dtype == DType::bf16 ? to_float(tensor_.as<bf16>()[i]) : tensor_.as<float>()[i];
    }

    Tensor tensor_;
    TestMemory memory_;
};

/// A stream on the device under test with exactly so much scratch, poisoned.
class TestStream {
  public:
    explicit TestStream(size_t scratch_bytes = 0) : scratch_(scratch_bytes), stream_(test_device()) {
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

/// `ours` must be no worse than 2.5 times `plain` (a straightforward computation in fp32, stored in dtype) as measured
/// against the float64 reference, in the root mean square and at the worst element; plus one rounding of bf16 or four of
/// fp32, because few plain results, or those of short sums, may be exact by luck. A NaN fails.
inline void check_accuracy(const std::string& what, DType dtype, const std::vector<double>& ours,
                           const std::vector<double>& plain, const std::vector<double>& reference) {
    REQUIRE(ours.size() == reference.size());
    REQUIRE(plain.size() == reference.size());
    double ours_sum = 0, plain_sum = 0, reference_sum = 0, ours_worst = 0, plain_worst = 0,
           largest = 0;
    bool finite = true;
    for (size_t i = 0; i < reference.size(); ++i) {
        const double ours_error = std::abs(ours[i] - reference[i]),
                     plain_error = std::abs(plain[i] - reference[i]);
        finite = finite && std::isfinite(ours[i]);
        ours_sum += ours_error * ours_error;
        plain_sum += plain_error * plain_error;
        reference_sum += reference[i] * reference[i];
        ours_worst = std::max(ours_worst, ours_error);
        plain_worst = std::max(plain_worst, plain_error);
        largest = std::max(largest, std::abs(reference[i]));
    }
    const double n = static_cast<double>(std::max<size_t>(reference.size(), 1));
    const double rounding = dtype == DType::bf16 ? 0x1p-9 : 0x1p-22;
    CAPTURE(what, reference.size(), ours_worst, plain_worst, largest);
    CHECK(finite);
    CHECK(std::sqrt(ours_sum / n) <=
          2.5 * std::sqrt(plain_sum / n) + rounding * std::sqrt(reference_sum / n));
    CHECK(ours_worst <= 2.5 * plain_worst + 2 * rounding * largest);
}

/// run() gives the bytes of all results; they must be the same with teams of 1, 2, 3 and 7 threads, and on CUDA in
/// repeated runs.
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
