#include "parallel/parameters.h"

#include <algorithm>
#include <cassert>

#include "base/random.h"
#include "device/copy.h"
#include "kernels/convert.h"

namespace train_gpt {

namespace {

float* state_of(const ParameterStore::Piece& piece, ParameterStore::State state) {
    switch (state) {
        case ParameterStore::State::master:
            return piece.master;
        case ParameterStore::State::moment1:
            return piece.m;
        case ParameterStore::State::moment2:
            return piece.v;
        case ParameterStore::State::gradient:
            break;
    }
    return piece.gradient;
}

/// In a group of one every stage holds everything; the first one needs no copies.
Sharding sensible(Sharding sharding) {
    if (sharding.size == 1) sharding.zero = 1;
    return sharding;
}

}  // namespace

ParameterStore::ParameterStore(Arena& arena, std::vector<Parameter> parameters, DType dtype,
                               Use use, const Sharding& sharding)
    : parameters_(std::move(parameters)),
      dtype_(dtype),
      use_(use),
      device_(arena.device()),
      sharding_(sensible(sharding)),
      layout_(parameters_, sharding_.size, sharding_.bucket_elements) {
    for (const Parameter& p : parameters_)
        index_of_name_.emplace(p.name, static_cast<int>(index_of_name_.size()));
    const std::vector<Bucket>& buckets = layout_.buckets();
    bucket_of_unit_.resize(static_cast<size_t>(units()));
    for (size_t b = buckets.size(); b-- > 0;)
        for (int unit = buckets[b].first_unit; unit <= buckets[b].last_unit; ++unit)
            bucket_of_unit_[static_cast<size_t>(unit)] = b;
    units_missing_.resize(buckets.size());

    const auto floats = [&](int64_t n, Purpose purpose) {
        return static_cast<float*>(arena.take(static_cast<size_t>(n) * sizeof(float), purpose));
    };
    weights_ =
        arena.take(static_cast<size_t>(layout_.numel()) * size_of(dtype_), Purpose::parameters);
    if (use_ == Use::inference) return;
    const int64_t owned_numel = sharding_.zero == 0 ? layout_.numel() : layout_.shard_numel();
    if (dtype_ == DType::bf16) master_ = floats(owned_numel, Purpose::masters);
    gradient_ = floats(sharding_.zero == 2 ? owned_numel : layout_.numel(), Purpose::gradients);
    m_ = floats(owned_numel, Purpose::moments);
    v_ = floats(owned_numel, Purpose::moments);
    int64_t embedding = 0, largest_of_blocks = 0, largest = 0;
    for (const Bucket& bucket : buckets) {
        largest = std::max(largest, bucket.range.n);
        if (bucket.last_unit == 0)
            embedding = bucket.range.end();
        else
            largest_of_blocks = std::max(largest_of_blocks, bucket.range.n);
    }
    if (sharding_.zero == 2) {
        embedding_gradients_ = floats(embedding, Purpose::gradients);
        for (float*& turn : block_gradients_) turn = floats(largest_of_blocks, Purpose::gradients);
    }
    if (sharding_.size > 1 && sharding_.reduce_dtype == DType::bf16)
        rounded_gradients_ = static_cast<bf16*>(
            arena.take(static_cast<size_t>(largest) * sizeof(bf16), Purpose::workspaces));
    find_pieces();
}

void ParameterStore::find_pieces() {
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

std::span<const ParameterStore::Piece> ParameterStore::pieces_of(int i) const {
    const auto before = [](const Piece& piece, int parameter) {
        return piece.parameter < parameter;
    };
    const auto first = std::lower_bound(pieces_.begin(), pieces_.end(), i, before);
    return {first, std::lower_bound(first, pieces_.end(), i + 1, before)};
}

void ParameterStore::connect(Communicator& communicator, StepClock* clock) {
    assert(communicator.size() == sharding_.size && communicator.rank() == sharding_.rank);
    if (communicator.size() > 1)
        exchange_ = std::make_unique<Exchange>(device_, communicator, sum_slot() + 1, clock);
}

int ParameterStore::index_of(const std::string& name) const {
    const auto found = index_of_name_.find(name);
    return found == index_of_name_.end() ? -1 : found->second;
}

int64_t ParameterStore::logical_numel() const {
    int64_t n = 0;
    for (const Parameter& p : parameters_) n += p.numel();
    return n;
}

Tensor ParameterStore::weight(int i) const {
    const Parameter& p = parameters_[static_cast<size_t>(i)];
    void* data = weight_address(layout_.offset(i));
    if (p.padded.size() == 1) return {data, dtype_, {p.padded[0]}};
    return {data, dtype_, {p.padded[0], p.padded[1]}};
}

// --- in a step -----------------------------------------------------------------------------------------------------

void ParameterStore::acquire(Stream& stream, int unit) {
    if (!exchange_) return;
    const std::vector<Bucket>& buckets = layout_.buckets();
    for (size_t b = bucket_of_unit_[static_cast<size_t>(unit)];
         b < buckets.size() && buckets[b].first_unit <= unit; ++b)
        exchange_->hold(stream, gather_slot(b));
}

float* ParameterStore::bucket_gradients(size_t b) const {
    const Bucket& bucket = layout_.buckets()[b];
    if (sharding_.zero < 2) return gradient_ + bucket.range.first;
    if (bucket.last_unit == 0) return embedding_gradients_ + bucket.range.first;
    return block_gradients_[(layout_.buckets().size() - 1 - b) % turns];
}

float* ParameterStore::gradient_of_micro_batch(int i) const {
    const size_t b = bucket_of_unit_[static_cast<size_t>(parameters_[static_cast<size_t>(i)].unit)];
    return bucket_gradients(b) + (layout_.offset(i) - layout_.buckets()[b].range.first);
}

void ParameterStore::begin_backward(Stream& stream) {
    for (size_t b = 0; b < units_missing_.size(); ++b) {
        const Bucket& bucket = layout_.buckets()[b];
        units_missing_[b] = bucket.last_unit - bucket.first_unit + 1;
        // Gradients of the micro-batch before may still be on their way from where these will be written.
        if (sharding_.zero == 2 && exchange_) exchange_->hold(stream, reduce_slot(b));
    }
}

void ParameterStore::gradients_ready(Stream& stream, int unit) {
    if (!exchange_ || (sharding_.zero < 2 && !last_micro_batch_)) return;
    const std::vector<Bucket>& buckets = layout_.buckets();
    for (size_t b = bucket_of_unit_[static_cast<size_t>(unit)];
         b < buckets.size() && buckets[b].first_unit <= unit; ++b)
        if (--units_missing_[b] == 0) reduce(stream, b);
}

void ParameterStore::reduce(Stream& stream, size_t b) {
    const Bucket& bucket = layout_.buckets()[b];
    const Range mine = owned(bucket);
    const int64_t skipped = mine.first - bucket.range.first;
    float* const gradients = bucket_gradients(b);
    exchange_->submit(stream, reduce_slot(b), [&](Stream& exchange) {
        Communicator& group = exchange_->communicator();
        const DType dtype = sharding_.reduce_dtype;
        const bool rounded = dtype == DType::bf16;
        void* const all = rounded ? static_cast<void*>(rounded_gradients_) : gradients;
        void* const sums = static_cast<char*>(all) + skipped * static_cast<int64_t>(size_of(dtype));
        if (rounded) round_to_bf16(exchange, rounded_gradients_, gradients, bucket.range.n);
        if (sharding_.zero == 0)
            group.all_reduce(exchange, all, bucket.range.n, dtype);
        else
            group.reduce_scatter(exchange, sums, all, bucket.shard, dtype);
        if (sharding_.zero == 2)
            widen(exchange, gradient_ + owned_offset(bucket), sums, dtype, mine.n,
                  !first_micro_batch_);
        else if (rounded)
            widen(exchange, gradients + skipped, sums, dtype, mine.n, false);
        if (last_micro_batch_ && exchange_->beside()) behind_sums_(exchange, b);
    });
    // The memory that the bucket after the next one writes to was last used by the one before this.
    if (sharding_.zero == 2 && b + 1 < layout_.buckets().size() && bucket.first_unit > 0)
        exchange_->hold(stream, reduce_slot(b + 1));
}

void ParameterStore::skip_micro_batch(Stream& stream) {
    if (sharding_.zero < 2) return;
    first_micro_batch_ = false;
    begin_backward(stream);
    for (int unit = units() - 1; unit >= 0; --unit) {
        for (size_t b = bucket_of_unit_[static_cast<size_t>(unit)];
             b < layout_.buckets().size() && layout_.buckets()[b].first_unit == unit; ++b)
            clear(stream, bucket_gradients(b),
                  static_cast<size_t>(layout_.buckets()[b].range.n) * sizeof(float));
        gradients_ready(stream, unit);
    }
}

void ParameterStore::finish_gradients(Stream& stream) {
    for (size_t b = 0; b < layout_.buckets().size(); ++b) {
        if (exchange_) exchange_->hold(stream, reduce_slot(b));
        if (!exchange_ || !exchange_->beside()) behind_sums_(stream, b);
    }
}

void ParameterStore::gather(Stream& stream, int b) {
    if (!exchange_ || sharding_.zero == 0) return;
    const Bucket& bucket = layout_.buckets()[static_cast<size_t>(b)];
    exchange_->submit(stream, gather_slot(static_cast<size_t>(b)), [&](Stream& exchange) {
        exchange_->communicator().all_gather(exchange, weight_address(bucket.range.first),
                                             weight_address(owned(bucket).first), bucket.shard,
                                             dtype_);
    });
}

void ParameterStore::gather_all(Stream& stream) {
    for (size_t b = 0; b < layout_.buckets().size(); ++b) gather(stream, static_cast<int>(b));
}

void ParameterStore::sum_over_ranks(Stream& stream, double* data, int64_t n) {
    if (!exchange_) return;
    exchange_->submit(stream, sum_slot(), [&](Stream& exchange) {
        exchange_->communicator().all_reduce(exchange, data, n, DType::fp64);
    });
    exchange_->hold(stream, sum_slot());
}

// --- from and to the host ------------------------------------------------------------------------------------------

void ParameterStore::initialize(uint64_t seed) {
    std::vector<float> values;
    clear_padding();
    for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
        const Parameter& p = parameters_[static_cast<size_t>(i)];
        const RandomStream random(seed, RandomPurpose::init, static_cast<uint32_t>(i), 0);
        values.assign(static_cast<size_t>(p.numel()), p.init_mean);
        if (p.init_std > 0) random.fill_normal(values.data(), p.numel(), p.init_std, p.init_mean);
        set(i, values);
        if (!training()) continue;
        std::fill(values.begin(), values.end(), 0.0f);
        write(State::moment1, i, 0, values);
        write(State::moment2, i, 0, values);
    }
}

void ParameterStore::clear_padding() {
    constexpr int64_t piece_elements = 1 << 16;
    const std::vector<float> zeros(piece_elements, 0.0f);
    for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
        const Parameter& p = parameters_[static_cast<size_t>(i)];
        for (int64_t first = p.numel(); first < p.padded_numel(); first += piece_elements) {
            const auto piece = std::span(zeros).first(
                static_cast<size_t>(std::min(piece_elements, p.padded_numel() - first)));
            write(State::master, i, first, piece);
            write(State::moment1, i, first, piece);
            write(State::moment2, i, first, piece);
        }
    }
}

void ParameterStore::set(int i, std::span<const float> values) {
    assert(static_cast<int64_t>(values.size()) == parameters_[static_cast<size_t>(i)].numel());
    write(State::master, i, 0, values);
}

void ParameterStore::get(int i, std::span<float> values) const {
    read_weights(i, 0, values);
    read(State::master, i, 0, values);
}

void ParameterStore::write(State which, int i, int64_t first, std::span<const float> values) {
    if (which == State::master) write_weights(i, first, values);
    for (const Piece& piece : pieces_of(i)) {
        const Range part = intersection(piece.range, {first, std::ssize(values)});
        if (part.n == 0) continue;
        copy_now(device_, state_of(piece, which) + (part.first - piece.range.first),
                 values.data() + (part.first - first), static_cast<size_t>(part.n) * sizeof(float));
    }
}

void ParameterStore::write_weights(int i, int64_t first, std::span<const float> values) {
    char* const to = weight_address(layout_.offset(i) + first);
    if (dtype_ == DType::fp32) {
        copy_now(device_, to, values.data(), values.size_bytes());
        return;
    }
    constexpr size_t piece_elements = 1 << 20;
    std::vector<bf16> rounded(std::min(piece_elements, values.size()));
    for (size_t done = 0; done < values.size(); done += rounded.size()) {
        const size_t n = std::min(rounded.size(), values.size() - done);
#pragma omp parallel for schedule(static)
        for (size_t k = 0; k < n; ++k) rounded[k] = bf16(values[done + k]);
        copy_now(device_, to + done * sizeof(bf16), rounded.data(), n * sizeof(bf16));
    }
}

void ParameterStore::read(State which, int i, int64_t first, std::span<float> values) const {
    for (const Piece& piece : pieces_of(i)) {
        const Range part = intersection(piece.range, {first, std::ssize(values)});
        if (part.n == 0) continue;
        copy_now(device_, values.data() + (part.first - first),
                 state_of(piece, which) + (part.first - piece.range.first),
                 static_cast<size_t>(part.n) * sizeof(float));
    }
}

void ParameterStore::read_weights(int i, int64_t first, std::span<float> values) const {
    const char* const from = weight_address(layout_.offset(i) + first);
    if (dtype_ == DType::fp32) {
        copy_now(device_, values.data(), from, values.size_bytes());
        return;
    }
    std::vector<bf16> rounded(values.size());
    copy_now(device_, rounded.data(), from, rounded.size() * sizeof(bf16));
    std::transform(rounded.begin(), rounded.end(), values.begin(),
                   [](bf16 v) { return to_float(v); });
}

std::span<const float> ParameterStore::host_view(const Piece& piece, State which,
                                                 std::vector<float>& copied) const {
    const size_t n = static_cast<size_t>(piece.range.n);
    const float* const from = state_of(piece, which);
    if (!device_.is_cuda()) return {from, n};
    copied.resize(n);
    copy_now(device_, copied.data(), from, n * sizeof(float));
    return copied;
}

}  // namespace train_gpt
