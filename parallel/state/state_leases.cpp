#include "parallel/state/state_leases.h"

#include <algorithm>
#include <cassert>

#include "device/copy.h"
#include "device/trace.h"

namespace train_gpt {

namespace {

constexpr size_t lease_alignment = 256;  // of leased memory, as Arena::take() aligns host memory

size_t after_alignment(size_t bytes) {
    return (bytes + lease_alignment - 1) / lease_alignment * lease_alignment;
}

}  // namespace

StateLeases::StateLeases(Arena& arena, const ParameterBuffers& buffers)
    : buffers_(buffers),
      states_(1 + buffers.slots().size()),
      in_(arena.device(), arena.is_counting() || !is_copied()),
      out_(arena.device(), arena.is_counting() || !is_copied()) {
    if (!is_copied()) return;
    find_leases();
    std::byte* memory[turns];
    for (size_t turn = 0; turn < turns; ++turn)
        memory[turn] = static_cast<std::byte*>(
            arena.take(static_cast<size_t>(largest_[turn]), Purpose::workspaces));
    if (arena.is_counting()) return;
    place(memory);
    used_ = Event(arena.device());
    for (Event& event : free_) event = Event(arena.device());
    for (size_t i = 0; i < leases_.size(); ++i) {
        fetched_.emplace_back(arena.device());
        written_.emplace_back(arena.device());
    }
    next_ = leases_.size();
}

/// Finds the runs of each lease. Their `leased` counts from the beginning of the turn's memory.
void StateLeases::find_leases() {
    struct State {
        size_t piece, state;
        std::byte* on_host;
        size_t bytes, gap;  // gap: less than any tensor takes
    };
    const auto& pieces = buffers_.pieces();
    const size_t buckets = buffers_.layout().buckets().size();
    for (const Part part : {Part::momentum, Part::elements}) {
        std::vector<std::vector<State>> of_bucket(buckets);
        for (size_t p = 0; p < pieces.size(); ++p)
            for (size_t state = 0; state < states_; ++state) {
                const ParameterBuffers::Piece& piece = pieces[p];
                const bool is_momentum = state == 1 && buffers_.is_matrix(piece.parameter);
                if (is_momentum != (part == Part::momentum)) continue;
                const std::span<std::byte> memory = buffers_.memory_of(piece, state);
                // In fp32 the masters are the weights, which are on the device.
                if (memory.empty() || (state == 0 && !piece.weights)) continue;
                const size_t element =
                    size_of(state == 0 ? DType::fp32 : buffers_.slots()[state - 1].dtype);
                of_bucket[static_cast<size_t>(piece.bucket)].push_back(
                    {p, state, memory.data(), memory.size(), 64 * element});
            }
        auto& lease_of_bucket = lease_of_bucket_[static_cast<size_t>(part)];
        for (size_t b = 0; b < buckets; ++b) {
            std::vector<State>& states = of_bucket[b];
            lease_of_bucket.push_back(states.empty() ? none : leases_.size());
            if (states.empty()) continue;
            std::ranges::sort(states, {}, &State::on_host);
            Lease lease{.part = part, .bucket = b, .runs = {}};
            size_t used = 0;
            for (const State& state : states) {
                ByteRun* last = lease.runs.empty() ? nullptr : &lease.runs.back();
                if (!last || state.on_host >= last->on_host + last->bytes + state.gap) {
                    if (last) used += after_alignment(last->bytes);
                    // NOLINTNEXTLINE(performance-no-int-to-ptr): an offset until place()
                    lease.runs.push_back({state.on_host, reinterpret_cast<std::byte*>(used), 0});
                    last = &lease.runs.back();
                }
                last->bytes = static_cast<size_t>(state.on_host + state.bytes - last->on_host);
            }
            used += after_alignment(lease.runs.back().bytes);
            int64_t& largest = largest_[leases_.size() % turns];
            largest = std::max(largest, static_cast<int64_t>(used));
            for (const ByteRun& run : lease.runs) bytes_ += static_cast<int64_t>(run.bytes);
            leases_.push_back(std::move(lease));
        }
    }
}

void StateLeases::place(std::byte* const (&memory)[turns]) {
    for (size_t i = 0; i < leases_.size(); ++i)
        for (ByteRun& run : leases_[i].runs)
            run.leased = memory[i % turns] + reinterpret_cast<uintptr_t>(run.leased);
    const auto& pieces = buffers_.pieces();
    places_.resize(pieces.size() * states_);
    for (size_t p = 0; p < pieces.size(); ++p)
        for (size_t state = 0; state < states_; ++state) {
            const bool is_momentum = state == 1 && buffers_.is_matrix(pieces[p].parameter);
            const size_t lease = lease_of(is_momentum ? Part::momentum : Part::elements,
                                          static_cast<size_t>(pieces[p].bucket));
            const std::span<std::byte> on_host = buffers_.memory_of(pieces[p], state);
            if (lease == none || on_host.empty()) continue;
            for (const ByteRun& run : leases_[lease].runs)
                if (on_host.data() >= run.on_host && on_host.data() < run.on_host + run.bytes)
                    places_[p * states_ + state] = run.leased + (on_host.data() - run.on_host);
        }
}

ParameterBuffers::Piece StateLeases::leased(const ParameterBuffers::Piece& piece) const {
    ParameterBuffers::Piece leased = piece;
    if (!is_copied()) return leased;
    const size_t first = static_cast<size_t>(&piece - buffers_.pieces().data()) * states_;
    if (std::byte* const place = places_[first]) leased.master = reinterpret_cast<float*>(place);
    for (size_t slot = 0; slot < piece.slots.size(); ++slot)
        leased.slots[slot] = reinterpret_cast<char*>(places_[first + 1 + slot]);
    return leased;
}

size_t StateLeases::lease_of(Part part, size_t bucket) const {
    return is_copied() ? lease_of_bucket_[static_cast<size_t>(part)][bucket] : none;
}

void StateLeases::fetch(size_t lease) {
    // What was in this memory has gone back; and so has all that went before it, among it this
    // lease's state of the step before.
    free_[lease % turns].hold(in_);
    const TraceSpan span(TraceTrack::from_host, in_, "fetch state",
                         static_cast<int>(leases_[lease].bucket));
    for (const ByteRun& run : leases_[lease].runs) copy(in_, run.leased, run.on_host, run.bytes);
    fetched_[lease].record(in_);
    next_ = lease + 1;
}

void StateLeases::begin_step() {
    if (!is_copied() || next_ < leases_.size()) return;
    next_ = 0;
    while (next_ < std::min(turns, leases_.size())) fetch(next_);
}

void StateLeases::acquire(Stream& stream, Part part, size_t bucket) {
    const size_t lease = lease_of(part, bucket);
    if (lease == none) return;
    assert(lease < next_);
    fetched_[lease].hold(stream);
}

void StateLeases::release(Stream& stream, Part part, size_t bucket) {
    const size_t lease = lease_of(part, bucket);
    if (lease == none) return;
    used_.record(stream);
    used_.hold(out_);
    {
        const TraceSpan span(TraceTrack::to_host, out_, "store state", static_cast<int>(bucket));
        for (const ByteRun& run : leases_[lease].runs)
            copy(out_, run.on_host, run.leased, run.bytes);
    }
    written_[lease].record(out_);
    free_[lease % turns].record(out_);
    if (lease + turns < leases_.size()) fetch(lease + turns);
}

void StateLeases::settle(Stream& stream) const {
    if (is_copied() && !written_.empty()) written_.back().hold(stream);
}

}  // namespace train_gpt
