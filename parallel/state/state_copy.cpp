#include "parallel/state/state_copy.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "device/copy.h"
#include "parallel/state/parameter_state.h"

namespace train_gpt {

void StateCopy::copy_run(Stream& stream, const Run& run) {
    if (stream.device.is_cuda()) return copy(stream, run.to, run.from, run.bytes);
    constexpr size_t piece = 1 << 20;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < run.bytes; first += piece)
        std::memcpy(run.to + first, run.from + first, std::min(piece, run.bytes - first));
}

StateCopy::StateCopy(Arena& arena, const ParameterBuffers& buffers,
                     const std::vector<Other>& others)
    : buffers_(buffers), copies_(arena.device(), arena.is_counting()) {
    const size_t buckets = buffers.layout().buckets().size();
    runs_.resize(1 + buckets);
    read_.resize(runs_.size());
    if (!arena.is_counting()) {
        for (Event& read : read_) read = Event(arena.device());
        submitted_ = Event(arena.device());
    }
    const auto add = [&](size_t place, const void* memory, size_t bytes) -> const std::byte* {
        if (bytes == 0) return nullptr;
        const auto* from = static_cast<const std::byte*>(memory);
        auto* to = static_cast<std::byte*>(arena.take(bytes, Purpose::saving));
        std::vector<Run>& runs = runs_[place];
        // Neighbours in both memories are copied at once.
        if (!runs.empty() && runs.back().from + runs.back().bytes == from &&
            runs.back().to + runs.back().bytes == to)
            runs.back().bytes += bytes;
        else
            runs.push_back({from, to, bytes});
        return to;
    };
    for (const Other& other : others) others_.push_back(add(0, other.from, other.bytes));
    const size_t states = 1 + buffers.slots().size();
    places_.assign(buffers.pieces().size(), std::vector<const std::byte*>(states));
    // State by state, so that the pieces of a bucket are neighbours.
    for (size_t bucket = 0; bucket < buckets; ++bucket)
        for (size_t state = 0; state < states; ++state)
            for (size_t i = 0; i < buffers.pieces().size(); ++i) {
                const ParameterBuffers::Piece& piece = buffers.pieces()[i];
                if (static_cast<size_t>(piece.bucket) != bucket) continue;
                const DType dtype = state == 0 ? DType::fp32 : buffers.slots()[state - 1].dtype;
                const void* from =
                    state == 0 ? reinterpret_cast<char*>(piece.master) : piece.slots[state - 1];
                if (!from) continue;
                places_[i][state] =
                    add(1 + bucket, from, static_cast<size_t>(piece.range.n) * size_of(dtype));
            }
}

void StateCopy::begin(Stream& compute) {
    submitted_.record(compute);
    submitted_.hold(copies_);
    for (size_t place = 0; place < runs_.size(); ++place) {
        for (const Run& run : runs_[place]) copy_run(copies_, run);
        read_[place].record(copies_);
    }
}

std::span<const std::byte> StateCopy::view(const ParameterBuffers::Piece& piece,
                                           std::string_view state, int64_t n) const {
    const auto& slots = buffers_.slots();
    const auto slot = std::ranges::find(slots, state, &OptimizerSlot::name);
    assert(state == ParameterState::master || slot != slots.end());
    const bool is_master = state == ParameterState::master;
    const size_t place = is_master ? 0 : 1 + static_cast<size_t>(slot - slots.begin());
    const DType dtype = is_master ? DType::fp32 : slot->dtype;
    const auto piece_index = static_cast<size_t>(&piece - buffers_.pieces().data());
    return {places_[piece_index][place], static_cast<size_t>(n) * size_of(dtype)};
}

}  // namespace train_gpt
