#include "training/fingerprints.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
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

/// " (rank 3 (host a) differs from the others)": the ranks whose text is not the one that most
/// have.
std::string describe_minority(const World& world, const std::vector<std::string>& texts) {
    std::map<std::string, int> counts;
    for (const std::string& text : texts)
        if (!text.empty()) ++counts[text];
    if (counts.size() < 2) return "";
    const auto most =
        std::ranges::max_element(counts, {}, [](const auto& count) { return count.second; });
    const auto as_many = std::ranges::count_if(
        counts, [&](const auto& count) { return count.second == most->second; });
    std::string named;
    int64_t ranks = 0;
    for (int rank = 0; rank < std::ssize(texts); ++rank) {
        const std::string& text = texts[static_cast<size_t>(rank)];
        if (text.empty() || (as_many == 1 && text == most->first)) continue;
        named += (named.empty() ? "" : ", ") + world.describe(rank);
        ++ranks;
    }
    return concat(" (", named,
                  as_many > 1 ? " differ from each other"
                  : ranks > 1 ? " differ from the others"
                              : " differs from the others",
                  ")");
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
        arena.take((2 * hashes_of_tensors() + 1) * sizeof(uint64_t), Purpose::workspaces));
    copies_ = sums_ + hashes_of_tensors();
    input_ = copies_ + hashes_of_tensors();
    if (!arena.is_counting()) make_segments(parameters);
}

void Fingerprints::make_segments(const ParameterStore& parameters) {
    held_.assign(names_.size(), 0);
    copied_.assign(names_.size(), 0);
    for (const ParameterStore::Piece& piece : parameters.pieces()) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(piece.parameter)];
        if (!p.tied_to.empty()) continue;
        // Without the padding, which depends on the mesh.
        const int64_t n = std::min(piece.range.end(), p.held_numel()) - piece.range.first;
        if (n <= 0) continue;
        uint64_t* sum = (piece.is_first_copy ? sums_ : copies_) + p.id * kinds_.size();
        (piece.is_first_copy ? held_ : copied_)[p.id] += n;
        const auto add = [&](const void* data, const OptimizerSlot& slot) {
            segments_.push_back(
                {.data = data,
                 .element_bytes = static_cast<int>(size_of(slot.dtype)),
                 // Elements of different parts have different numbers.
                 .first = (p.split ? p.held_by.rank * slot.count(p.padded_numel()) : 0) +
                          piece.range.first / slot.block,
                 .n = slot.count(n),
                 .sum = sum++});
        };
        add(piece.gradient, {});
        add(piece.master, {});
        for (size_t k = 0; k < piece.slots.size(); ++k)
            if (piece.slots[k])
                add(piece.slots[k], parameters.slots()[k]);
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
    const size_t n = hashes_of_tensors();
    std::vector<uint64_t> sums(2 * n + 1);
    copy_now(stream.device, sums_, sums.data(), 2 * n * sizeof(uint64_t));
    add_fingerprints(stream, segments_);
    copy_now(stream.device, sums.data(), sums_, sums.size() * sizeof(uint64_t));
    OfStep step;
    if (world.size() > 1) {
        const std::vector<uint64_t> of_this_rank = sums;
        add_over_ranks(world, sums);
        step.differing_copies = compare_copies(world, sums, of_this_rank);
    }
    step.input = sums.back();
    for (size_t t = 0; t < names_.size(); ++t) {
        const auto first = sums.begin() + static_cast<std::ptrdiff_t>(t * kinds_.size());
        step.tensors.push_back(
            {names_[t], {first, first + static_cast<std::ptrdiff_t>(kinds_.size())}});
    }
    return step;
}

/// If k ranks hold copies of what others hold first, the copies' hashes add up to k times the first
/// ones' sum. Gradients are not compared: what a rank adds to is not always a copy.
std::string Fingerprints::compare_copies(const World& world, const std::vector<uint64_t>& of_all,
                                         const std::vector<uint64_t>& of_this_rank) const {
    const size_t n = hashes_of_tensors(), kinds = kinds_.size();
    std::vector<double> elements(held_.begin(), held_.end());
    elements.insert(elements.end(), copied_.begin(), copied_.end());
    world.all_reduce_sum(elements);
    for (size_t t = 0; t < names_.size(); ++t) {
        if (elements[t] == 0) continue;
        const auto copies = static_cast<uint64_t>(elements[names_.size() + t] / elements[t]);
        for (size_t kind = 1; kind < kinds; ++kind) {
            const size_t i = t * kinds + kind;
            if (of_all[n + i] == copies * of_all[i]) continue;
            // Which ranks? Those that hold all of the tensor can be told apart by their hashes.
            const auto whole = static_cast<int64_t>(elements[t]);
            const bool has_all = held_[t] == whole || copied_[t] == whole;
            const std::vector<std::string> hashes = world.all_gather(
                has_all ? std::to_string(of_this_rank[held_[t] == whole ? i : n + i]) : "");
            return concat(kinds_[kind], " of ", names_[t],
                          " is not the same on all ranks that hold it",
                          describe_minority(world, hashes));
        }
    }
    return "";
}

}  // namespace train_gpt
