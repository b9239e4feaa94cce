#include "model/token_batch.h"

#include <algorithm>

#include "device/copy.h"

namespace train_gpt {

namespace {

int32_t* numbers_of(const Tensor& tensor) { return tensor ? tensor.as<int32_t>() : nullptr; }

}  // namespace

DeviceBatch::DeviceBatch(Arena& arena, const BatchShape& shape, const Options& options)
    : shape_(shape) {
    const bool is_cuda = arena.device().is_cuda(), is_split = shape.context.is_split();
    const auto take = [&](int64_t numbers, Purpose purpose) {
        return arena.tensor(DType::int32, {numbers}, purpose);
    };
    const auto take_member = [&](Tensor Members::*member) {
        if (is_split) part_.*member = take(shape.tokens_of_rank(), Purpose::staging);
        device_.*member =
            is_split && !is_cuda ? part_.*member : take(shape.tokens_of_rank(), Purpose::buffers);
    };
    if (!is_cuda && !is_split && !options.outlives_host) return;
    take_member(&Members::tokens);
    if (options.has_targets) take_member(&Members::targets);
    if (shape.document_mask) take_member(&Members::doc_start);
    if (is_split) take_member(&Members::position_start);
    if (options.has_sources) sources_ = take(shape.B, Purpose::buffers);
}

TokenBatch DeviceBatch::upload(Stream& stream, const TokenBatch& whole) const {
    if (!device_.tokens) return whole;
    const TokenBatch from = shape_.context.is_split() ? part_of(whole) : whole;
    const auto copied = [&](const Tensor& to, const int32_t* numbers) {
        if (to && to.data != numbers) copy(stream, to.data, numbers, to.bytes());
        return numbers_of(to);
    };
    return {.tokens = copied(device_.tokens, from.tokens),
            .targets = copied(device_.targets, from.targets),
            .doc_start = copied(device_.doc_start, from.doc_start),
            .position_start = copied(device_.position_start, from.position_start),
            .sources = copied(sources_, from.sources)};
}

/// Calls work(chunk, b, first token of the chunk in the whole batch, in the rank's part of it).
template <class Work>
void DeviceBatch::for_each_chunk(int rank, const Work& work) const {
    const ContextRank& context = shape_.context;
    const int T = shape_.T;
    for (int chunk = 0; chunk < 2; ++chunk)
        for (int64_t b = 0; b < shape_.B; ++b)
            work(chunk, b, b * T + context.first_position(rank, chunk, T),
                 (2 * b + chunk) * context.chunk_length(T));
}

/// Picks this rank's tokens.
TokenBatch DeviceBatch::part_of(const TokenBatch& whole) const {
    const ContextRank& context = shape_.context;
    const int T = shape_.T, length = context.chunk_length(T);
    int32_t* const tokens = numbers_of(part_.tokens);
    int32_t* const targets = numbers_of(part_.targets);
    int32_t* const documents = numbers_of(part_.doc_start);
    int32_t* const positions = numbers_of(part_.position_start);
    for_each_chunk(context.rank, [&](int chunk, int64_t b, int64_t from, int64_t to) {
        std::copy_n(whole.tokens + from, length, tokens + to);
        if (targets) std::copy_n(whole.targets + from, length, targets + to);
        // Positions in the sequence are so much larger than positions in the rank's memory.
        const int ahead = context.first_position(chunk, T) - chunk * length;
        for (int t = 0; t < length; ++t)
            positions[to + t] = (documents ? whole.doc_start[from + t] : 0) - ahead;
        if (documents)
            std::copy_n(whole.doc_start + from, length,
                        documents + (int64_t{chunk} * shape_.B + b) * length);
    });
    return {.tokens = tokens,
            .targets = targets,
            .doc_start = documents,
            .position_start = positions,
            .sources = whole.sources};
}

void DeviceBatch::put_together(float* whole, const float* parts) const {
    for (int rank = 0; rank < shape_.context.ranks; ++rank)
        for_each_chunk(rank, [&](int, int64_t, int64_t to, int64_t from) {
            std::copy_n(parts + rank * shape_.tokens_of_rank() + from,
                        shape_.context.chunk_length(shape_.T), whole + to);
        });
}

}  // namespace train_gpt
