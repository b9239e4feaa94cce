// The grids of exact sums (kernels/exact_sums.h) for the parameters of a store.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "kernels/exact_sums.h"
#include "parallel/state/parameter.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

/// A tensor's grids, and where they are among the model's grids.
struct TensorPlace {
    std::string name;
    int64_t parts = 1;   // of a split tensor, by tensor-parallel rank
    int64_t blocks = 0;  // of each part
    int64_t first_block = 0;
    int64_t first_tensor = 0;  // a part counts as a tensor
};

/// The grids of a model's tensors, one tensor after the other.
class GridLayout {
  public:
    /// model: all parameters of the model, by Parameter::id.
    GridLayout(const std::vector<Parameter>& model, int tensor_ranks);

    /// By Parameter::id.
    const std::vector<TensorPlace>& places() const { return places_; }
    const std::vector<TensorGrids>& tensors() const { return tensors_; }
    int64_t blocks() const { return blocks_; }
    /// The integers that all ranks add up in a step (Grids::sums()).
    int64_t sums() const { return blocks_ + 2 * std::ssize(tensors_) + 1; }

  private:
    std::vector<TensorPlace> places_;
    std::vector<TensorGrids> tensors_;
    int64_t blocks_ = 0;
};

/// Every rank has the grids of the whole model: of all stages of a pipeline, and of the parts of
/// all tensor-parallel ranks. So whatever a rank holds, all ranks add up the same integers, and
/// choose the same grids for the next step.
class Grids {
  public:
    /// model: all parameters of the model, by Parameter::id; `buffers` has parameters of this rank.
    Grids(Arena& arena, const ParameterBuffers& buffers, const std::vector<Parameter>& model);

    const GridLayout& layout() const { return layout_; }

    // ---- A micro-batch: what kernels do with the gradient of parameter i ------------------------

    /// The gradient of a micro-batch is rounded, and becomes the sums or is added to them.
    /// `number`: of the contribution; later ones have greater numbers.
    ExactSegment rounded(int i, bool accumulate, int64_t number) const;
    /// The gradient's largest elements are found. The first grids are made of them.
    LargestSegment largest_of(int i) const;
    /// Rows are rounded where they are computed, and count_largest() follows; or only looked at.
    ExactRows rows_of(int i) const;
    LargestRow largest_row_of(int i, int64_t number) const;
    ExactRows looked_at_rows_of(int i) const;

    // ---- A step ---------------------------------------------------------------------------------

    /// All sums are 0.
    void begin_step(Stream& stream);
    /// Adds the squares of what this rank owns of a bucket, if it counts for the norm.
    void add_squares(Stream& stream, size_t bucket);
    /// Exponents of a piece's blocks, for AdamW.
    const int32_t* exponents_of(const ParameterBuffers::Piece& piece) const;
    /// The step's integers [layout().sums()], which all ranks add up: S of each block, then for
    /// each tensor the blocks that are not finite, and the sum of squares; then the elements that
    /// were rounded to 0.
    int64_t* sums() const { return sums_; }
    int64_t* lost() const { return squares() + tensors(); }
    /// The number of the first contribution of this rank whose gradient was not finite, after all
    /// work on the device; nothing if there is none.
    std::optional<int64_t> first_not_finite() const;
    void forget_not_finite();
    /// From sums(): whether any sum has overflowed, and the sum of squares of each tensor
    /// of the layout, which is NaN for a tensor with blocks that are not finite.
    void finish(Stream& stream, double* squares, int32_t* overflow);
    /// The next step's grids, after AdamW. `contributions`: micro-batches of a step.
    void update(Stream& stream, int64_t contributions, const int32_t* overflow);

    // ---- The first step -------------------------------------------------------------------------

    /// The largest elements [layout().blocks()] of a micro-batch, of which all ranks take the
    /// maximum.
    float* largest() const { return largest_; }
    void forget_largest(Stream& stream);
    /// The first grids, from largest().
    void begin(Stream& stream, int64_t contributions);

    // ---- Files ----------------------------------------------------------------------------------

    /// All exponents [layout().blocks()], after all work on the device.
    std::vector<int32_t> exponents() const;
    /// The device's memory of all exponents, one after the other.
    std::span<const int32_t> exponents_on_device() const {
        return {exponents_, static_cast<size_t>(layout_.blocks())};
    }
    /// Whether there are grids: from begin() or set_exponents().
    bool known() const { return known_; }
    void set_exponents(Stream& stream, std::span<const int32_t> exponents);

  private:
    int64_t tensors() const { return std::ssize(layout_.tensors()); }
    /// Which of the layout's tensors this rank holds as parameter i.
    int64_t tensor_of(int i) const;
    int64_t first_block_of(int i) const;
    int64_t* maxima() const { return sums_; }
    int64_t* not_finite() const { return sums_ + layout_.blocks(); }
    int64_t* squares() const { return not_finite() + tensors(); }

    const ParameterBuffers& buffers_;
    GridLayout layout_;
    bool known_ = false;
    int32_t *exponents_ = nullptr, *scales_ = nullptr;
    float* largest_ = nullptr;
    int64_t* sums_ = nullptr;
    uint32_t* largest_row_ = nullptr;  // of the rows that have been added last
    int32_t* stale_ = nullptr;         // an earlier step has overflowed
    int64_t* first_not_finite_ = nullptr;
    std::vector<std::vector<ExactNormSegment>> norm_segments_;  // of each bucket
};

}  // namespace train_gpt
