// A tensor: a view of contiguous, row-major memory owned by something else (an Arena).
#pragma once
#include <cassert>
#include <cstdint>
#include <initializer_list>

#include "base/dtype.h"

namespace train_gpt {

struct Tensor {
    static constexpr int max_rank = 4;

    void* data = nullptr;
    DType dtype = DType::fp32;
    int rank = 0;
    int64_t shape[max_rank] = {};

    Tensor() = default;
    Tensor(void* data_, DType dtype_, std::initializer_list<int64_t> shape_)
        : data(data_), dtype(dtype_), rank(static_cast<int>(shape_.size())) {
        assert(shape_.size() <= max_rank);
        int i = 0;
        for (int64_t extent : shape_) shape[i++] = extent;
    }

    /// False for the default tensor, which stands for an absent optional argument.
    explicit operator bool() const { return data != nullptr; }

    int64_t numel() const {
        int64_t n = 1;
        for (int i = 0; i < rank; ++i) n *= shape[i];
        return n;
    }
    size_t bytes() const { return static_cast<size_t>(numel()) * size_of(dtype); }

    /// The tensor as a matrix: its columns are the last dimension, its rows all others together.
    int64_t cols() const { return rank ? shape[rank - 1] : 1; }
    int64_t rows() const { return rank ? numel() / shape[rank - 1] : 1; }

    template <class T>
    T* as() const {
        assert(dtype == dtype_of<T>);
        return static_cast<T*>(data);
    }

    /// Rows [first, first + count) of the matrix view, as a tensor of shape [count, cols].
    Tensor row_range(int64_t first, int64_t count) const {
        assert(first >= 0 && first + count <= rows());
        auto* start =
            static_cast<char*>(data) + static_cast<size_t>(first * cols()) * size_of(dtype);
        return {start, dtype, {count, cols()}};
    }

    /// The same memory with another shape of the same size.
    Tensor reshaped(std::initializer_list<int64_t> new_shape) const {
        Tensor view(data, dtype, new_shape);
        assert(view.numel() == numel());
        return view;
    }
};

struct ExactRows;  // kernels/exact_sums.h

/// The destination of a weight gradient, provided by parallel/; kernels write weight gradients
/// nowhere else. It has the layout of the weight. accumulate = false (the first micro-batch of a
/// step) overwrites every element that the kernel computes. A default sink stands for an absent
/// optional gradient.
struct GradientSink {
    void* data = nullptr;
    DType dtype = DType::fp32;
    bool accumulate = false;
    /// Set: the rows of the gradient are rounded and added as integers. Only embedding_backward()
    /// takes such a sink. `data` are the sums, int32.
    const ExactRows* exact = nullptr;

    explicit operator bool() const { return data != nullptr; }
};

}  // namespace train_gpt
