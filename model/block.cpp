#include "model/block.h"

#include <algorithm>

namespace train_gpt {

Activations block_activations(const LayerSpec& layer, DType dtype) {
    using A = BlockActivations;
    const int64_t C = layer.n_embd;
    const auto norm = [&](Tensor A::*out, Tensor A::*rows) {
        return Activation{.member = out,
                          .width = C,
                          .dtype = dtype,
                          .dropped = Recompute::elementwise,
                          .read_by = ReadBy::weights,
                          .rows = rows};
    };
    const auto stats = [](Tensor A::*out) {
        return Activation{.member = out, .width = 2, .rows_of = RowsOf::ranks_tokens};
    };
    Activations list{norm(&A::norm1, &A::norm1_rows), stats(&A::stats1)};
    const auto add = [&](const Activations& of_part) {
        list.insert(list.end(), of_part.begin(), of_part.end());
    };
    add(attention_activations(layer, dtype));
    list.push_back(
        {.member = &A::x_mid, .width = C, .dtype = dtype, .rows_of = RowsOf::ranks_tokens});
    list.push_back(norm(&A::norm2, &A::norm2_rows));
    list.push_back(stats(&A::stats2));
    add(layer.experts ? expert_activations(layer, dtype) : mlp_activations(layer, dtype));
    return list;
}

PartGradients block_gradients(const LayerSpec& layer) {
    PartGradients list = layer.experts ? expert_gradients(layer) : mlp_gradients(layer);
    const PartGradients attention = attention_gradients(layer);
    list.insert(list.end(), attention.begin(), attention.end());
    return list;
}

Activations widest_activations(const DecoderSpec& spec, int first, int last, DType dtype) {
    Activations widest;
    for (int l = first; l < last; ++l)
        for (const Activation& a : block_activations(spec.layer(l), dtype)) {
            const auto found = std::ranges::find(widest, a.member, &Activation::member);
            if (found == widest.end())
                widest.push_back(a);
            else if (a.each * a.width > found->each * found->width)
                found->each = a.each, found->width = a.width;
        }
    return widest;
}

Addends block_forward(Stream& stream, const Block& block, Tensor out, const Attend& attend) {
    block.residual.norm(stream, block.norm1(), block.input);
    attention_layer_forward(stream, block, attend);
    const Addends attended = add_attention(stream, block);
    block.residual.norm(stream, block.norm2(), attended);
    if (block.layer.experts) return expert_layer_forward(stream, block, out);
    mlp_forward(stream, block);
    return out ? add_mlp(stream, block, out) : Addends{};
}

void block_backward(Stream& stream, Gradients& gradients, const Block& block,
                    const BlockGradients& g, Recompute recompute, Backward part) {
    if (part != Backward::weights && recompute == Recompute::block)
        block_forward(stream, block, {});
    const BackwardPass pass(stream, gradients, block, g, recompute, part);
    const BlockParameters& p = block.parameters;
    pass.keep_dres(g.dout);
    if (block.layer.experts)
        expert_layer_backward(pass);
    else
        mlp_backward(pass);
    if (pass.inputs) pass.norm_gradients(block.norm2(), p.norm2_w, p.norm2_b, p.out_b);
    pass.keep_dres(g.dmid);
    attention_layer_backward(pass);
    if (pass.inputs) pass.norm_gradients(block.norm1(), p.norm1_w, p.norm1_b, -1);
    pass.add_early_gradients();
}

size_t block_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype, int64_t rows,
                           int64_t sequences) {
    return std::max({attention_layer_scratch_bytes(stream, layer, dtype, rows),
                     layer.experts
                         ? expert_layer_scratch_bytes(stream, layer, dtype, rows, sequences)
                         : mlp_scratch_bytes(stream, layer, dtype, rows),
                     norm_scratch_bytes(stream, rows, layer.n_embd)});
}

}  // namespace train_gpt
