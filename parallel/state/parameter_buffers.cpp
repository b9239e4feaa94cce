#include "parallel/state/parameter_buffers.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace train_gpt {

namespace {

/// In a group of one every stage holds everything; the first one needs no copies.
Sharding sensible(Sharding sharding) {
    if (sharding.size == 1) sharding.zero = 1;
    return sharding;
}

}  // namespace

ParameterBuffers::ParameterBuffers(Arena& arena, std::vector<Parameter> parameters, DType dtype,
                                   Use use, const Sharding& sharding,
                                   std::vector<OptimizerSlot> slots)
    : parameters_(std::move(parameters)),
      dtype_(dtype),
      use_(use),
      device_(arena.device()),
      sharding_(sensible(sharding)),
      layout_(parameters_, sharding_.size, sharding_.bucket_elements),
      slots_(std::move(slots)) {
    for (const Parameter& p : parameters_)
        index_of_name_.emplace(p.name, static_cast<int>(index_of_name_.size()));
    find_units();
    allocate(arena);
    if (training()) find_pieces();
}

void ParameterBuffers::find_units() {
    range_of_unit_.resize(static_cast<size_t>(units()));
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const Range tensor{layout_.offset(static_cast<int>(i)), parameters_[i].padded_numel()};
        Range& unit = range_of_unit_[static_cast<size_t>(parameters_[i].unit)];
        const int64_t first = unit.n == 0 ? tensor.first : std::min(unit.first, tensor.first);
        unit = {first, std::max(unit.end(), tensor.end()) - first};
    }
    const std::vector<Bucket>& buckets = layout_.buckets();
    bucket_of_unit_.resize(static_cast<size_t>(units()));
    for (size_t b = buckets.size(); b-- > 0;)
        for (int unit = buckets[b].first_unit; unit <= buckets[b].last_unit; ++unit)
            bucket_of_unit_[static_cast<size_t>(unit)] = b;
}

void ParameterBuffers::allocate(Arena& arena) {
    using Spans = std::vector<std::span<std::byte>>;
    const auto take = [&](int64_t n, DType dtype, Purpose purpose, Spans* list = nullptr) {
        const size_t bytes = static_cast<size_t>(n) * size_of(dtype);
        void* const data = arena.take(bytes, purpose);
        if (list && bytes > 0) list->emplace_back(static_cast<std::byte*>(data), bytes);
        return data;
    };
    const auto floats = [&](int64_t n, Purpose purpose, Spans* list = nullptr) {
        return static_cast<float*>(take(n, DType::fp32, purpose, list));
    };
    int64_t embedding = 0, largest_in_turn[turns] = {}, largest = 0;
    for (size_t b = 0; b < layout_.buckets().size(); ++b) {
        const Range& range = layout_.buckets()[b].range;
        largest = std::max(largest, range.n);
        int64_t& of_place = is_embedding(b) ? embedding : largest_in_turn[turn_of(b)];
        of_place = is_embedding(b) ? range.end() : std::max(of_place, range.n);
    }
    const bool exchanges = training() && sharding_.size > 1;
    const bool rounds = sharding_.dtype_between_ranks() == DType::bf16;
    Spans* const if_exchanged = exchanges ? &exchanged_ : nullptr;
    const auto take_whole_weights = [&](int64_t n) {
        void* const data = take(n, dtype_, Purpose::parameters, &whole_weights_);
        if (exchanges && sharding_.is_split() && n > 0) exchanged_.push_back(whole_weights_.back());
        return data;
    };
    if (holds_all_weights()) {
        weights_ = take_whole_weights(layout_.numel());
    } else {
        weights_ = take(layout_.shard_numel(), dtype_, Purpose::parameters, if_exchanged);
        gathered_embedding_ = take_whole_weights(embedding);
        for (size_t turn = 0; turn < turns; ++turn) {
            int64_t n = 0;
            for (size_t b = 0; b < layout_.buckets().size(); ++b)
                if (turn_of_weights(b) == static_cast<int>(turn))
                    n = std::max(n, layout_.buckets()[b].range.n);
            gathered_[turn] = take_whole_weights(n);
        }
        if (has_large_head()) gathered_head_ = take_whole_weights(layout_.buckets().back().range.n);
    }
    if (use_ == Use::inference) return;

    const int64_t owned_numel = sharding_.is_split() ? layout_.shard_numel() : layout_.numel();
    const bool on_host = sharding_.state_on_host;
    if (dtype_ == DType::bf16)
        master_ = floats(owned_numel, on_host ? Purpose::offloaded : Purpose::masters);
    Spans* const if_sent = rounds ? nullptr : if_exchanged;
    const bool each = sharding_.reduces_each();
    gradient_ = each ? floats(owned_numel, Purpose::gradients)
                     : floats(layout_.numel(), Purpose::gradients, if_sent);
    for (const OptimizerSlot& slot : slots_)
        slot_memory_.push_back(
            take(elements_of(slot), slot.dtype, on_host ? Purpose::offloaded : Purpose::moments));
    if (each) {
        embedding_gradients_ = floats(embedding, Purpose::gradients, if_sent);
        for (size_t turn = 0; turn < turns; ++turn)
            block_gradients_[turn] = floats(largest_in_turn[turn], Purpose::gradients, if_sent);
    } else if (sharding_.gradients_stand_alone()) {
        const Range& most = *std::ranges::max_element(range_of_unit_, {}, &Range::n);
        unit_gradients_ = floats(most.n, Purpose::gradients);
    }
    if (exchanges && rounds)
        rounded_gradients_ =
            static_cast<bf16*>(take(largest, DType::bf16, Purpose::workspaces, if_exchanged));
}

bool ParameterBuffers::has_large_head() const {
    const auto numel_of = [&](int unit) {
        int64_t n = 0;
        for (const Parameter& p : parameters_)
            if (p.unit == unit) n += p.padded_numel();
        return n;
    };
    return units() > 2 && numel_of(units() - 1) > numel_of(1);
}

int ParameterBuffers::turn_of_weights(size_t b) const {
    const bool is_last = b + 1 == layout_.buckets().size();
    return is_embedding(b) || (is_last && has_large_head()) ? -1 : static_cast<int>(turn_of(b));
}

char* ParameterBuffers::bucket_weights(size_t b) const {
    const Bucket& bucket = layout_.buckets()[b];
    if (holds_all_weights()) return at(weights_, bucket.range.first);
    if (is_embedding(b)) return at(gathered_embedding_, bucket.range.first);
    const int turn = turn_of_weights(b);
    return static_cast<char*>(turn < 0 ? gathered_head_ : gathered_[turn]);
}

namespace {

/// Packed slots have pieces one after the other, at this alignment.
int64_t room_for(int64_t elements) { return (elements + 63) / 64 * 64; }

}  // namespace

std::vector<Range> ParameterBuffers::owned_of(int i, int rank) const {
    const Range tensor{layout_.offset(i), parameters_[static_cast<size_t>(i)].padded_numel()};
    const std::vector<Bucket>& buckets = layout_.buckets();
    auto bucket = std::partition_point(buckets.begin(), buckets.end(), [&](const Bucket& b) {
        return b.range.end() <= tensor.first;
    });
    std::vector<Range> owned;
    for (; bucket != buckets.end() && bucket->range.first < tensor.end(); ++bucket)
        if (const Range part = intersection(owned_by(*bucket, rank), tensor); part.n > 0)
            owned.push_back({part.first - tensor.first, part.n});
    return owned;
}

/// The elements of a slot: on every rank as many as on the rank that has most.
int64_t ParameterBuffers::elements_of(const OptimizerSlot& slot) const {
    if (!is_packed(slot)) return sharding_.is_split() ? layout_.shard_numel() : layout_.numel();
    int64_t most = 0;
    for (int rank = 0; rank < (sharding_.is_split() ? sharding_.size : 1); ++rank) {
        int64_t n = 0;
        for (int i = 0; i < static_cast<int>(parameters_.size()); ++i)
            if (has(slot, i))
                for (const Range& part : owned_of(i, rank)) n += room_for(slot.count(part.n));
        most = std::max(most, n);
    }
    return most;
}

void ParameterBuffers::find_pieces() {
    std::vector<int64_t> packed(slots_.size());  // elements of the pieces before
    const std::vector<Bucket>& buckets = layout_.buckets();
    for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
        const Parameter& p = parameters_[static_cast<size_t>(i)];
        const bool is_first_copy =
            !sharding_.is_copy() && (p.split || sharding_.tensor == 0) && p.tied_to.empty();
        for (const Range& part : owned_of(i, sharding_.rank)) {
            const int64_t place = layout_.offset(i) + part.first;
            const auto b = std::partition_point(
                buckets.begin(), buckets.end(),
                [&](const Bucket& bucket) { return bucket.range.end() <= place; });
            const int64_t skipped = place - owned(*b).first, in_owned = owned_offset(*b) + skipped;
            const bool rounded = dtype_ == DType::bf16;
            void* const weights = at(owned_weights(*b), skipped);
            std::vector<char*> slots;
            for (size_t k = 0; k < slots_.size(); ++k) {
                slots.push_back(has(slots_[k], i)
                                    ? static_cast<char*>(slot_memory_[k]) +
                                          (is_packed(slots_[k]) ? packed[k] : in_owned) *
                                              static_cast<int64_t>(size_of(slots_[k].dtype))
                                    : nullptr);
                if (has(slots_[k], i)) packed[k] += room_for(slots_[k].count(part.n));
            }
            pieces_.push_back(
                {.parameter = i,
                 .bucket = static_cast<int>(b - buckets.begin()),
                 .range = part,
                 .weights = rounded ? static_cast<bf16*>(weights) : nullptr,
                 .master = rounded ? master_ + in_owned : static_cast<float*>(weights),
                 .gradient = owned_gradients(*b) + skipped,
                 .slots = std::move(slots),
                 .is_first_copy = is_first_copy});
        }
    }
}

std::span<const ParameterBuffers::Piece> ParameterBuffers::pieces_of(int i) const {
    const auto before = [](const Piece& piece, int parameter) {
        return piece.parameter < parameter;
    };
    const auto first = std::lower_bound(pieces_.begin(), pieces_.end(), i, before);
    return {first, std::lower_bound(first, pieces_.end(), i + 1, before)};
}

std::span<std::byte> ParameterBuffers::memory_of(const Piece& piece, size_t state) const {
    const OptimizerSlot slot = state == 0 ? OptimizerSlot{} : slots_[state - 1];
    char* const data = state == 0 ? reinterpret_cast<char*>(piece.master) : piece.slots[state - 1];
    return {reinterpret_cast<std::byte*>(data), data ? slot.bytes(piece.range.n) : 0};
}

int ParameterBuffers::index_of(const std::string& name) const {
    const auto found = index_of_name_.find(name);
    return found == index_of_name_.end() ? -1 : found->second;
}

size_t ParameterBuffers::slot_of(std::string_view name) const {
    const auto slot = std::ranges::find(slots_, name, &OptimizerSlot::name);
    if (slot == slots_.end()) throw Error("the optimizer has no state \"", name, "\"");
    return static_cast<size_t>(slot - slots_.begin());
}

Tensor ParameterBuffers::weight(int i) const {
    const Parameter& p = parameters_[static_cast<size_t>(i)];
    const size_t b = first_bucket(p.unit);
    void* data = at(bucket_weights(b), layout_.offset(i) - layout_.buckets()[b].range.first);
    if (p.padded.size() == 1) return {data, dtype_, {p.padded[0]}};
    return {data, dtype_, {p.padded[0], p.padded[1]}};
}

float* ParameterBuffers::bucket_gradients(size_t b) const {
    const Bucket& bucket = layout_.buckets()[b];
    if (!sharding_.reduces_each()) return gradient_ + bucket.range.first;
    if (is_embedding(b)) return embedding_gradients_ + bucket.range.first;
    return block_gradients_[turn_of(b)];
}

float* ParameterBuffers::gradient_of_micro_batch(int i) const {
    if (!unit_gradients_) return reduced_gradient(i);
    const auto unit = static_cast<size_t>(parameters_[static_cast<size_t>(i)].unit);
    return unit_gradients_ + (layout_.offset(i) - range_of_unit_[unit].first);
}

float* ParameterBuffers::reduced_gradient(int i) const {
    const size_t b = bucket_of_unit_[static_cast<size_t>(parameters_[static_cast<size_t>(i)].unit)];
    return bucket_gradients(b) + (layout_.offset(i) - layout_.buckets()[b].range.first);
}

}  // namespace train_gpt
