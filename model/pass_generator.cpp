#include "model/pass_generator.h"

#include <algorithm>
#include <cassert>

#include "device/copy.h"

namespace train_gpt {

PassGenerator::PassGenerator(const Pipeline& model, Arena& arena)
    : model_(model), batch_(arena, model.batch_shape(), {.has_targets = false}) {
    const BatchShape shape = model.batch_shape();
    tokens_ = arena.tensor(DType::int32, {shape.B, shape.T}, Purpose::staging);
    if (shape.document_mask)
        doc_start_ = arena.tensor(DType::int32, {shape.B, shape.T}, Purpose::staging);
    const int64_t rows = model.last_stage().padded_vocabulary_of_all();
    logits_ = arena.tensor(DType::fp32, {1, rows}, Purpose::buffers);
    host_logits_ = arena.tensor(DType::fp32, {1, rows}, Purpose::staging);
    if (doc_start_ && !arena.is_counting())
        std::fill_n(doc_start_.as<int32_t>(), doc_start_.numel(), 0);
}

void PassGenerator::feed(Stream& stream, std::span<const int32_t> tokens) {
    assert(!tokens.empty() && position_ + static_cast<int>(tokens.size()) <= context());
    stream.synchronize();  // the previous batch has been copied
    int32_t* const batch = tokens_.as<int32_t>();
    std::copy(tokens.begin(), tokens.end(), batch + position_);
    position_ += static_cast<int>(tokens.size());
    std::fill(batch + position_, batch + tokens_.numel(), 0);
    model_.forward(stream, batch_.upload(stream, {.tokens = batch,
                                                  .doc_start = doc_start_ ? doc_start_.as<int32_t>()
                                                                          : nullptr}));
    model_.next_token_logits(stream, position_ - 1, logits_);
    copy(stream, host_logits_.data, logits_.data, logits_.bytes());
    stream.synchronize();
}

}  // namespace train_gpt
