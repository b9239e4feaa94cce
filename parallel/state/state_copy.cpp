#include "parallel/state/state_copy.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <numeric>

#include "device/copy.h"
#include "parallel/state/parameter_state.h"

namespace train_gpt {

void StateCopy::copy_run(Stream& stream, const ByteRun& run) {
    if (stream.device.is_cuda()) return copy(stream, run.to, run.from, run.bytes);
    constexpr size_t piece = 1 << 20;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < run.bytes; first += piece)
        std::memcpy(run.to + first, run.from + first, std::min(piece, run.bytes - first));
}

StateCopy::StateCopy(Arena& arena, const ParameterBuffers& buffers,
                     const std::vector<Other>& others)
    : buffers_(buffers),
      copies_(arena.device(), arena.is_counting()),
      states_(1 + buffers.slots().size()) {
    const std::vector<ParameterBuffers::Piece>& pieces = buffers.pieces();
    const bool counts = arena.is_counting();
    if (!counts) {
        runs_.resize(1 + buffers.layout().buckets().size());
        for (size_t i = 0; i < runs_.size(); ++i) read_.emplace_back(arena.device());
        submitted_ = Event(arena.device());
        places_.resize(pieces.size() * states_);
    }
    const auto take = [&](size_t bytes) {
        return bytes == 0 ? nullptr : static_cast<std::byte*>(arena.take(bytes, Purpose::saving));
    };
    for (const Other& other : others) {
        std::byte* const to = take(other.bytes);
        others_.push_back(to);
        if (to && !counts)
            runs_[0].push_back({static_cast<const std::byte*>(other.from), to, other.bytes});
    }
    std::vector<size_t> order(pieces.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, {}, [&](size_t i) { return pieces[i].bucket; });
    for (auto first = order.begin(), last = first; first != order.end(); first = last) {
        const int bucket = pieces[*first].bucket;
        last =
            std::find_if(first, order.end(), [&](size_t i) { return pieces[i].bucket != bucket; });
        for (size_t state = 0; state < states_; ++state) {
            size_t bytes = 0;
            for (auto i = first; i != last; ++i)
                bytes += buffers.memory_of(pieces[*i], state).size();
            std::byte* to = take(bytes);
            if (counts) continue;
            for (auto i = first; i != last; ++i) {
                const std::span<const std::byte> from = buffers.memory_of(pieces[*i], state);
                if (from.empty()) continue;
                places_[*i * states_ + state] = to;
                std::vector<ByteRun>& runs = runs_[static_cast<size_t>(1 + bucket)];
                // Neighbours in both memories are copied at once.
                if (!runs.empty() && runs.back().from + runs.back().bytes == from.data() &&
                    runs.back().to + runs.back().bytes == to)
                    runs.back().bytes += from.size();
                else
                    runs.push_back({from.data(), to, from.size()});
                to += from.size();
            }
        }
    }
}

void StateCopy::touch(const std::atomic<bool>& ends) {
    if (copies_.device.is_cuda()) return;
    constexpr size_t page = 4096;
    for (const std::vector<ByteRun>& runs : runs_)
        for (const ByteRun& run : runs)
            for (size_t at = 0; at < run.bytes && !ends; at += page)
                *static_cast<volatile std::byte*>(run.to + at) = std::byte{0};
}

void StateCopy::begin(Stream& compute) {
    submitted_.record(compute);
    submitted_.hold(copies_);
    for (size_t place = 0; place < runs_.size(); ++place) {
        for (const ByteRun& run : runs_[place]) copy_run(copies_, run);
        read_[place].record(copies_);
    }
}

std::span<const std::byte> StateCopy::view(const ParameterBuffers::Piece& piece,
                                           std::string_view state, int64_t n) const {
    const bool is_master = state == ParameterState::master;
    const size_t slot = is_master ? 0 : buffers_.slot_of(state);
    const size_t place = is_master ? 0 : 1 + slot;
    const auto piece_index = static_cast<size_t>(&piece - buffers_.pieces().data());
    return {places_[piece_index * states_ + place],
            (is_master ? OptimizerSlot{} : buffers_.slots()[slot]).bytes(n)};
}

}  // namespace train_gpt
