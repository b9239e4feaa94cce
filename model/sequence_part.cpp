#include "model/sequence_part.h"

#include <algorithm>

#include "device/copy.h"

namespace train_gpt {

namespace {

enum Row { tokens_row, targets_row, positions_row, documents_row };

/// Calls work(chunk, b, first token of the chunk in the batch, in the rank's part of it).
template <class Work>
void for_each_chunk(const ContextRank& place, int of_rank, int B, int T, const Work& work) {
    const int64_t length = place.chunk_length(T);
    for (int chunk = 0; chunk < 2; ++chunk)
        for (int64_t b = 0; b < B; ++b)
            work(chunk, b, b * T + place.first_position(of_rank, chunk, T),
                 (2 * b + chunk) * length);
}

}  // namespace

SequencePart::SequencePart(Arena& arena, const ContextRank& place, int B, int T, bool document_mask)
    : place_(place), B_(B), T_(T), document_mask_(document_mask) {
    if (!place.is_split()) return;
    const std::initializer_list<int64_t> shape = {document_mask ? 4 : 3, tokens()};
    on_host_ = arena.tensor(DType::int32, shape, Purpose::staging);
    on_device_ =
        arena.device().is_cuda() ? arena.tensor(DType::int32, shape, Purpose::buffers) : on_host_;
}

TokenBatch SequencePart::at(const Tensor& memory) const {
    const auto row = [&](Row i) { return memory.row_range(i, 1).as<int32_t>(); };
    return {.tokens = row(tokens_row),
            .targets = row(targets_row),
            .doc_start = document_mask_ ? row(documents_row) : nullptr,
            .position_start = row(positions_row)};
}

void SequencePart::upload(Stream& stream, const TokenBatch& whole) const {
    const int length = place_.chunk_length(T_);
    const auto row = [&](Row i) { return on_host_.row_range(i, 1).as<int32_t>(); };
    const auto work = [&](int chunk, int64_t b, int64_t from, int64_t to) {
        std::copy_n(whole.tokens + from, length, row(tokens_row) + to);
        if (whole.targets) std::copy_n(whole.targets + from, length, row(targets_row) + to);
        // Positions in the sequence are so much larger than those in the rank's memory.
        const int ahead = place_.first_position(chunk, T_) - chunk * length;
        for (int t = 0; t < length; ++t)
            row(positions_row)[to + t] = (whole.doc_start ? whole.doc_start[from + t] : 0) - ahead;
        if (document_mask_)
            std::copy_n(whole.doc_start + from, length,
                        row(documents_row) + (int64_t{chunk} * B_ + b) * length);
    };
    for_each_chunk(place_, place_.rank, B_, T_, work);
    if (on_device_.data != on_host_.data)
        copy(stream, on_device_.data, on_host_.data, on_host_.bytes());
}

void SequencePart::put_together(float* whole, const float* parts, int ranks, int B, int T) {
    const ContextRank place{0, ranks};
    for (int rank = 0; rank < ranks; ++rank)
        for_each_chunk(place, rank, B, T, [&](int, int64_t, int64_t to, int64_t from) {
            std::copy_n(parts + int64_t{rank} * B * T / ranks + from, place.chunk_length(T),
                        whole + to);
        });
}

}  // namespace train_gpt
