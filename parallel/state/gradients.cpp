#include "parallel/state/gradients.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <utility>

#include "device/copy.h"
#include "device/trace.h"
#include "kernels/convert.h"

namespace train_gpt {

Gradients::Gradients(const ParameterBuffers& buffers, Grids* grids)
    : buffers_(buffers),
      grids_(grids),
      of_unit_(static_cast<size_t>(buffers.units())),
      written_(buffers.parameters().size()),
      summed_(written_.size()),
      ready_(buckets().size()),
      ready_of_unit_(static_cast<size_t>(buffers.units())),
      being_written_(buckets().size()) {
    for (size_t i = 0; i < written_.size(); ++i)
        of_unit_[static_cast<size_t>(buffers.parameters()[i].unit)].push_back(static_cast<int>(i));
}

void Gradients::connect(const Mesh& mesh, Exchange& exchange, TensorGroup* tensor) {
    const Sharding& sharding = buffers_.sharding();
    exchange_ = &exchange;
    if (sharding.tensors > 1) tensor_ = tensor;
    assert(bool(tensor_) == (sharding.tensors > 1));
    const auto connect = [&](SumOver over, bool has_others, size_t slots) {
        if (!has_others) return;
        Communicator& ranks = group_of(over, mesh, sharding);
        const std::vector<std::string> names(slots, mesh.name_of(ranks));
        groups_[over] = {.ranks = &ranks, .first_slot = exchange.add_slots(names)};
    };
    connect(SumOver::shards, sharding.size > 1, buckets().size());
    connect(SumOver::replicas, sharding.replicas > 1, buckets().size());
    connect(SumOver::ends, sharding.tied_ends, 1);
    sums_of_.assign(buckets().size(), {});
    for (const GradientSum& sum : gradient_sums(buffers_.layout(), buffers_.parameters(), sharding))
        if (sum.over == SumOver::ends)
            ends_sum_ = sum;
        else
            sums_of_[sum.first_bucket].push_back(sum);
    if (!has_shards()) return;
    Communicator& shards = *groups_.at(SumOver::shards).ranks;
    assert(shards.size() == sharding.size && shards.rank() == sharding.rank);
    Stream stream(buffers_.device());
    registration_ = shards.register_buffers(stream, buffers_.exchanged());
}

void Gradients::begin_step(int micro_batches, int most) {
    micro_batches_ = reduces_each() ? most : micro_batches;
    std::fill(written_.begin(), written_.end(), false);
    std::fill(summed_.begin(), summed_.end(), false);
    std::fill(ready_.begin(), ready_.end(), 0);
    std::fill(ready_of_unit_.begin(), ready_of_unit_.end(), 0);
    ++steps_;
    std::fill(being_written_.begin(), being_written_.end(), false);
}

/// Before gradients of a unit are written for a micro-batch: earlier gradients in the same memory
/// may still be on their way.
void Gradients::make_room(Stream& stream, int unit) {
    if (!reduces_each() || !has_shards()) return;
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit <= unit; ++b) {
        if (being_written_[b]) continue;
        being_written_[b] = true;
        size_t before = b;
        if (const int turn = buffers_.turn_of_gradients(b); turn >= 0)
            before = std::exchange(last_in_turn_[turn], b).value_or(b);
        assert(before == b || !being_written_[before]);
        exchange_->hold(stream, slot(SumOver::shards, before));
    }
}

GradientSink Gradients::sink(Stream& stream, int i) {
    if (i < 0) return {};
    make_room(stream, buffers_.parameters()[static_cast<size_t>(i)].unit);
    const bool accumulate = written_[static_cast<size_t>(i)];
    written_[static_cast<size_t>(i)] = true;
    float* const gradient = buffers_.gradient_of_micro_batch(i);
    // Integers may be in the same place.
    assert(!grids_ || !summed_[static_cast<size_t>(i)] || gradient != buffers_.reduced_gradient(i));
    return {gradient, DType::fp32, accumulate};
}

GradientSink Gradients::sink_of_rows(Stream& stream, int i) {
    if (!grids_ || i < 0) return sink(stream, i);
    assert(!has_rows_);
    make_room(stream, buffers_.parameters()[static_cast<size_t>(i)].unit);
    has_rows_ = i;
    rows_ = looks_only_ ? grids_->looked_at_rows_of(i) : grids_->rows_of(i);
    const bool accumulate = summed_[static_cast<size_t>(i)];
    summed_[static_cast<size_t>(i)] = true;
    return {buffers_.reduced_gradient(i), DType::int32, accumulate, &rows_};
}

void Gradients::end_contribution(Stream& stream, int unit) {
    if (!grids_) return;
    std::vector<ExactSegment> rounded;
    std::vector<LargestSegment> looked_at;
    for (const int i : of_unit_[static_cast<size_t>(unit)]) {
        const auto place = static_cast<size_t>(i);
        if (has_rows_ == i) {
            if (!looks_only_) count_largest(stream, grids_->largest_row_of(i, number_of(unit)));
            has_rows_.reset();
        }
        if (!written_[place]) continue;
        written_[place] = false;
        if (looks_only_) {
            looked_at.push_back(grids_->largest_of(i));
            continue;
        }
        rounded.push_back(grids_->rounded(i, summed_[place], number_of(unit)));
        summed_[place] = true;
    }
    if (!rounded.empty()) round_and_add(stream, rounded);
    if (!looked_at.empty()) block_maxima(stream, looked_at);
}

std::optional<int> Gradients::first_not_finite(int64_t steps_ago) const {
    const std::optional<int64_t> number = grids_ ? grids_->first_not_finite() : std::nullopt;
    if (!number || *number / most_micro_batches != steps_ - steps_ago) return {};
    return static_cast<int>(*number % most_micro_batches);
}

void Gradients::ready(Stream& stream, int unit) {
    end_contribution(stream, unit);
    ++ready_of_unit_[static_cast<size_t>(unit)];
    for (const int i : of_unit_[static_cast<size_t>(unit)]) {
        if (stand_alone()) written_[static_cast<size_t>(i)] = false;
        if (reduces_each()) summed_[static_cast<size_t>(i)] = false;
    }
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit <= unit; ++b) {
        ++ready_[b];
        if (ready_[b] % (reduces_each() ? units_of(b) : all_of(b)) != 0) continue;
        being_written_[b] = false;
        if (looks_only_ || !exchange_) continue;
        for (const GradientSum& sum : sums_of_[b])
            if (sum.every_micro_batch || ready_[b] == all_of(b)) add_over_ranks(stream, sum);
    }
}

/// Adds gradients of a bucket. A sum over replicas adds what the sums over shards have left in this
/// rank's elements, in the order of the replicas; others add all that this rank has computed.
void Gradients::add_over_ranks(Stream& stream, const GradientSum& sum) {
    const size_t b = sum.first_bucket;
    const Bucket& bucket = buckets()[b];
    float* const gradients = buffers_.bucket_gradients(b);
    if (sum.over == SumOver::tensor)
        return tensor_->add_up_gradients(stream,
                                         gradients + (sum.elements.first - bucket.range.first),
                                         sum.elements.n, sum.dtype);
    Communicator& ranks = *groups_.at(sum.over).ranks;
    const bool of_shards = sum.over == SumOver::shards, is_last = &sum == &sums_of_[b].back();
    const Range mine = buffers_.owned(bucket);
    const int64_t skipped = mine.first - bucket.range.first;
    float* const owned = buffers_.owned_gradients(bucket);
    exchange_->submit(stream, slot(sum.over, b), [&](Stream& exchange) {
        if (tensor_ && of_shards) tensor_->hold_gradients(exchange);
        const TraceSpan span(TraceTrack::exchange, exchange,
                             of_shards ? "reduce bucket" : "add replicas", static_cast<int>(b));
        float* const read = of_shards ? gradients : owned;
        const bool is_rounded = sum.dtype == DType::bf16;
        void* all = read;
        if (is_rounded) {
            bf16* rounded = buffers_.rounded_gradients();
            // Where no other micro-batch was added, the sums over shards are still there, rounded.
            if (of_shards || reduces_each())
                round_to_bf16(exchange, rounded, read, sum.elements.n);
            else
                rounded += skipped;
            all = rounded;
        }
        void* sums = all;
        if (sum.scattered) {
            sums = static_cast<char*>(all) + skipped * static_cast<int64_t>(size_of(sum.dtype));
            ranks.reduce_scatter(exchange, sums, all, bucket.shard, sum.dtype);
        } else {
            ranks.all_reduce(exchange, all, sum.elements.n, sum.dtype);
        }
        if (sum.every_micro_batch) {
            const bool accumulate = ready_[b] > units_of(b);
            if (grids_)
                add_integers(exchange, reinterpret_cast<int32_t*>(owned),
                             static_cast<const int32_t*>(sums), mine.n, accumulate);
            else
                widen(exchange, owned, sums, sum.dtype, mine.n, accumulate);
        } else if (is_rounded && is_last) {
            widen(exchange, owned, sums, sum.dtype, mine.n, false);
        }
        if (is_last && ready_[b] == all_of(b) && exchange_->beside() && !completes_late(b))
            when_summed_(exchange, b);
    });
}

void Gradients::skip(Stream& stream, int unit) {
    make_room(stream, unit);
    for (size_t b = buffers_.first_bucket(unit);
         b < buckets().size() && buckets()[b].first_unit == unit; ++b)
        clear(stream, buffers_.bucket_gradients(b),
              static_cast<size_t>(buckets()[b].range.n) * sizeof(float));
    ready(stream, unit);
}

/// Adds the gradient sums of both holders of a tied embedding. One rank of each holder has an
/// element's sum, so that two ranks contribute it and the others zeros.
void Gradients::add_over_ends(Stream& stream) {
    exchange_->submit(stream, slot(SumOver::ends), [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "add tied embedding");
        const int64_t n = ends_sum_->elements.n;
        float* const all = buffers_.reduced_gradient(ends_sum_->parameter);
        const auto pieces = buffers_.pieces_of(ends_sum_->parameter);
        const auto bytes = [](int64_t elements) {
            return static_cast<size_t>(elements) * sizeof(float);
        };
        // The pieces are within `all`, unless gradient sums have a buffer of their own.
        const bool apart = reduces_each();
        int64_t end = 0;
        for (const ParameterBuffers::Piece& piece : pieces) {
            clear(exchange, all + end, bytes(piece.range.first - end));
            end = piece.range.end();
            if (apart)
                copy(exchange, all + piece.range.first, piece.gradient, bytes(piece.range.n));
        }
        clear(exchange, all + end, bytes(n - end));
        groups_.at(SumOver::ends).ranks->all_reduce(exchange, all, n, ends_sum_->dtype);
        for (const ParameterBuffers::Piece& piece : pieces)
            if (apart)
                copy(exchange, piece.gradient, all + piece.range.first, bytes(piece.range.n));
    });
    exchange_->hold(stream, slot(SumOver::ends));
}

void Gradients::finish(Stream& stream) {
    // With the whole model on this rank, the embedding's gather has already waited for these sums.
    // Later pipeline stages have no embedding, so wait here.
    if (tensor_) tensor_->wait_gradients(stream);
    for (size_t b = 0; b < sums_of_.size(); ++b)
        for (const GradientSum& sum : sums_of_[b])
            if (sum.over != SumOver::tensor) exchange_->hold(stream, slot(sum.over, b));
    if (ends_sum_) add_over_ends(stream);
    for (size_t b = 0; b < buckets().size(); ++b)
        if (!has_shards() || !exchange_->beside() || completes_late(b)) when_summed_(stream, b);
}

}  // namespace train_gpt
