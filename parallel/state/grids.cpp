#include "parallel/state/grids.h"

#include <algorithm>
#include <limits>

#include "device/copy.h"

namespace train_gpt {

namespace {

int64_t blocks_of(int64_t n) { return (n + norm_block - 1) / norm_block; }

size_t bytes_of(int64_t n, size_t size) { return static_cast<size_t>(n) * size; }

}  // namespace

GridLayout::GridLayout(const std::vector<Parameter>& model, int tensor_ranks) {
    for (const Parameter& whole : model) {
        // All parts have the same extents in memory.
        const Parameter part = parameter_held_by(whole, {.rank = 0, .ranks = tensor_ranks});
        const int64_t parts = whole.split ? tensor_ranks : 1,
                      blocks = blocks_of(part.padded_numel());
        places_.push_back({.name = whole.name,
                           .parts = parts,
                           .blocks = blocks,
                           .first_block = blocks_,
                           .first_tensor = std::ssize(tensors_)});
        for (int64_t p = 0; p < parts; ++p) {
            tensors_.push_back({blocks_, blocks, whole.is_vocabulary});
            blocks_ += blocks;
        }
    }
}

Grids::Grids(Arena& arena, const ParameterBuffers& buffers, const std::vector<Parameter>& model)
    : buffers_(buffers),
      layout_(model, buffers.sharding().tensors),
      norm_segments_(buffers.layout().buckets().size()) {
    const int64_t blocks = layout_.blocks(), sums = layout_.sums();
    const auto take = [&]<class T>(T*& to, int64_t n) {
        to = static_cast<T*>(arena.take(bytes_of(n, sizeof(T)), Purpose::workspaces));
    };
    take(exponents_, blocks);
    take(scales_, tensors());
    take(largest_, blocks);
    take(sums_, sums);
    take(largest_row_, 1);
    take(stale_, 1);
    take(first_not_finite_, 1);
    if (arena.is_counting()) return;

    // A warm-up rounds gradients before there are grids.
    const std::vector<int64_t> zeros(static_cast<size_t>(sums));
    const auto fill = [&]<class T>(T* data, int64_t n) {
        copy_now(arena.device(), data, zeros.data(), bytes_of(n, sizeof(T)));
    };
    fill(exponents_, blocks);
    fill(scales_, tensors());
    fill(largest_, blocks);
    fill(sums_, sums);
    fill(largest_row_, 1);
    fill(stale_, 1);
    for (const ParameterBuffers::Piece& piece : buffers.pieces()) {
        if (!piece.is_first_copy) continue;
        const int64_t tensor = tensor_of(piece.parameter);
        norm_segments_[static_cast<size_t>(piece.bucket)].push_back(
            {.sums = reinterpret_cast<const int32_t*>(piece.gradient),
             .n = piece.range.n,
             .exponents = exponents_of(piece),
             .scale = scales_ + tensor,
             .total = squares() + tensor});
    }
}

int64_t Grids::tensor_of(int i) const {
    const Parameter& p = buffers_.parameters()[static_cast<size_t>(i)];
    const TensorPlace& place = layout_.places()[p.id];
    return place.first_tensor + (place.parts > 1 ? buffers_.sharding().tensor : 0);
}

int64_t Grids::first_block_of(int i) const {
    return layout_.tensors()[static_cast<size_t>(tensor_of(i))].first;
}

ExactSegment Grids::rounded(int i, bool accumulate, int64_t number) const {
    const int64_t block = first_block_of(i);
    return {.gradient = buffers_.gradient_of_micro_batch(i),
            .sums = reinterpret_cast<int32_t*>(buffers_.reduced_gradient(i)),
            .n = buffers_.parameters()[static_cast<size_t>(i)].padded_numel(),
            .exponents = exponents_ + block,
            .maxima = maxima() + block,
            .not_finite = not_finite() + tensor_of(i),
            .first_not_finite = first_not_finite_,
            .number = number,
            .lost = lost(),
            .accumulate = accumulate};
}

LargestSegment Grids::largest_of(int i) const {
    return {.gradient = buffers_.gradient_of_micro_batch(i),
            .n = buffers_.parameters()[static_cast<size_t>(i)].padded_numel(),
            .largest = largest_ + first_block_of(i)};
}

ExactRows Grids::rows_of(int i) const {
    return {.exponent = exponents_ + first_block_of(i), .largest = largest_row_};
}

LargestRow Grids::largest_row_of(int i, int64_t number) const {
    const TensorGrids& tensor = layout_.tensors()[static_cast<size_t>(tensor_of(i))];
    return {.largest = largest_row_,
            .exponent = exponents_ + tensor.first,
            .maxima = maxima() + tensor.first,
            .blocks = tensor.blocks,
            .not_finite = not_finite() + tensor_of(i),
            .first_not_finite = first_not_finite_,
            .number = number};
}

ExactRows Grids::looked_at_rows_of(int i) const {
    // One grid serves all blocks, so the first one stands for the tensor.
    return {.exponent = exponents_ + first_block_of(i),
            .largest = reinterpret_cast<uint32_t*>(largest_ + first_block_of(i)),
            .looks_only = true};
}

void Grids::begin_step(Stream& stream) {
    clear(stream, sums_, bytes_of(layout_.sums(), sizeof *sums_));
}

void Grids::add_squares(Stream& stream, size_t bucket) {
    exact_norm(stream, norm_segments_[bucket]);
}

const int32_t* Grids::exponents_of(const ParameterBuffers::Piece& piece) const {
    return exponents_ + first_block_of(piece.parameter) + piece.range.first / norm_block;
}

void Grids::finish(Stream& stream, double* squares, int32_t* overflow) {
    copy(stream, stale_, overflow, sizeof *stale_);
    find_overflow(stream, overflow, maxima(), layout_.blocks());
    norm_sums(stream, squares, this->squares(), scales_, not_finite(), tensors());
}

void Grids::update(Stream& stream, int64_t contributions, const int32_t* overflow) {
    update_grids(stream, {.exponents = exponents_,
                          .maxima = maxima(),
                          .tensors = layout_.tensors(),
                          .contributions = contributions,
                          .overflow = overflow,
                          .stale = stale_});
    norm_scales(stream, scales_, exponents_, layout_.tensors());
}

void Grids::forget_largest(Stream& stream) {
    clear(stream, largest_, bytes_of(layout_.blocks(), sizeof *largest_));
}

void Grids::forget_not_finite() {
    constexpr int64_t none = std::numeric_limits<int64_t>::max();
    copy_now(buffers_.device(), first_not_finite_, &none, sizeof none);
}

std::optional<int64_t> Grids::first_not_finite() const {
    int64_t number = 0;
    copy_now(buffers_.device(), &number, first_not_finite_, sizeof number);
    if (number == std::numeric_limits<int64_t>::max()) return {};
    return number;
}

void Grids::begin(Stream& stream, int64_t contributions) {
    known_ = true;
    forget_not_finite();  // a warm-up's gradients may not be finite
    first_grids(stream, exponents_, largest_, layout_.tensors(), contributions);
    norm_scales(stream, scales_, exponents_, layout_.tensors());
}

std::vector<int32_t> Grids::exponents() const {
    std::vector<int32_t> all(static_cast<size_t>(layout_.blocks()));
    copy_now(buffers_.device(), all.data(), exponents_,
             bytes_of(layout_.blocks(), sizeof *exponents_));
    return all;
}

void Grids::set_exponents(Stream& stream, std::span<const int32_t> exponents) {
    known_ = true;
    forget_not_finite();
    copy_now(buffers_.device(), exponents_, exponents.data(), exponents.size_bytes());
    norm_scales(stream, scales_, exponents_, layout_.tensors());
}

}  // namespace train_gpt
