#include "model/pass_generator.h"

#include <algorithm>
#include <cassert>

#include "device/copy.h"

namespace train_gpt {

PassGenerator::PassGenerator(Stage& stage, Arena& arena) : stage_(stage) {
    const int B = stage.options().B, T = stage.options().T;
    host_tokens_ = arena.tensor(DType::int32, {B, T}, Purpose::staging);
    tokens_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
    if (stage.options().document_mask)
        doc_start_ = arena.tensor(DType::int32, {B, T}, Purpose::buffers);
    const int64_t rows = stage.padded_vocabulary_of_all();
    logits_ = arena.tensor(DType::fp32, {1, rows}, Purpose::buffers);
    host_logits_ = arena.tensor(DType::fp32, {1, rows}, Purpose::staging);
}

void PassGenerator::feed(Stream& stream, std::span<const int32_t> tokens) {
    assert(!tokens.empty() && position_ + static_cast<int>(tokens.size()) <= context());
    stream.synchronize();  // the previous batch has been copied
    int32_t* const batch = host_tokens_.as<int32_t>();
    std::copy(tokens.begin(), tokens.end(), batch + position_);
    position_ += static_cast<int>(tokens.size());
    std::fill(batch + position_, batch + host_tokens_.numel(), 0);
    copy(stream, tokens_.data, batch, host_tokens_.bytes());
    if (doc_start_) clear(stream, doc_start_.data, doc_start_.bytes());
    stage_.forward(stream, 0,
                   {.tokens = tokens_.as<int32_t>(),
                    .targets = nullptr,
                    .doc_start = doc_start_ ? doc_start_.as<int32_t>() : nullptr});
    stage_.next_token_logits(stream, 0, position_ - 1, logits_);
    copy(stream, host_logits_.data, logits_.data, logits_.bytes());
    stream.synchronize();
}

}  // namespace train_gpt
