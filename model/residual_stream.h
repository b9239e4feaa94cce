// The residual stream: the sum that runs through all blocks. Each part of a block reads a norm of
// it and adds a product to it.
//
// Without other tensor-parallel ranks, a product adds the stream and its bias in its epilogue.
// Tensor-parallel ranks (parallel/axes/tensor.h) share the products: a rank has some of the columns
// of a part's first product, and some of the rows of the part's last product. The stream and its
// norms have the rank's rows. The norms' outputs are gathered before the products that read them.
// The products into the stream are summed over the ranks, and the norm after such a product adds
// sum, stream and bias.
#pragma once
#include <cstdint>

#include "device/memory.h"
#include "device/stream.h"
#include "kernels/linear/linear.h"
#include "kernels/norm.h"
#include "parallel/axes/tensor.h"
#include "parallel/state/gradients.h"

namespace train_gpt {

/// A term of the stream that is still to be added, by the next norm or by settle(); nothing where a
/// product has added it.
struct Addends {
    Tensor sum = {}, residual = {}, bias = {};

    explicit operator bool() const { return bool(sum); }
};

/// One of a block's norms, or the final one, with its weights.
struct StreamNorm {
    Tensor out, stats;
    Tensor x;                // its input; computed first where there are Addends
    Tensor w, b = {};        // b may be absent
    Tensor out_rows = {};    // keeps this rank's rows of `out`, unless `out` keeps all
    Fp8Output rounded = {};  // receives `out` in fp8 instead, in the same memory
};

/// What a norm's backward pass (kernels/norm.h) reads and adds to.
struct NormGradients {
    Tensor dres, dy;
    GradientSink dw, db = {};
    GradientSink dbias = {};
    bool overwrite_dres = false;
};

class ResidualStream {
  public:
    struct Shape {
        int64_t rows, channels;  // tokens, and their width
        DType dtype;
        Norm norm;
        double norm_epsilon;
    };
    /// Takes buffers from the arena if several ranks share the products.
    ResidualStream(TensorGroup& tensor, const Shape& shape, Arena& arena);
    /// The stream of a model on one rank, for any number of tokens.
    ResidualStream(TensorGroup& alone, Norm norm, double norm_epsilon)
        : tensor_(alone), norm_(norm), norm_epsilon_(static_cast<float>(norm_epsilon)) {}

    TensorGroup& tensor() const { return tensor_; }
    bool is_split() const { return tensor_.is_split(); }
    /// Memory for a norm's output of all rows that is gathered again in the backward pass.
    Tensor gathered_norm() const { return gathered_; }

    /// The norm of this rank's rows, after computing its x from the addends; gathers: products wait
    /// for all rows (for_each_chunk).
    void norm(Stream& stream, const StreamNorm& of, const Addends& addends = {},
              bool gathers = true) const;
    /// A norm that no product waits for, of all of this rank's rows at once.
    void norm_of_rows(Stream& stream, const StreamNorm& of, const Addends& addends) const;
    /// The backward pass of a norm of this rank's rows.
    void norm_backward(Stream& stream, const StreamNorm& of, const NormGradients& g) const;
    /// Gathers a norm's rows again, for products of the backward pass.
    void gather_again(Stream& stream, const StreamNorm& of) const;

    /// A product into the stream: out = residual + x·wᵀ + bias.
    struct Product {
        Tensor out, x, residual;
        Operand w;
        Tensor bias = {};
        Fp8Matrix rounded_x = {};  // without other ranks; x then has no values
        /// The weights of the product are gone before the addends are added.
        bool keeps_bias = false;
    };
    /// Computes out, or among several ranks begins its sum and returns what is to be added.
    Addends add(Stream& stream, const Product& product) const;
    /// Like add(), for other work than a product: sum(out, residual) writes residual + its result;
    /// among several ranks a partial sum, without a residual.
    template <class F>
    Addends add_sum(Stream& stream, Tensor out, Tensor residual, const F& sum) const {
        if (!is_split()) {
            sum(out, residual);
            return {};
        }
        sum(products_, Tensor{});
        for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
            tensor_.add_up(stream, sums_, products_, chunk);
        return {.sum = sums_, .residual = residual};
    }
    /// out = the sum of the addends.
    void settle(Stream& stream, const Addends& addends, Tensor out) const;

    /// Calls product(rows) for all M rows, chunk by chunk as they arrive in a lane.
    template <class F>
    void for_each_chunk(Stream& stream, TensorGroup::Lane lane, int64_t M, const F& product) const {
        for (int chunk = 0; chunk < tensor_.chunks(); ++chunk) {
            tensor_.wait(stream, lane, chunk);
            product(tensor_.rows(M, chunk).chunk);
        }
    }

    /// The stream's gradient of all rows, for products of the backward pass. `held` has this rank's
    /// rows, and is returned if there are no other ranks.
    Tensor gather_gradient(Stream& stream, Tensor held) const;
    /// dy = dout·w, the gradient of a norm's output; among several ranks the sum of their products.
    /// rounded: LinearBackwardInput::rounded_dy, on one rank.
    void add_input_gradient(Stream& stream, Tensor dy, Tensor dout, const Operand& w,
                            const Fp8Matrix& rounded = {}) const;

    /// add_partials(): `out` [M / ranks, C] = this rank's rows of the sum of the ranks' partial(),
    /// which is `out` itself without other ranks.
    Tensor partial(Tensor out) const { return is_split() ? products_ : out; }
    void add_partials(Stream& stream, Tensor out) const;
    /// All rows of what the ranks hold; `held` itself without other ranks.
    Tensor gather(Stream& stream, Tensor held) const;
    /// Like gather(), into the memory of partial(), which is free in a backward pass's last step.
    Tensor gather_partial(Stream& stream, Tensor held) const;

  private:
    Tensor gather_into(Stream& stream, Tensor all, Tensor held) const;
    template <class F>
    void for_each_chunk_of_sum(Stream& stream, Tensor sum, const F& product) const;

    TensorGroup& tensor_;
    Norm norm_;
    float norm_epsilon_;
    // Among several ranks: products and gathered rows [M, C], this rank's rows of sums, and a bias
    // [C].
    Tensor products_, gathered_, sums_, bias_;
};

/// Rows of a tensor that may be absent.
inline Tensor rows_of(const Tensor& t, const Range& rows) {
    return t ? t.row_range(rows.first, rows.n) : Tensor{};
}

}  // namespace train_gpt
