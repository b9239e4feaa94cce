#include "model/pass_generator.h"

#include <algorithm>
#include <cassert>

#include "device/copy.h"

namespace train_gpt {

PassGenerator::PassGenerator(const Pipeline& model, Arena& arena) : model_(model) {
    const int B = model.options().B, T = model.sequence_length();
    const bool document_mask = model.options().document_mask;
    part_ = SequencePart(arena, model.context().place(), B, T, document_mask);
    host_tokens_ = arena.tensor(DType::int32, {B, T}, Purpose::staging);
    if (!part_) tokens_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
    if (document_mask)
        doc_start_ =
            arena.tensor(DType::int32, {B, T}, part_ ? Purpose::staging : Purpose::buffers);
    const int64_t rows = model.last_stage().padded_vocabulary_of_all();
    logits_ = arena.tensor(DType::fp32, {1, rows}, Purpose::buffers);
    host_logits_ = arena.tensor(DType::fp32, {1, rows}, Purpose::staging);
}

/// host_tokens_ on the device, as one document.
TokenBatch PassGenerator::upload(Stream& stream) {
    TokenBatch batch{.tokens = host_tokens_.as<int32_t>(),
                     .targets = nullptr,
                     .doc_start = doc_start_ ? doc_start_.as<int32_t>() : nullptr};
    if (part_) {
        if (doc_start_) std::fill_n(doc_start_.as<int32_t>(), doc_start_.numel(), 0);
        part_.upload(stream, batch);
        return part_.on_device();
    }
    copy(stream, tokens_.data, host_tokens_.data, host_tokens_.bytes());
    if (doc_start_) clear(stream, doc_start_.data, doc_start_.bytes());
    batch.tokens = tokens_.as<int32_t>();
    return batch;
}

void PassGenerator::feed(Stream& stream, std::span<const int32_t> tokens) {
    assert(!tokens.empty() && position_ + static_cast<int>(tokens.size()) <= context());
    stream.synchronize();  // the previous batch has been copied
    int32_t* const batch = host_tokens_.as<int32_t>();
    std::copy(tokens.begin(), tokens.end(), batch + position_);
    position_ += static_cast<int>(tokens.size());
    std::fill(batch + position_, batch + host_tokens_.numel(), 0);
    model_.forward(stream, upload(stream));
    model_.next_token_logits(stream, position_ - 1, logits_);
    copy(stream, host_logits_.data, logits_.data, logits_.bytes());
    stream.synchronize();
}

}  // namespace train_gpt
