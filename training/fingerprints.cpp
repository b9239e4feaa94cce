#include "training/fingerprints.h"

#include <algorithm>
#include <utility>

#include "device/copy.h"

namespace train_gpt {

namespace {

/// The sums over all ranks, modulo 2^64. Doubles hold sums of 32-bit numbers exactly.
void add_over_ranks(const World& world, std::vector<uint64_t>& sums) {
    std::vector<double> halves;
    for (const uint64_t sum : sums) {
        halves.push_back(static_cast<double>(sum >> 32));
        halves.push_back(static_cast<double>(sum & 0xffffffff));
    }
    world.all_reduce_sum(halves);
    for (size_t i = 0; i < sums.size(); ++i)
        sums[i] =
            (static_cast<uint64_t>(halves[2 * i]) << 32) + static_cast<uint64_t>(halves[2 * i + 1]);
}

}  // namespace

Fingerprints::Fingerprints(const ParameterStore& parameters, const BatchShape& batch, Arena& arena,
                           std::vector<std::string> names, bool wanted)
    : names_(std::move(names)),
      kinds_{"gradient", "master"},
      batch_(batch),
      adds_input_(wanted && parameters.sharding().tensor == 0 &&
                  parameters.sharding().pipeline == 0) {
    if (!wanted) return;
    for (const OptimizerSlot& slot : parameters.slots()) kinds_.push_back(slot.name);
    sums_ = static_cast<uint64_t*>(
        arena.take((hashes_of_tensors() + 1) * sizeof(uint64_t), Purpose::workspaces));
    input_ = sums_ + hashes_of_tensors();
    if (!arena.is_counting()) make_segments(parameters);
}

void Fingerprints::make_segments(const ParameterStore& parameters) {
    for (const ParameterStore::Piece& piece : parameters.pieces()) {
        if (!piece.is_first_copy) continue;
        const Parameter& p = parameters.parameters()[static_cast<size_t>(piece.parameter)];
        // Without the padding, which depends on the mesh.
        const int64_t n = std::min(piece.range.end(), p.held_numel()) - piece.range.first;
        if (n <= 0) continue;
        uint64_t* sum = sums_ + p.id * kinds_.size();
        const auto add = [&](const void* data, size_t bytes) {
            segments_.push_back({.data = data,
                                 .element_bytes = static_cast<int>(bytes),
                                 // Elements of different parts have different numbers.
                                 .first = p.held_by.rank * p.padded_numel() + piece.range.first,
                                 .n = n,
                                 .sum = sum++});
        };
        add(piece.gradient, sizeof *piece.gradient);
        add(piece.master, sizeof *piece.master);
        for (size_t k = 0; k < piece.slots.size(); ++k)
            if (piece.slots[k])
                add(piece.slots[k], size_of(parameters.slots()[k].dtype));
            else
                ++sum;
    }
}

void Fingerprints::begin_step(Stream& stream) {
    if (input_) clear(stream, input_, sizeof *input_);
}

void Fingerprints::add_input(Stream& stream, const TokenBatch& batch, int64_t micro_batch) {
    if (!adds_input_) return;
    constexpr int64_t all = int64_t{1} << 40;  // more tokens than a step has
    const ContextRank& context = batch_.context;
    const int chunks = context.is_split() ? 2 : 1,
              length = context.is_split() ? context.chunk_length(batch_.T) : batch_.T;
    std::vector<FingerprintSegment> segments;
    for (int64_t b = 0; b < batch_.B; ++b)
        for (int chunk = 0; chunk < chunks; ++chunk) {
            // Where the chunk is in memory, and in the step.
            const int64_t here = (b * chunks + chunk) * length,
                          position =
                              context.is_split() ? context.first_position(chunk, batch_.T) : 0,
                          first = (micro_batch * batch_.B + b) * batch_.T + position;
            segments.push_back(
                {.data = batch.tokens + here, .first = first, .n = length, .sum = input_});
            segments.push_back(
                {.data = batch.targets + here, .first = all + first, .n = length, .sum = input_});
        }
    add_fingerprints(stream, segments);
}

Fingerprints::OfStep Fingerprints::take(Stream& stream, const World& world) const {
    if (!sums_) return {};
    std::vector<uint64_t> sums(hashes_of_tensors() + 1);
    copy_now(stream.device, sums_, sums.data(), hashes_of_tensors() * sizeof(uint64_t));
    add_fingerprints(stream, segments_);
    copy_now(stream.device, sums.data(), sums_, sums.size() * sizeof(uint64_t));
    if (world.size() > 1) add_over_ranks(world, sums);
    OfStep step{.input = sums.back(), .tensors = {}};
    for (size_t t = 0; t < names_.size(); ++t) {
        const auto first = sums.begin() + static_cast<std::ptrdiff_t>(t * kinds_.size());
        step.tensors.push_back(
            {names_[t], {first, first + static_cast<std::ptrdiff_t>(kinds_.size())}});
    }
    return step;
}

}  // namespace train_gpt
