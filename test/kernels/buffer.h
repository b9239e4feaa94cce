// Tensors that own their memory and start poisoned, and a stream, on the device under test.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "device/stream.h"
#include "test/kernels/test_device.h"

namespace train_gpt {

/// A tensor that owns its memory on the device under test, where the host can read and write it
/// too. Without values, all its bits are ones: a NaN in both floating-point dtypes. Reading waits
/// for the device.
class Buffer {
  public:
    Buffer(DType dtype, std::initializer_list<int64_t> shape);
    Buffer(DType dtype, std::initializer_list<int64_t> shape, const std::vector<float>& values);
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
    std::vector<double> values() const;
    std::string bytes() const;

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
    explicit TestStream(size_t scratch_bytes = 0, const KernelSettings& settings = {});
    operator Stream&() { return stream_; }

  private:
    TestMemory scratch_;
    Stream stream_;
};

/// Values rounded as a tensor of the dtype stores them.
std::vector<double> stored_as(DType dtype, std::vector<double> values);

}  // namespace train_gpt
