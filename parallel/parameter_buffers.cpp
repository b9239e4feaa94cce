#include "parallel/parameter_buffers.h"

#include <algorithm>
#include <utility>

namespace train_gpt {

namespace {

/// In a group of one every stage holds everything; the first one needs no copies.
Sharding sensible(Sharding sharding) {
    if (sharding.size == 1) sharding.zero = 1;
    return sharding;
}

}  // namespace

ParameterBuffers::ParameterBuffers(Arena& arena, std::vector<Parameter> parameters, DType dtype,
                                   Use use, const Sharding& sharding)
    : parameters_(std::move(parameters)),
      dtype_(dtype),
      use_(use),
      device_(arena.device()),
      sharding_(sensible(sharding)),
      layout_(parameters_, sharding_.size, sharding_.bucket_elements) {
    for (const Parameter& p : parameters_)
        index_of_name_.emplace(p.name, static_cast<int>(index_of_name_.size()));
    find_buckets();
    allocate(arena);
    if (training()) find_pieces();
}

void ParameterBuffers::find_buckets() {
    const std::vector<Bucket>& buckets = layout_.buckets();
    bucket_of_unit_.resize(static_cast<size_t>(units()));
    for (size_t b = buckets.size(); b-- > 0;)
        for (int unit = buckets[b].first_unit; unit <= buckets[b].last_unit; ++unit)
            bucket_of_unit_[static_cast<size_t>(unit)] = b;
}

void ParameterBuffers::allocate(Arena& arena) {
    const auto take = [&](int64_t n, DType dtype, Purpose purpose, bool exchanged = false) {
        const size_t bytes = static_cast<size_t>(n) * size_of(dtype);
        void* const data = arena.take(bytes, purpose);
        if (exchanged && sharding_.size > 1 && bytes > 0)
            exchanged_.emplace_back(static_cast<std::byte*>(data), bytes);
        return data;
    };
    const auto floats = [&](int64_t n, Purpose purpose, bool exchanged = false) {
        return static_cast<float*>(take(n, DType::fp32, purpose, exchanged));
    };
    const bool rounds = sharding_.reduce_dtype == DType::bf16;
    weights_ = take(layout_.numel(), dtype_, Purpose::parameters, training() && sharding_.zero > 0);
    if (use_ == Use::inference) return;
    const int64_t owned_numel = sharding_.zero == 0 ? layout_.numel() : layout_.shard_numel();
    if (dtype_ == DType::bf16) master_ = floats(owned_numel, Purpose::masters);
    gradient_ = sharding_.zero == 2 ? floats(owned_numel, Purpose::gradients)
                                    : floats(layout_.numel(), Purpose::gradients, !rounds);
    m_ = floats(owned_numel, Purpose::moments);
    v_ = floats(owned_numel, Purpose::moments);
    int64_t embedding = 0, largest_of_blocks = 0, largest = 0;
    for (const Bucket& bucket : layout_.buckets()) {
        largest = std::max(largest, bucket.range.n);
        if (bucket.last_unit == 0)
            embedding = bucket.range.end();
        else
            largest_of_blocks = std::max(largest_of_blocks, bucket.range.n);
    }
    if (sharding_.zero == 2) {
        embedding_gradients_ = floats(embedding, Purpose::gradients, !rounds);
        for (float*& turn : block_gradients_)
            turn = floats(largest_of_blocks, Purpose::gradients, !rounds);
    }
    if (sharding_.size > 1 && rounds)
        rounded_gradients_ =
            static_cast<bf16*>(take(largest, DType::bf16, Purpose::workspaces, true));
}

void ParameterBuffers::find_pieces() {
    for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
        const Range tensor{layout_.offset(i), parameters_[static_cast<size_t>(i)].padded_numel()};
        const std::vector<Bucket>& buckets = layout_.buckets();
        auto b = std::partition_point(buckets.begin(), buckets.end(), [&](const Bucket& bucket) {
            return bucket.range.end() <= tensor.first;
        });
        for (; b != buckets.end() && b->range.first < tensor.end(); ++b) {
            const Bucket& bucket = *b;
            const Range mine = owned(bucket), part = intersection(mine, tensor);
            if (part.n == 0) continue;
            const int64_t at = owned_offset(bucket) + part.first - mine.first;
            const bool rounded = dtype_ == DType::bf16;
            void* const weights = weight_address(part.first);
            pieces_.push_back({.parameter = i,
                               .bucket = static_cast<int>(b - buckets.begin()),
                               .range = {part.first - tensor.first, part.n},
                               .weights = rounded ? static_cast<bf16*>(weights) : nullptr,
                               .master = rounded ? master_ + at : static_cast<float*>(weights),
                               .m = m_ + at,
                               .v = v_ + at,
                               .gradient = gradient_ + (sharding_.zero == 2 ? at : part.first)});
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

int ParameterBuffers::index_of(const std::string& name) const {
    const auto found = index_of_name_.find(name);
    return found == index_of_name_.end() ? -1 : found->second;
}

int64_t ParameterBuffers::logical_numel() const {
    int64_t n = 0;
    for (const Parameter& p : parameters_) n += p.numel();
    return n;
}

Tensor ParameterBuffers::weight(int i) const {
    const Parameter& p = parameters_[static_cast<size_t>(i)];
    void* data = weight_address(layout_.offset(i));
    if (p.padded.size() == 1) return {data, dtype_, {p.padded[0]}};
    return {data, dtype_, {p.padded[0], p.padded[1]}};
}

float* ParameterBuffers::bucket_gradients(size_t b) const {
    const Bucket& bucket = layout_.buckets()[b];
    if (sharding_.zero < 2) return gradient_ + bucket.range.first;
    if (bucket.last_unit == 0) return embedding_gradients_ + bucket.range.first;
    return block_gradients_[(layout_.buckets().size() - 1 - b) % turns];
}

float* ParameterBuffers::gradient_of_micro_batch(int i) const {
    const size_t b = bucket_of_unit_[static_cast<size_t>(parameters_[static_cast<size_t>(i)].unit)];
    return bucket_gradients(b) + (layout_.offset(i) - layout_.buckets()[b].range.first);
}

}  // namespace train_gpt
