#include "model/gpt.h"

#include <algorithm>
#include <cmath>

#include "device/profile.h"
#include "kernels/embedding.h"
#include "kernels/head_loss.h"
#include "kernels/layernorm.h"
#include "kernels/linear/linear.h"

namespace train_gpt {

namespace {

// The limit for the logits of one chunk of rows. With more rows the head runs in several chunks,
// each of which reads and writes the whole gradient of wte.
size_t logits_bytes_limit(const Device& device) {
    return size_t{device.is_cuda() ? 2048u : 256u} << 20;
}

}  // namespace

double GPTShape::flops_per_token(int T) const {
    const double C = n_embd, L = n_layer;
    const double matrix_parameters = 12 * L * C * C + static_cast<double>(vocab_size) * C;
    return 6 * matrix_parameters + 6 * L * C * T;
}

std::vector<Parameter> gpt_parameters(const GPTShape& shape) {
    const int64_t C = shape.n_embd, V = shape.vocab_size;
    const float std_dev = 0.02f;
    const float residual_std = std_dev / std::sqrt(2.0f * static_cast<float>(shape.n_layer));
    std::vector<Parameter> list;

    const auto add = [&](Parameter p) {
        if (p.padded.empty()) p.padded = p.shape;
        list.push_back(std::move(p));
    };
    const auto norm = [&](const std::string& name, int unit) {
        add({.name = name + ".weight",
             .shape = {C},
             .padded = {},
             .unit = unit,
             .init_mean = 1.0f});
        add({.name = name + ".bias", .shape = {C}, .padded = {}, .unit = unit});
    };
    const auto linear = [&](const std::string& name, int unit, int64_t out, int64_t in, int axis,
                            int parts, float init_std) {
        add({.name = name + ".weight",
             .shape = {out, in},
             .padded = {},
             .unit = unit,
             .decay = true,
             .transposed = true,
             .split_axis = axis,
             .split_parts = parts,
             .init_std = init_std});
        add({.name = name + ".bias",
             .shape = {out},
             .padded = {},
             .unit = unit,
             .split_axis = axis == 0 ? 0 : -1,
             .split_parts = parts});
    };

    add({.name = "wte.weight",
         .shape = {V, C},
         .padded = {shape.padded_vocab(), C},
         .unit = 0,
         .decay = true,
         .split_axis = 0,
         .init_std = std_dev});
    // As OpenAI initialised it: half the standard deviation of the token embeddings.
    add({.name = "wpe.weight",
         .shape = {shape.n_ctx, C},
         .padded = {},
         .unit = 0,
         .decay = true,
         .init_std = std_dev / 2});
    for (int l = 0; l < shape.n_layer; ++l) {
        const std::string block = "h." + std::to_string(l);
        const int unit = l + 1;
        norm(block + ".ln_1", unit);
        linear(block + ".attn.c_attn", unit, 3 * C, C, 0, 3, std_dev);
        linear(block + ".attn.c_proj", unit, C, C, 1, 1, residual_std);
        norm(block + ".ln_2", unit);
        linear(block + ".mlp.c_fc", unit, 4 * C, C, 0, 1, std_dev);
        linear(block + ".mlp.c_proj", unit, C, 4 * C, 1, 1, residual_std);
    }
    norm("ln_f", shape.n_layer + 1);
    return list;
}

GPT::GPT(const GPTShape& shape, const GPTOptions& options, ParameterStore& parameters, Arena& arena)
    : shape_(shape), options_(options), parameters_(parameters) {
    const auto index = [&](const std::string& name) {
        const int i = parameters_.index_of(name);
        assert(i >= 0);
        return i;
    };
    wte_ = index("wte.weight"), wpe_ = index("wpe.weight");
    lnf_w_ = index("ln_f.weight"), lnf_b_ = index("ln_f.bias");
    for (int l = 0; l < shape_.n_layer; ++l)
        block_parameters_.push_back(BlockParameters::find(parameters_, l));

    const int64_t C = shape_.n_embd, H = shape_.n_head, M = int64_t{options_.B} * options_.T;
    const DType dtype = parameters_.dtype();
    const bool training = options_.use == ParameterStore::Use::training;
    const auto activation = [&](int64_t cols) {
        return arena.tensor(dtype, {M, cols}, Purpose::activations);
    };
    const auto floats = [&](int64_t cols) {
        return arena.tensor(DType::fp32, {M, cols}, Purpose::activations);
    };

    // In training, each block keeps its own activations, except that all blocks share the tensors
    // that are recomputed. In inference all blocks share all tensors, except that their inputs x
    // alternate between two.
    const bool share_all = !training || options_.recompute == Recompute::block;
    const bool share_elementwise = share_all || options_.recompute == Recompute::elementwise;
    for (int l = 0; l < shape_.n_layer; ++l) {
        const BlockActivations* first = l ? &blocks_[0] : nullptr;
        BlockActivations a;
        a.x = !training && l >= 2 ? blocks_[static_cast<size_t>(l - 2)].x : activation(C);
        const auto kept = [&](Tensor BlockActivations::*member, int64_t cols, bool shared) {
            a.*member = first && shared ? first->*member : activation(cols);
        };
        const auto kept_floats = [&](Tensor BlockActivations::*member, int64_t cols) {
            a.*member = first && share_all ? first->*member : floats(cols);
        };
        kept(&BlockActivations::ln1, C, share_elementwise);
        kept_floats(&BlockActivations::stats1, 2);
        kept(&BlockActivations::qkv, 3 * C, share_all);
        kept(&BlockActivations::att, C, share_all);
        kept_floats(&BlockActivations::lse, H);
        kept(&BlockActivations::x_mid, C, share_all);
        kept(&BlockActivations::ln2, C, share_elementwise);
        kept_floats(&BlockActivations::stats2, 2);
        kept(&BlockActivations::preact, 4 * C, share_all);
        kept(&BlockActivations::gelu, 4 * C, share_elementwise);
        blocks_.push_back(a);
    }
    x_out_ = activation(C);
    lnf_ = activation(C);
    stats_f_ = floats(2);

    const int64_t Vp = shape_.padded_vocab();
    const int64_t rows_that_fit = static_cast<int64_t>(logits_bytes_limit(arena.device()) /
                                                       (static_cast<size_t>(Vp) * size_of(dtype)));
    const int64_t chunks =
        (M + std::max<int64_t>(rows_that_fit, 1) - 1) / std::max<int64_t>(rows_that_fit, 1);
    logits_ = arena.tensor(dtype, {(M + chunks - 1) / chunks, Vp}, Purpose::buffers);
    losses_ = arena.tensor(DType::fp32, {M}, Purpose::buffers);
    if (training) {
        gradients_ = {.dres = arena.tensor(dtype, {M, C}, Purpose::buffers),
                      .dy = arena.tensor(dtype, {M, C}, Purpose::buffers),
                      .dwide = arena.tensor(dtype, {M, 4 * C}, Purpose::buffers)};
    }
}

size_t GPT::scratch_bytes(const Stream& stream) const {
    const int64_t C = shape_.n_embd, M = int64_t{options_.B} * options_.T,
                  Vp = shape_.padded_vocab();
    const DType dtype = parameters_.dtype();
    // Only whether batches have doc_start matters here.
    const int32_t any = 0;
    const TokenBatch batch{.doc_start = options_.document_mask ? &any : nullptr};
    const auto linear = [&](int64_t out, int64_t in) {
        return linear_scratch_bytes(stream, dtype, M, out, in);
    };
    return std::max({linear(3 * C, C), linear(C, C), linear(4 * C, C), linear(C, 4 * C),
                     layernorm_scratch_bytes(stream, M, C),
                     attention_scratch_bytes(stream, attention_shape(batch)),
                     embedding_scratch_bytes(stream, M, Vp),
                     head_loss_scratch_bytes(stream, dtype, logits_.shape[0], Vp, C)});
}

AttentionShape GPT::attention_shape(const TokenBatch& batch) const {
    const int D = shape_.head_size();
    return {.dtype = parameters_.dtype(),
            .B = options_.B,
            .T = options_.T,
            .S = options_.T,
            .H = shape_.n_head,
            .H_kv = shape_.n_head,
            .D = D,
            .scale = 1.0f / std::sqrt(static_cast<float>(D)),
            .doc_start = batch.doc_start};
}

void GPT::forward(Stream& stream, const TokenBatch& batch) {
    embed(stream, batch);
    forward_blocks(stream, batch, 0, shape_.n_layer);
    const int unit = parameters_.units() - 1;
    parameters_.acquire(stream, unit);
    layernorm_forward(stream, {.out = lnf_,
                               .stats = stats_f_,
                               .x = x_out_,
                               .w = parameters_.weight(lnf_w_),
                               .b = parameters_.weight(lnf_b_)});
    parameters_.release(unit);
}

void GPT::embed(Stream& stream, const TokenBatch& batch) {
    parameters_.acquire(stream, 0);
    embedding_forward(stream,
                      {.out = blocks_[0].x.reshaped({options_.B, options_.T, shape_.n_embd}),
                       .tokens = batch.tokens,
                       .wte = parameters_.weight(wte_),
                       .wpe = parameters_.weight(wpe_),
                       .doc_start = batch.doc_start});
    parameters_.release(0);
}

void GPT::forward_blocks(Stream& stream, const TokenBatch& batch, int first, int last) {
    for (int l = first; l < last; ++l) {
        const NamedRange range(stream.device, "forward layer", l);
        parameters_.acquire(stream, l + 1);
        const size_t i = static_cast<size_t>(l);
        const Tensor out = l + 1 < shape_.n_layer ? blocks_[i + 1].x : x_out_;
        block_forward(stream, parameters_, block_parameters_[i], blocks_[i], attention_shape(batch),
                      out);
        parameters_.release(l + 1);
    }
}

void GPT::head(Stream& stream, const TokenBatch& batch, bool backward) {
    parameters_.acquire(stream, 0);
    head_loss(stream, {.x = lnf_,
                       .w = parameters_.weight(wte_),
                       .logits = logits_,
                       .V = shape_.vocab_size,
                       .targets = batch.targets,
                       .losses = losses_.as<float>(),
                       .dx = backward ? gradients_.dy : Tensor{},
                       .dw = backward ? parameters_.sink(wte_) : GradientSink{}});
    parameters_.release(0);
}

void GPT::evaluate_head(Stream& stream, const TokenBatch& batch) { head(stream, batch, false); }

void GPT::backward(Stream& stream, const TokenBatch& batch) {
    parameters_.begin_backward(stream);
    head(stream, batch, true);

    const int unit = parameters_.units() - 1;
    parameters_.acquire(stream, unit);
    layernorm_backward(stream, {.dres = gradients_.dres,
                                .dw = parameters_.sink(lnf_w_),
                                .db = parameters_.sink(lnf_b_),
                                .dy = gradients_.dy,
                                .x = x_out_,
                                .w = parameters_.weight(lnf_w_),
                                .stats = stats_f_,
                                .dbias = parameters_.sink(block_parameters_.back().fcproj_b),
                                .overwrite_dres = true});
    parameters_.release(unit);
    parameters_.gradients_ready(stream, unit);

    backward_blocks(stream, batch, 0, shape_.n_layer);
    backward_embedding(stream, batch);
}

void GPT::backward_blocks(Stream& stream, const TokenBatch& batch, int first, int last) {
    for (int l = last - 1; l >= first; --l) {
        const NamedRange range(stream.device, "backward layer", l);
        parameters_.acquire(stream, l + 1);
        const size_t i = static_cast<size_t>(l);
        const GradientSink bias_before =
            l > 0 ? parameters_.sink(block_parameters_[i - 1].fcproj_b) : GradientSink{};
        block_backward(stream, parameters_, block_parameters_[i], blocks_[i], gradients_,
                       attention_shape(batch), options_.recompute, bias_before);
        parameters_.release(l + 1);
        parameters_.gradients_ready(stream, l + 1);
    }
}

void GPT::backward_embedding(Stream& stream, const TokenBatch& batch) {
    GradientSink dwte = parameters_.sink(wte_);
    dwte.accumulate = true;  // to what the head, which shares wte, has written
    embedding_backward(stream,
                       {.dwte = dwte,
                        .dwpe = parameters_.sink(wpe_),
                        .dout = gradients_.dres.reshaped({options_.B, options_.T, shape_.n_embd}),
                        .tokens = batch.tokens,
                        .vocab_rows = shape_.padded_vocab(),
                        .n_ctx = shape_.n_ctx,
                        .doc_start = batch.doc_start});
    parameters_.gradients_ready(stream, 0);
}

}  // namespace train_gpt
