// An entry of a model's parameter registry.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/range.h"

namespace train_gpt {

/// How tensor parallelism cuts a tensor: along `axis` (0: rows, 1: columns), each section for
/// itself. Sections are extents along the axis, in order, and need not be equal (q | k | v with
/// grouped heads, gate | up). Each rank gets an equal part of a section; or if `multiple` is more
/// than 1, a multiple of it, which is padded where the section ends (the rows of a vocabulary, for
/// the matrix products).
struct TensorSplit {
    int axis = 0;
    std::vector<int64_t> sections;
    int64_t multiple = 1;
};

/// The number of a tensor-parallel rank, and how many such ranks there are.
struct TensorRank {
    int rank = 0, ranks = 1;

    bool operator==(const TensorRank&) const = default;
};

/// Elements that are consecutive in a tensor and in the memory of a rank that holds a part of it.
struct HeldRun {
    int64_t held = 0, logical = 0, n = 0;  // the first one's place in memory and in the tensor

    bool operator==(const HeldRun&) const = default;
};

/// What an optimizer may treat as a whole.
enum class Update : uint8_t {
    elements,  // each element for itself
    matrix,    // the matrices that matrices_of() names
    balance,   // a router's selection bias: from counts (kernels/experts/balance.h), not a gradient
};

/// A tensor of Hugging Face's files that holds the next `rows` rows of one of ours.
struct StoredTensor {
    std::string name;         // without the family's prefix
    int64_t rows = 0;         // of ours
    bool transposed = false;  // each matrix is stored as [in, out] (Conv1D)
    /// The rows are so many matrices of equal size, which files stack along a first axis of their
    /// own; 0: one matrix without this axis.
    int64_t stacked = 0;
    /// The two halves of each matrix's rows take turns in files: gate 0, up 0, gate 1, up 1, …
    bool interleaved = false;

    bool reordered() const { return transposed || interleaved; }
    int64_t matrix_rows() const { return stacked > 0 ? rows / stacked : rows; }
};

/// Shapes are as in memory: a linear weight is [out, in].
struct Parameter {
    std::string name;             // in optimizer files and messages
    std::vector<int64_t> shape;   // logical, of one or two extents
    std::vector<int64_t> padded;  // in memory; rows beyond the logical ones are zero and stay zero
    /// The tensor-parallel rank whose memory has the tensor, or that rank's part of a split tensor.
    TensorRank held_by = {};
    int unit = 0;  // the group it is acquired, reduced and gathered with
    /// A sweep computes the gradients of consecutive units for a micro-batch, from the last unit
    /// down, without other gradients between them. Units of different sweeps do not share a bucket.
    int sweep = 0;
    bool is_vocabulary = false;  // a row for each token; exact sums have one grid for all
    uint32_t id = 0;             // its place in the whole model; keys its initial values
    bool decay = false;          // weight decay applies
    Update update = Update::elements;
    int64_t head_rows = 0;             // of each head, in the rows of q, k and v
    int64_t matrix_rows = 0;           // of each matrix, where rows are not split: an expert's
    int router = -1;                   // Update::balance: which of the model's routers
    std::optional<TensorSplit> split;  // none: each tensor-parallel rank holds all of it
    /// A tensor-parallel rank's gradient of a whole tensor covers only its rows or heads, so that
    /// the ranks add theirs up.
    bool adds_over_tensor = false;
    /// Name of the parameter of another stage that holds the same values; empty if there is none.
    /// The gradients of both are added up, and the norm counts the other one.
    std::string tied_to;
    bool has_copy = false;             // another stage's parameter is tied to this one
    std::vector<StoredTensor> stored;  // they cover the rows, in order
    /// The tensors that files of some programs have instead of all of `stored`; empty: all files
    /// have `stored`. Tensors in this list are never reordered.
    std::vector<StoredTensor> or_stored;
    std::vector<std::string> aliases;  // further names of a tensor with the same values in files
    float init_mean = 0, init_std = 0;

    /// Whether files hold the elements of a matrix in another order; all of `stored` are alike.
    bool reordered() const { return stored[0].reordered(); }
    int64_t rows() const { return shape[0]; }                 // logical
    int64_t cols() const { return numel() / shape[0]; }       // 1 for a vector
    int64_t numel() const { return product(shape); }          // logical
    int64_t padded_numel() const { return product(padded); }  // in memory
    bool is_part() const { return split && held_by.ranks > 1; }
    /// The logical elements in memory, which come first.
    int64_t held_numel() const;

  private:
    static int64_t product(const std::vector<int64_t>& extents) {
        int64_t n = 1;
        for (const int64_t extent : extents) n *= extent;
        return n;
    }
};

/// The extent in memory of each rank's part of so many rows or columns. If `multiple` does not
/// divide their parts, these are padded.
int64_t part_extent(int64_t extent, int64_t multiple, int ranks);

/// What rank `rank` of `ranks` tensor-parallel ranks holds of a parameter: ranges along its split
/// axis, one for each section; the whole first axis if it is not split. Throws Error for a section
/// that cannot be cut into equal parts, or that leaves a rank nothing.
std::vector<Range> part_of(const Parameter& parameter, int rank, int ranks);

/// The parameter in the memory of that rank: its `padded` shape is the part's.
Parameter parameter_held_by(Parameter whole, const TensorRank& rank);

/// The logical rows of each matrix of a parameter with Update::matrix, in order: the sections of
/// its rows (q, k, v; gate, up; each expert's), or all. heads: of q, k and v each head's.
std::vector<Range> matrices_of(const Parameter& parameter, bool heads);

/// All logical elements that memory holds. They are in the same order in memory as in the tensor;
/// a run is as long as it can be.
std::vector<HeldRun> held_runs(const Parameter& parameter);

/// The parts of ascending runs with places in `memory`, or of elements in `logical`.
std::vector<HeldRun> runs_in_memory(const std::vector<HeldRun>& runs, const Range& memory);
std::vector<HeldRun> runs_in_tensor(const std::vector<HeldRun>& runs, const Range& logical);

}  // namespace train_gpt
