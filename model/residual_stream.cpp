#include "model/residual_stream.h"

#include "device/copy.h"
#include "kernels/residual.h"

namespace train_gpt {

using Lane = TensorGroup::Lane;

ResidualStream::ResidualStream(TensorGroup& tensor, const Shape& shape, Arena& arena)
    : ResidualStream(tensor, shape.norm, shape.norm_epsilon) {
    if (!is_split()) return;
    const auto buffer = [&](std::initializer_list<int64_t> sizes) {
        return arena.tensor(shape.dtype, sizes, Purpose::buffers);
    };
    products_ = buffer({shape.rows, shape.channels});
    gathered_ = buffer({shape.rows, shape.channels});
    sums_ = buffer({tensor_.rows_of_rank(shape.rows), shape.channels});
    bias_ = buffer({shape.channels});
}

void ResidualStream::norm(Stream& stream, const StreamNorm& of, const Addends& addends,
                          bool gathers) const {
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk) {
        const TensorGroup::Rows rows = tensor_.rows(of.out.rows(), chunk);
        if (addends) tensor_.wait(stream, Lane::sums, chunk);
        norm_forward(stream, {.norm = norm_,
                              .out = of.out_rows ? rows_of(of.out_rows, rows.held)
                                                 : of.out.row_range(rows.strip.first, rows.strip.n),
                              .stats = rows_of(of.stats, rows.held),
                              .x = rows_of(addends ? addends.sum : of.x, rows.held),
                              .w = of.w,
                              .b = of.b,
                              .residual = rows_of(addends.residual, rows.held),
                              .bias = addends.bias,
                              .x_out = addends ? rows_of(of.x, rows.held) : Tensor{},
                              .epsilon = norm_epsilon_,
                              .rounded = of.rounded});
        if (gathers) tensor_.gather(stream, Lane::inputs, of.out, of.out_rows, chunk);
    }
}

void ResidualStream::norm_of_rows(Stream& stream, const StreamNorm& of,
                                  const Addends& addends) const {
    tensor_.wait(stream, Lane::sums);
    norm_forward(stream, {.norm = norm_,
                          .out = of.out,
                          .stats = of.stats,
                          .x = addends ? addends.sum : of.x,
                          .w = of.w,
                          .b = of.b,
                          .residual = addends.residual,
                          .bias = addends.bias,
                          .x_out = addends ? of.x : Tensor{},
                          .epsilon = norm_epsilon_});
}

void ResidualStream::norm_backward(Stream& stream, const StreamNorm& of,
                                   const NormGradients& g) const {
    train_gpt::norm_backward(stream, {.norm = norm_,
                                      .dres = g.dres,
                                      .dw = g.dw,
                                      .db = g.db,
                                      .dy = g.dy,
                                      .x = of.x,
                                      .w = of.w,
                                      .stats = of.stats,
                                      .dbias = g.dbias,
                                      .overwrite_dres = g.overwrite_dres});
}

void ResidualStream::gather_again(Stream& stream, const StreamNorm& of) const {
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
        tensor_.gather(stream, Lane::inputs, of.out, of.out_rows, chunk);
}

/// Calls product(part, rows) for each chunk; its sum over the ranks travels while the next chunk is
/// computed.
template <class F>
void ResidualStream::for_each_chunk_of_sum(Stream& stream, Tensor sum, const F& product) const {
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk) {
        const Range rows = tensor_.rows(products_.rows(), chunk).chunk;
        product(products_.row_range(rows.first, rows.n), rows);
        tensor_.add_up(stream, sum, products_, chunk);
    }
}

Addends ResidualStream::add(Stream& stream, const Product& p) const {
    if (!is_split()) {
        linear_forward(stream, {.out = p.out,
                                .x = p.x,
                                .w = p.w,
                                .bias = p.bias,
                                .residual = p.residual,
                                .rounded_x = p.rounded_x});
        return {};
    }
    for_each_chunk_of_sum(stream, sums_, [&](Tensor part, Range rows) {
        linear_forward(stream, {.out = part, .x = rows_of(p.x, rows), .w = p.w});
    });
    Addends addends{.sum = sums_, .residual = p.residual, .bias = p.bias};
    if (p.bias && p.keeps_bias) {
        copy(stream, bias_.data, p.bias.data, p.bias.bytes());
        addends.bias = bias_;
    }
    return addends;
}

void ResidualStream::settle(Stream& stream, const Addends& addends, Tensor out) const {
    tensor_.wait(stream, Lane::sums);
    residual_add(
        stream, {.out = out, .x = addends.sum, .residual = addends.residual, .bias = addends.bias});
}

Tensor ResidualStream::gather_gradient(Stream& stream, Tensor held) const {
    if (!is_split()) return held;
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
        tensor_.gather(stream, Lane::gradients, products_, held, chunk);
    return products_;
}

void ResidualStream::add_input_gradient(Stream& stream, Tensor dy, Tensor dout, const Operand& w,
                                        const Fp8Matrix& rounded) const {
    if (!is_split())
        return linear_backward_input(stream, {.dx = dy, .dy = dout, .w = w, .rounded_dy = rounded});
    for_each_chunk_of_sum(stream, dy, [&](Tensor part, Range rows) {
        linear_backward_input(stream, {.dx = part, .dy = rows_of(dout, rows), .w = w});
    });
}

void ResidualStream::add_partials(Stream& stream, Tensor out) const {
    if (!is_split()) return;
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
        tensor_.add_up(stream, out, products_, chunk);
    tensor_.wait(stream, Lane::sums);
}

Tensor ResidualStream::gather_into(Stream& stream, Tensor all, Tensor held) const {
    if (!is_split()) return held;
    for (int chunk = 0; chunk < tensor_.chunks(); ++chunk)
        tensor_.gather(stream, Lane::inputs, all, held, chunk);
    tensor_.wait(stream, Lane::inputs);
    return all;
}

Tensor ResidualStream::gather(Stream& stream, Tensor held) const {
    return gather_into(stream, gathered_, held);
}

Tensor ResidualStream::gather_partial(Stream& stream, Tensor held) const {
    return gather_into(stream, products_, held);
}

}  // namespace train_gpt
