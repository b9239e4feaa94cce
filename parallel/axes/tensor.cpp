#include "parallel/axes/tensor.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/copy.h"

namespace train_gpt {

TensorRank tensor_rank(const MeshLayout& mesh, int rank) {
    return {mesh.at(Axis::tensor, rank), mesh.size(Axis::tensor)};
}

namespace {

bool can_share(const SharedSize& shared, int ranks) {
    return shared.multiple == 1
               ? shared.size % ranks == 0
               : (ranks - 1) * part_extent(shared.size, shared.multiple, ranks) < shared.size;
}

}  // namespace

std::optional<SizeProblem> tensor_problem(const std::vector<SharedSize>& sizes, int ranks) {
    const auto of = std::ranges::find_if_not(
        sizes, [&](const SharedSize& shared) { return can_share(shared, ranks); });
    if (of == sizes.end()) return {};
    const auto divided = std::ranges::count(sizes, 1, &SharedSize::multiple);
    std::string all;
    for (int64_t i = 0; const SharedSize& shared : sizes) {
        if (shared.multiple > 1) continue;
        const char* const before = i == 0 ? "" : i + 1 == divided ? " and " : ", ";
        all += concat(before, shared.key, " = ", shared.size), ++i;
    }
    return SizeProblem{
        .text =
            concat("parallel.tensor = ", ranks, " ranks cannot share ", of->key, " = ", of->size,
                   of->multiple == 1 ? " evenly"
                                     : concat(" in equal parts of a multiple of ", of->multiple)),
        .key = "parallel.tensor",
        .value = ranks,
        .most = 1024,
        .does = of->multiple == 1 ? "divides " + all : "can"};
}

void require_shared(const std::vector<SharedSize>& sizes, int ranks) {
    const auto problem = tensor_problem(sizes, ranks);
    if (!problem) return;
    const auto can = [&](int n) { return n >= 1 && !tensor_problem(sizes, n); };  // 1 can
    int distance = 1;
    while (!can(ranks - distance) && !can(ranks + distance)) ++distance;
    throw Error(problem->text,
                "; parallel.tensor=", can(ranks - distance) ? ranks - distance : ranks + distance,
                " can");
}

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

void TensorGroup::add_up_numbers(Stream& stream, float* numbers, int64_t n) {
    if (!is_connected()) return;
    exchange_->submit(stream, number_slot(), [&](Stream& exchange) {
        communicator_->all_reduce(exchange, numbers, n, DType::fp32);
    });
    exchange_->hold(stream, number_slot());
}

void TensorGroup::add_up_gradients(Stream& stream, void* gradients, int64_t n, DType dtype) {
    if (!is_connected() || n == 0) return;
    exchange_->submit(stream, gradient_slot(), [&](Stream& exchange) {
        communicator_->all_reduce(exchange, gradients, n, dtype);
    });
}

void TensorGroup::wait_gradients(Stream& stream) {
    if (is_connected()) exchange_->hold(stream, gradient_slot());
}

void TensorGroup::hold_gradients(Stream& exchange) {
    if (is_connected()) exchange_->hold_other(exchange, gradient_slot());
}

namespace {

constexpr int64_t statistics = 3;  // of a row: softmax_stats()

/// How often ranks gather or add up all rows of a micro-batch in a layer.
int exchanges_of_layer(const TensorTraffic& t) {
    constexpr int forward = 4, gradients = 4, norms = 2, recomputed = 3, gradients_again = 2;
    const bool keeps_norms = t.keep_gathered || (t.recomputes_block && !t.halves_apart);
    return forward + gradients + (t.recomputes_block ? recomputed : 0) + (keeps_norms ? 0 : norms) +
           (t.halves_apart ? gradients_again : 0);
}

}  // namespace

std::vector<StepCollective> collectives_of_tensor(const Mesh& mesh, const StepSizes& sizes) {
    using Kind = StepCollective::Kind;
    const int64_t ranks = mesh.size(Axis::tensor);
    if (ranks == 1) return {};
    Communicator* const group = &mesh.along(Axis::tensor);
    const bool ends_model = mesh.at(Axis::pipeline) == mesh.size(Axis::pipeline) - 1;
    std::vector<StepCollective> all;
    for (const int64_t tokens : sizes.tokens) {
        const int64_t strip = tokens / ranks / sizes.tensor_chunks * sizes.width;
        all.push_back({Kind::reduce_scatter, group, sizes.dtype, strip});
        all.push_back({Kind::all_gather, group, sizes.dtype, strip});
        if (sizes.norms_width) all.push_back({Kind::all_reduce, group, DType::fp32, 2 * tokens});
    }
    for (const int64_t rows : sizes.head_rows)
        if (ends_model) all.push_back({Kind::all_gather, group, DType::fp32, rows * statistics});
    if (ends_model) all.push_back({Kind::all_gather, group, DType::fp32, sizes.vocabulary / ranks});
    return all;
}

int64_t tensor_bytes_sent(const TensorTraffic& t) {
    if (t.ranks == 1) return 0;
    const int64_t of_exchange =
        t.rows / t.ranks * (t.ranks - 1) * t.width * static_cast<int64_t>(size_of(t.dtype));
    const int exchanges =
        t.layers * exchanges_of_layer(t) + (t.has_embedding ? 2 : 0) + (t.has_head ? 2 : 0);
    const int64_t sums = 2 * t.rows * int64_t{sizeof(float)};
    const int64_t of_norms =
        t.layers_with_sums * (t.recomputes_block ? 3 : 2) * 2 * sums / t.ranks * (t.ranks - 1);
    return exchanges * of_exchange + of_norms +
           (t.has_head ? t.rows * statistics * int64_t{sizeof(float)} * (t.ranks - 1) : 0);
}

}  // namespace train_gpt
