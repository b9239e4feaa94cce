#include "parallel/axes/tensor.h"

#include <cassert>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/copy.h"
#include "parallel/mesh.h"

namespace train_gpt {

TensorGroup::Rows TensorGroup::rows(int64_t M, int chunk) const {
    const int64_t n = M / chunks(), strip = n / size();
    return {.chunk = {chunk * n, n},
            .strip = {chunk * n + rank() * strip, strip},
            .held = {chunk * strip, strip}};
}

void TensorGroup::require_even(int64_t M, const char* rows, int parts) const {
    if (is_even(M)) return;
    int fewer = chunks();
    while (fewer > 1 && M % (int64_t{size()} * fewer) != 0) --fewer;
    const bool by_chunks = M % size() == 0;
    throw Error(M, " ", rows, parts > 1 ? " on each context-parallel rank" : "",
                " cannot be cut into ", chunks() > 1 ? concat(chunks(), " chunks of ") : "", size(),
                " equal parts for the tensor-parallel ranks; ",
                by_chunks ? concat("parallel.tensor_chunks=", fewer, " can")
                          : concat("take a batch.micro_batch or batch.sequence_length with a "
                                   "product that ",
                                   int64_t{size()} * chunks() * parts, " divides"));
}

void TensorGroup::connect(const Device& device, Communicator& communicator, StepClock* clock) {
    assert(communicator.size() == size() && communicator.rank() == rank());
    if (!is_split()) return;
    communicator_ = &communicator;
    const auto slots = static_cast<size_t>(gradient_slot()) + 1;
    exchange_ =
        std::make_unique<Exchange>(communicator.exchange_stream(device),
                                   std::vector<std::string>(slots, name_of(Axis::tensor)), clock);
}

void TensorGroup::gather(Stream& stream, Lane lane, Tensor all, Tensor held, int chunk) {
    if (!is_split()) return;
    const Rows rows = this->rows(all.rows(), chunk);
    const Tensor to = all.row_range(rows.chunk.first, rows.chunk.n),
                 from = held ? held.row_range(rows.held.first, rows.held.n)
                             : all.row_range(rows.strip.first, rows.strip.n);
    if (!is_connected()) {
        for (int r = 0; r < size(); ++r) {
            const Tensor strip = to.row_range(r * rows.strip.n, rows.strip.n);
            if (strip.data != from.data) copy(stream, strip.data, from.data, from.bytes());
        }
        return;
    }
    exchange_->submit(stream, slot(lane, chunk), [&](Stream& exchange) {
        communicator_->all_gather(exchange, to.data, from.data, from.numel(), from.dtype);
    });
}

void TensorGroup::add_up(Stream& stream, Tensor held, Tensor all, int chunk) {
    assert(is_split());
    const Rows rows = this->rows(all.rows(), chunk);
    const Tensor from = all.row_range(rows.chunk.first, rows.chunk.n),
                 to = held.row_range(rows.held.first, rows.held.n);
    if (!is_connected())
        return copy(stream, to.data, from.row_range(rank() * to.rows(), to.rows()).data,
                    to.bytes());
    exchange_->submit(stream, slot(Lane::sums, chunk), [&](Stream& exchange) {
        communicator_->reduce_scatter(exchange, to.data, from.data, to.numel(), to.dtype);
    });
}

void TensorGroup::wait(Stream& stream, Lane lane, int chunk) {
    if (exchange_) exchange_->hold(stream, slot(lane, chunk));
}

void TensorGroup::wait(Stream& stream, Lane lane) {
    for (int chunk = 0; chunk < chunks(); ++chunk) wait(stream, lane, chunk);
}

void TensorGroup::gather_numbers(Stream& stream, float* out, const float* in, int64_t n) {
    assert(is_split());
    if (!is_connected()) {
        for (int r = 0; r < size(); ++r)
            if (out + r * n != in)
                copy(stream, out + r * n, in, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    exchange_->submit(stream, number_slot(), [&](Stream& exchange) {
        communicator_->all_gather(exchange, out, in, n, DType::fp32);
    });
    exchange_->hold(stream, number_slot());
}

void TensorGroup::add_up_gradients(Stream& stream, float* gradients, int64_t n) {
    if (!is_connected() || n == 0) return;
    exchange_->submit(stream, gradient_slot(), [&](Stream& exchange) {
        communicator_->all_reduce(exchange, gradients, n, DType::fp32);
    });
}

void TensorGroup::wait_gradients(Stream& stream) {
    if (is_connected()) exchange_->hold(stream, gradient_slot());
}

void TensorGroup::hold_gradients(Stream& exchange) {
    if (is_connected()) exchange_->hold_other(exchange, gradient_slot());
}

}  // namespace train_gpt
