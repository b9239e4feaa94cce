#include "model/generator.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

#include "device/copy.h"
#include "kernels/embedding.h"
#include "kernels/head_loss.h"
#include "kernels/layernorm.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

namespace {

// Prompt tokens that go through the model together.
constexpr int prompt_chunk = 64;

}  // namespace

Generator::Generator(const GPTShape& shape, ParameterStore& parameters, Arena& arena)
    : shape_(shape), parameters_(parameters), chunk_(std::min(prompt_chunk, shape.n_ctx)) {
    for (int l = 0; l < shape_.n_layer; ++l)
        block_parameters_.push_back(BlockParameters::find(parameters_, l));
    const int64_t C = shape_.n_embd;
    const DType dtype = parameters_.dtype();
    const auto buffer = [&](int64_t rows, int64_t cols, DType type) {
        return arena.tensor(type, {rows, cols}, Purpose::kv_cache);
    };
    activations_ = {.x = buffer(chunk_, C, dtype),
                    .ln1 = buffer(chunk_, C, dtype),
                    .stats1 = buffer(chunk_, 2, DType::fp32),
                    .qkv = buffer(chunk_, 3 * C, dtype),
                    .att = buffer(chunk_, C, dtype),
                    .lse = {},
                    .x_mid = buffer(chunk_, C, dtype),
                    .ln2 = buffer(chunk_, C, dtype),
                    .stats2 = buffer(chunk_, 2, DType::fp32),
                    .preact = buffer(chunk_, 4 * C, dtype),
                    .gelu = buffer(chunk_, 4 * C, dtype)};
    x_next_ = buffer(chunk_, C, dtype);
    lnf_ = buffer(1, C, dtype);
    cache_ = buffer(int64_t{shape_.n_layer} * 2 * shape_.n_ctx, C, dtype);
    logits_ = buffer(1, shape_.vocab_size, DType::fp32);
    logits_scratch_ = buffer(1, shape_.padded_vocab(), dtype);
    tokens_ = buffer(1, chunk_, DType::int32);
    host_tokens_ = arena.tensor(DType::int32, {chunk_}, Purpose::staging);
    host_logits_ = arena.tensor(DType::fp32, {shape_.vocab_size}, Purpose::staging);
}

size_t Generator::scratch_bytes(const Stream& stream) const {
    const int64_t C = shape_.n_embd;
    const DType dtype = parameters_.dtype();
    size_t most = head_loss_scratch_bytes(stream, dtype, 1, shape_.padded_vocab(), C);
    for (const auto& [out, in] : {std::pair{3 * C, C}, {C, C}, {4 * C, C}, {C, 4 * C}})
        most = std::max(most, linear_scratch_bytes(stream, dtype, chunk_, out, in));
    for (const int T : {1, 2, 3, chunk_})  // a few queries are split over threads differently
        if (T <= chunk_) most = std::max(most, attention_scratch_bytes(stream, attention_shape(T)));
    return std::max(most, layernorm_scratch_bytes(stream, chunk_, C));
}

AttentionShape Generator::attention_shape(int T) const {
    const int D = shape_.head_size();
    return {.dtype = parameters_.dtype(),
            .B = 1,
            .T = T,
            .S = position_ + T,
            .H = shape_.n_head,
            .H_kv = shape_.n_head,
            .D = D,
            .scale = 1.0f / std::sqrt(static_cast<float>(D)),
            .doc_start = nullptr};
}

HeadsView Generator::cache(int layer, int part) const {
    const int64_t first_row = (int64_t{layer} * 2 + part) * shape_.n_ctx;
    return plain_view(cache_.row_range(first_row, shape_.n_ctx), shape_.n_ctx, shape_.n_head,
                      shape_.head_size());
}

void Generator::feed(Stream& stream, std::span<const int32_t> tokens) {
    assert(!tokens.empty() && position_ + static_cast<int>(tokens.size()) <= shape_.n_ctx);
    while (!tokens.empty()) {
        const size_t n = std::min(tokens.size(), static_cast<size_t>(chunk_));
        feed_chunk(stream, tokens.first(n), n == tokens.size());
        tokens = tokens.subspan(n);
    }
}

void Generator::feed_chunk(Stream& stream, std::span<const int32_t> tokens, bool with_logits) {
    const int T = static_cast<int>(tokens.size()), H = shape_.n_head, D = shape_.head_size();
    const int64_t C = shape_.n_embd;
    BlockActivations a;
    for (auto member : {&BlockActivations::x, &BlockActivations::ln1, &BlockActivations::stats1,
                        &BlockActivations::qkv, &BlockActivations::att, &BlockActivations::x_mid,
                        &BlockActivations::ln2, &BlockActivations::stats2,
                        &BlockActivations::preact, &BlockActivations::gelu})
        a.*member = (activations_.*member).row_range(0, T);
    Tensor out = x_next_.row_range(0, T);

    stream.synchronize();  // the previous chunk has been copied
    std::copy(tokens.begin(), tokens.end(), host_tokens_.as<int32_t>());
    copy(stream, tokens_.data, host_tokens_.data, tokens.size_bytes());
    parameters_.acquire(stream, 0);
    embedding_forward(stream, {.out = a.x.reshaped({1, T, C}),
                               .tokens = tokens_.as<int32_t>(),
                               .wte = parameters_.weight(parameters_.index_of("wte.weight")),
                               .wpe = parameters_.weight(parameters_.index_of("wpe.weight")),
                               .doc_start = nullptr,
                               .first_position = position_});
    parameters_.release(0);
    for (int l = 0; l < shape_.n_layer; ++l) {
        const BlockParameters& p = block_parameters_[static_cast<size_t>(l)];
        parameters_.acquire(stream, l + 1);
        block_before_attention(stream, parameters_, p, a);
        for (int part = 0; part < 2; ++part) {
            const HeadsView fresh = packed_view(a.qkv, 1 + part, T, H, D);
            const size_t row = static_cast<size_t>(C) * size_of(a.qkv.dtype);
            copy_rows(
                stream,
                static_cast<char*>(cache(l, part).data) + static_cast<size_t>(position_) * row, row,
                fresh.data, 3 * row, row, T);
        }
        attention_forward(stream, {.shape = attention_shape(T),
                                   .q = packed_view(a.qkv, 0, T, H, D),
                                   .k = cache(l, 0),
                                   .v = cache(l, 1),
                                   .out = plain_view(a.att, T, H, D),
                                   .lse = nullptr});
        block_after_attention(stream, parameters_, p, a, out);
        parameters_.release(l + 1);
        std::swap(a.x, out);
    }
    position_ += T;
    if (!with_logits) return;

    const int unit = parameters_.units() - 1;
    parameters_.acquire(stream, unit);
    layernorm_forward(stream, {.out = lnf_,
                               .stats = {},
                               .x = a.x.row_range(T - 1, 1),
                               .w = parameters_.weight(parameters_.index_of("ln_f.weight")),
                               .b = parameters_.weight(parameters_.index_of("ln_f.bias"))});
    parameters_.release(unit);
    parameters_.acquire(stream, 0);
    head_logits(stream, logits_, lnf_, parameters_.weight(parameters_.index_of("wte.weight")),
                logits_scratch_);
    parameters_.release(0);
    copy(stream, host_logits_.data, logits_.data, logits_.bytes());
    stream.synchronize();
}

}  // namespace train_gpt
