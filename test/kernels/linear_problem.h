// Random linear layers, and what the kernels must give for them.
#pragma once
#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels/linear/linear.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt::linear_problem {

/// One of the ways to multiply matrices on the device under test.
struct Product {
    std::string name;
    KernelSettings settings;
};

std::vector<Product> products();

inline Values rounded_to_float(Values values) { return stored_as(DType::fp32, std::move(values)); }

/// Sums that tensor cores cut off in a product of this depth (Errors::check).
int64_t cut_off_sums(DType dtype, int64_t depth);

/// One layer with random contents: x [M, K], w [N, K], dy [M, N].
struct Layer {
    DType dtype;
    int64_t M, N, K;
    Buffer x, w, bias, residual, dy, input_preact;

    Layer(DType dtype_, int64_t M_, int64_t N_, int64_t K_);

    size_t scratch_bytes(const KernelSettings& settings = {}) const;

    // The three products, without what epilogues add.
    template <class Real>
    Values forward() const {
        return product_reference<Real>(GemmOp::nt, x.values(), w.values(), M, N, K);
    }
    template <class Real>
    Values backward_input() const {
        return product_reference<Real>(GemmOp::nn, dy.values(), w.values(), M, K, N);
    }
    template <class Real>
    Values backward_weight() const {
        return product_reference<Real>(GemmOp::tn, dy.values(), x.values(), N, K, M);
    }
};

struct Extent {
    int64_t M, N, K;
};

/// Odd sizes, sizes around the tiles, and the shapes of small transformers; some have K = 4·N, as
/// an MLP's output projection.
std::vector<Extent> extents();

void for_each_layer(const std::function<void(const Layer&)>& check);

void for_each_product(const std::function<void(const KernelSettings&)>& check);

/// A stream on the CPU, whatever the device under test.
class HostStream {
  public:
    explicit HostStream(size_t scratch_bytes);
    operator Stream&() { return stream_; }

  private:
    std::vector<char> scratch_;
    Stream stream_;
};

}  // namespace train_gpt::linear_problem
