#include "model/context_attention.h"

#include <algorithm>
#include <cassert>

#include "device/copy.h"
#include "kernels/convert.h"

namespace train_gpt {

namespace {

void* at_element(const Tensor& tensor, int64_t i) {
    return static_cast<char*>(tensor.data) + i * static_cast<int64_t>(size_of(tensor.dtype));
}

HeadsView shifted(HeadsView view, int64_t elements, DType dtype) {
    view.data = static_cast<char*>(view.data) + elements * static_cast<int64_t>(size_of(dtype));
    return view;
}

/// Copies `rows` rows of `width` elements.
struct Columns {
    void* to;
    int64_t to_stride;  // in elements, as from_stride
    const void* from;
    int64_t from_stride, width, rows;
};
void copy_columns(Stream& stream, const Columns& c, DType dtype) {
    const size_t size = size_of(dtype);
    copy_rows(stream, {.to = c.to,
                       .to_stride = static_cast<size_t>(c.to_stride) * size,
                       .from = c.from,
                       .from_stride = static_cast<size_t>(c.from_stride) * size,
                       .row_bytes = static_cast<size_t>(c.width) * size,
                       .rows = c.rows});
}

}  // namespace

ContextAttention::ContextAttention(ContextGroup& group, const AttentionShape& widest, Arena& arena,
                                   bool training)
    : group_(group), shape_(widest), most_elements_(elements()) {
    assert(widest.T == widest.S && widest.T % 2 == 0);
    keys_values_ = arena.tensor(widest.dtype, {most_elements_}, Purpose::buffers);
    travelling_ =
        arena.tensor(training ? DType::fp32 : widest.dtype, {most_elements_}, Purpose::buffers);
    if (training) gradients_ = arena.tensor(DType::fp32, {most_elements_}, Purpose::buffers);
}

void ContextAttention::work_on(const AttentionShape& layer) {
    shape_ = layer;
    assert(elements() <= most_elements_);
}

AttentionShape ContextAttention::chunk_shape(const AttentionShape& shape, int chunk) const {
    AttentionShape of_chunk = shape;
    of_chunk.T = chunk_length();
    of_chunk.S = group_.place().first_position(chunk, whole_T()) + of_chunk.T;
    if (shape.doc_start) of_chunk.doc_start += int64_t{chunk} * shape.B * of_chunk.T;
    return of_chunk;
}

HeadsView ContextAttention::chunk_of(HeadsView rows, int chunk) const {
    return shifted(rows, chunk * chunk_length() * rows.token, shape_.dtype);
}

const float* ContextAttention::chunk_of(const float* lse, int chunk) const {
    return lse + int64_t{chunk} * shape_.B * shape_.H * chunk_length();
}

HeadsView ContextAttention::heads(const Tensor& in_order, bool values) const {
    const HeadsView keys{in_order.data, whole_T() * width(), width(), shape_.D};
    return shifted(keys, values ? width() / 2 : 0, in_order.dtype);
}

void ContextAttention::reorder(Stream& stream, Tensor to, Tensor from, bool into_order) const {
    const int64_t B = shape_.B, of_chunk = chunk_length() * width(), of_rank = 2 * of_chunk,
                  sequence = group_.size() * of_rank;
    for (int rank = 0; rank < group_.size(); ++rank)
        for (int chunk = 0; chunk < 2; ++chunk) {
            const int64_t in_order =
                group_.place().first_position(rank, chunk, whole_T()) * width();
            const int64_t by_rank = rank * B * of_rank + chunk * of_chunk;
            copy_columns(stream,
                         {.to = at_element(to, into_order ? in_order : by_rank),
                          .to_stride = into_order ? sequence : of_rank,
                          .from = at_element(from, into_order ? by_rank : in_order),
                          .from_stride = into_order ? of_rank : sequence,
                          .width = of_chunk,
                          .rows = B},
                         to.dtype);
        }
}

void ContextAttention::gather(Stream& stream, const HeadsView& k, const HeadsView& v) {
    const int64_t rows = int64_t{shape_.B} * shape_.T, half = width() / 2;
    const Tensor by_rank(travelling_.data, shape_.dtype, {group_.size(), rows * width()});
    const Tensor own = by_rank.row_range(group_.rank(), 1);
    const HeadsView views[] = {k, v};
    for (const int i : {0, 1}) {
        const HeadsView& view = views[i];
        assert(view.batch == shape_.T * view.token && view.head == shape_.D);
        copy_columns(stream,
                     {at_element(own, i * half), width(), view.data, view.token, half, rows},
                     shape_.dtype);
    }
    group_.gather(stream, by_rank);
    reorder(stream, keys_values_, by_rank, true);
}

void ContextAttention::forward(Stream& stream, const AttentionForward& args) {
    work_on(args.shape);
    gather(stream, args.k, args.v);
    for (int chunk = 0; chunk < 2; ++chunk)
        attention_forward(stream, {.shape = chunk_shape(args.shape, chunk),
                                   .q = chunk_of(args.q, chunk),
                                   .k = heads(keys_values_, false),
                                   .v = heads(keys_values_, true),
                                   .out = chunk_of(args.out, chunk),
                                   .lse = const_cast<float*>(chunk_of(args.lse, chunk)),
                                   .sinks = args.sinks});
}

void ContextAttention::backward(Stream& stream, const AttentionBackward& args, bool gathered) {
    work_on(args.shape);
    if (!gathered) gather(stream, args.k, args.v);
    GradientSink dsinks = args.dsinks;
    for (const int chunk : {1, 0}) {
        attention_backward(stream, {.shape = chunk_shape(args.shape, chunk),
                                    .q = chunk_of(args.q, chunk),
                                    .k = heads(keys_values_, false),
                                    .v = heads(keys_values_, true),
                                    .out = chunk_of(args.out, chunk),
                                    .dout = chunk_of(args.dout, chunk),
                                    .lse = chunk_of(args.lse, chunk),
                                    .dq = chunk_of(args.dq, chunk),
                                    .dk = heads(gradients_, false),
                                    .dv = heads(gradients_, true),
                                    .key_gradients = chunk == 1 ? KeyGradients::write_fp32
                                                                : KeyGradients::add_fp32,
                                    .sinks = args.sinks,
                                    .dsinks = dsinks});
        dsinks.accumulate = true;
    }
    // No query of this rank sees the keys after its late chunk.
    const int64_t seen = chunk_shape(args.shape, 1).S, unseen = whole_T() - seen;
    for (int64_t b = 0; b < shape_.B && unseen > 0; ++b)
        clear(stream, gradients_.as<float>() + (b * whole_T() + seen) * width(),
              static_cast<size_t>(unseen * width()) * sizeof(float));

    const int64_t rows = int64_t{shape_.B} * shape_.T, half = width() / 2;
    const Tensor by_rank(travelling_.data, DType::fp32, {group_.size(), rows * width()});
    reorder(stream, by_rank, gradients_, false);
    group_.add_up(stream, by_rank);
    Tensor own = by_rank.row_range(group_.rank(), 1);
    if (shape_.dtype != DType::fp32) {
        // The keys and values are not needed any more.
        round_to_bf16(stream, keys_values_.as<bf16>(), own.as<float>(), own.numel());
        own = Tensor(keys_values_.data, shape_.dtype, {rows * width()});
    }
    const HeadsView views[] = {args.dk, args.dv};
    for (const int i : {0, 1})
        copy_columns(
            stream, {views[i].data, views[i].token, at_element(own, i * half), width(), half, rows},
            shape_.dtype);
}

size_t ContextAttention::scratch_bytes(const Stream& stream, const AttentionShape& shape) const {
    // The same on all ranks, who have chunks with all numbers of keys
    size_t most = 0;
    AttentionShape of_chunk = chunk_shape(shape, 0);
    for (of_chunk.S = of_chunk.T; of_chunk.S <= whole_T(); of_chunk.S += of_chunk.T)
        most = std::max(most, attention_scratch_bytes(stream, of_chunk));
    return most;
}

}  // namespace train_gpt
