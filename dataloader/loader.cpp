#include "dataloader/loader.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"

namespace train_gpt {

namespace {

/// Where a window is: its shard and its number in that shard.
struct Place {
    int shard;
    int64_t window;
};

/// `window_ends[i]` is the number of windows in shards 0..i.
Place locate(const std::vector<int64_t>& window_ends, int64_t window) {
    const auto end = std::upper_bound(window_ends.begin(), window_ends.end(), window);
    const auto shard = end - window_ends.begin();
    return {static_cast<int>(shard),
            window - (shard == 0 ? 0 : window_ends[static_cast<size_t>(shard) - 1])};
}

void mark_documents(const int32_t* tokens, int n, std::optional<uint32_t> document_boundary,
                    int32_t* doc_start) {
    int32_t start = 0;
    for (int t = 0; t < n; ++t) {
        if (document_boundary && static_cast<uint32_t>(tokens[t]) == *document_boundary) start = t;
        doc_start[t] = start;
    }
}

const LoaderOptions& checked(const LoaderOptions& o) {
    if (o.B < 1 || o.T < 1)
        throw Error("a micro-batch of ", o.B, " samples of ", o.T,
                    " tokens is empty; both must be at least 1");
    if (o.prefetch < 1)
        throw Error("the loader must prefetch at least 1 micro-batch, not ", o.prefetch);
    if (o.first_sample < 0)
        throw Error("a run cannot begin at sample ", o.first_sample, "; samples count from 0");
    if (o.world < 1 || o.rank < 0 || o.rank >= o.world)
        throw Error("rank ", o.rank, " of ", o.world, " does not exist; ranks count from 0");
    int fewest = o.micro_batches_per_step;
    for (const LoaderOptions::Change& change : o.changes)
        fewest = std::min(fewest, change.micro_batches);
    if (fewest < o.world)
        throw Error("a step of ", fewest, " micro-batches cannot feed ", o.world,
                    " ranks; use a larger batch, a smaller micro-batch or fewer ranks");
    // In the buffers, so that no size overflows.
    constexpr int64_t most_tokens = int64_t{1} << 40;
    if (static_cast<int64_t>(o.B) * o.T > most_tokens / (o.prefetch + int64_t{1}))
        throw Error("micro-batches of ", o.B, " x ", o.T, " tokens are too large to prefetch ",
                    o.prefetch, " of them; use a smaller micro-batch");
    return o;
}

/// int32 values in one slot of the ring: tokens, targets and doc_start [B, T], sources [B].
size_t slot_length(const LoaderOptions& o) {
    return static_cast<size_t>(o.B) * (3 * static_cast<size_t>(o.T) + 1);
}

std::vector<double> weights_of(const std::vector<TrainSource>& sources) {
    std::vector<double> weights;
    for (const TrainSource& source : sources) weights.push_back(source.weight);
    return weights;
}

/// The first of a step's micro-batches that a rank takes.
int first_of_rank(int64_t rank, int micro_batches, int world) {
    return static_cast<int>(rank * micro_batches / world);
}

/// The window_ends for locate(), with windows of T + 1 tokens. Throws Error if there are none.
std::vector<int64_t> whole_windows(const TokenShards& shards, int T) {
    std::vector<int64_t> ends;
    int64_t windows = 0;
    for (int i = 0; i < shards.shard_count(); ++i)
        ends.push_back(windows += std::max<int64_t>(shards.shard_tokens(i) - 1, 0) / T);
    if (windows == 0)
        throw Error("the training data (", shards.total_tokens(), " tokens in ",
                    shards.shard_count(), " shards) hold no sample of ", T,
                    " + 1 tokens; shorten the sequences or use more data");
    return ends;
}

/// The order in which an epoch visits the windows of a source.
Permutation window_order(uint64_t seed, int64_t source, int64_t epoch, int64_t windows) {
    return Permutation(seed, static_cast<uint64_t>(source) << 48 | static_cast<uint64_t>(epoch),
                       windows);
}

}  // namespace

SampleOrigin origin_of(const std::vector<TrainSource>& sources, const LoaderOptions& options,
                       int64_t sample, int tokens) {
    const Mixture::Draw draw = Mixture(options.seed, weights_of(sources))(sample);
    const TokenShards& shards = *sources[static_cast<size_t>(draw.source)].shards;
    const std::vector<int64_t> ends = whole_windows(shards, options.T);
    const Permutation order =
        window_order(options.seed, draw.source, draw.index / ends.back(), ends.back());
    const Place place = locate(ends, order(draw.index % ends.back()));
    SampleOrigin origin{
        .source = draw.source,
        .file = shards.shard_path(place.shard),
        .first_token = place.window * options.T,
        .tokens = std::vector<int32_t>(static_cast<size_t>(std::min(tokens, options.T)))};
    shards.copy(place.shard, origin.first_token, std::ssize(origin.tokens), origin.tokens.data());
    return origin;
}

int64_t count_windows(const TokenShards& shards, int T) { return whole_windows(shards, T).back(); }

size_t TrainLoader::buffer_bytes(const LoaderOptions& options) {
    const LoaderOptions& o = checked(options);
    return (static_cast<size_t>(o.prefetch) + 1) * slot_length(o) * sizeof(int32_t);
}

TrainLoader::TrainLoader(const std::vector<TrainSource>& sources, const LoaderOptions& options,
                         const Allocator& allocate)
    : options_(checked(options)), draws_(options.seed, weights_of(sources)) {
    std::vector<LoaderOptions::Change> steps{{0, options_.micro_batches_per_step}};
    steps.insert(steps.end(), options_.changes.begin(), options_.changes.end());
    for (const auto& [first_step, micro_batches] : steps) {
        const int first = first_of_rank(options_.rank, micro_batches, options_.world);
        Part part{.first_step = first_step,
                  .micro_batches = micro_batches,
                  .first_micro_batch = first,
                  .rank_micro_batches =
                      first_of_rank(options_.rank + 1, micro_batches, options_.world) - first,
                  .before = 0,
                  .rank_before = 0};
        if (!parts_.empty()) {
            const Part& last = parts_.back();
            const int64_t n = first_step - last.first_step;
            part.before = last.before + n * last.micro_batches;
            part.rank_before = last.rank_before + n * last.rank_micro_batches;
        }
        parts_.push_back(part);
    }
    for (const TrainSource& source : sources) {
        std::vector<int64_t> ends = whole_windows(*source.shards, options_.T);
        const Permutation order = window_order(options_.seed, std::ssize(sources_), 0, ends.back());
        sources_.push_back({source.shards, std::move(ends), order});
    }
    const size_t bytes = buffer_bytes(options_);
    if (allocate) {
        memory_ = static_cast<int32_t*>(allocate(bytes));
    } else {
        try {
            own_memory_.resize(bytes / sizeof(int32_t));
        } catch (const std::bad_alloc&) {
            throw Error("no memory for the loader's ", bytes, " bytes; use a smaller micro-batch");
        }
        memory_ = own_memory_.data();
    }
    window_.resize(static_cast<size_t>(options_.T) + 1);
    slots_.resize(static_cast<size_t>(options_.prefetch) + 1);
    const size_t B = static_cast<size_t>(options_.B), n = B * static_cast<size_t>(options_.T);
    for (size_t i = 0; i < slots_.size(); ++i) {
        const int32_t* base = memory_ + i * slot_length(options_);
        slots_[i].tokens = {base, n};
        slots_[i].targets = {base + n, n};
        slots_[i].doc_start = {base + 2 * n, n};
        slots_[i].sources = {base + 3 * n, B};
    }
    start(0);
}

TrainLoader::~TrainLoader() { stop(); }

/// The next micro-batch is number `first` of this rank. No thread is running.
void TrainLoader::start(int64_t first) {
    produced_ = consumed_ = first;
    stop_ = holding_ = false;
    failure_ = nullptr;
    thread_ = std::thread([this, first] { prefetch_loop(first); });
}

void TrainLoader::stop() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    consumed_changed_.notify_one();
    thread_.join();
}

const TrainLoader::Part& TrainLoader::part_at(int64_t step) const {
    return *std::prev(std::ranges::upper_bound(parts_, step, {}, &Part::first_step));
}

int64_t TrainLoader::step_of(int64_t number) const {
    const Part& part = *std::prev(std::ranges::upper_bound(parts_, number, {}, &Part::rank_before));
    return part.first_step + (number - part.rank_before) / part.rank_micro_batches;
}

void TrainLoader::seek(int64_t step) {
    stop();
    const Part& part = part_at(step);
    start(part.rank_before + (step - part.first_step) * part.rank_micro_batches);
}

void TrainLoader::prefetch_loop(int64_t first) {
    const auto slots = static_cast<int64_t>(slots_.size());
    for (int64_t number = first;; ++number) {
        {
            std::unique_lock lock(mutex_);
            consumed_changed_.wait(lock, [&] { return stop_ || number - consumed_ < slots; });
            if (stop_) return;
        }
        try {
            fill(number, static_cast<size_t>(number % slots));
        } catch (...) {
            const std::lock_guard lock(mutex_);
            failure_ = std::current_exception();
            produced_changed_.notify_one();
            return;
        }
        {
            const std::lock_guard lock(mutex_);
            produced_ = number + 1;
        }
        produced_changed_.notify_one();
    }
}

void TrainLoader::fill(int64_t number, size_t slot) {
    HostBatch& batch = slots_[slot];
    const int64_t step = step_of(number);
    const Part& part = part_at(step);
    const int64_t micro_batch = part.before + (step - part.first_step) * part.micro_batches +
                                part.first_micro_batch +
                                (number - part.rank_before) % part.rank_micro_batches;
    const int B = options_.B, T = options_.T;
    const int64_t n = static_cast<int64_t>(B) * T;
    int32_t* tokens = memory_ + slot * slot_length(options_);
    int32_t *targets = tokens + n, *doc_start = targets + n, *sources = doc_start + n;
    batch.first_sample = options_.first_sample + micro_batch * B;
    for (int64_t b = 0; b < B; ++b) {
        const Mixture::Draw draw = draws_(batch.first_sample + b);
        read_window(sources_[static_cast<size_t>(draw.source)], draw.index);
        std::copy_n(window_.data(), T, tokens + b * T);
        std::copy_n(window_.data() + 1, T, targets + b * T);
        mark_documents(window_.data(), T, options_.document_boundary, doc_start + b * T);
        sources[b] = draw.source;
    }
}

void TrainLoader::read_window(Source& source, int64_t sample) {
    const int64_t windows = source.window_ends.back(), epoch = sample / windows;
    if (epoch != source.order_epoch) {
        source.order = window_order(options_.seed, &source - sources_.data(), epoch, windows);
        source.order_epoch = epoch;
    }
    const Place place = locate(source.window_ends, source.order(sample % windows));
    source.shards->copy(place.shard, place.window * options_.T, options_.T + 1, window_.data());
}

const HostBatch& TrainLoader::next() {
    std::unique_lock lock(mutex_);
    if (holding_) {
        holding_ = false;
        ++consumed_;
        consumed_changed_.notify_one();
    }
    produced_changed_.wait(lock, [&] { return produced_ > consumed_ || failure_; });
    if (produced_ <= consumed_) std::rethrow_exception(failure_);
    holding_ = true;
    return slots_[static_cast<size_t>(consumed_ % static_cast<int64_t>(slots_.size()))];
}

ValidationWindows::ValidationWindows(std::shared_ptr<const TokenShards> shards, int T,
                                     int64_t max_tokens)
    : shards_(std::move(shards)), T_(T) {
    if (T < 1) throw Error("validation needs sequences of at least 1 token, not ", T);
    if (max_tokens < 0)
        throw Error("validation cannot stop after ", max_tokens,
                    " tokens; use a positive number, or 0 for all");
    int64_t targets = 0;
    for (int i = 0; i < shards_->shard_count(); ++i) {
        int64_t here = std::max<int64_t>(shards_->shard_tokens(i) - 1, 0);
        if (max_tokens > 0) here = std::min(here, max_tokens - targets);
        targets += here;
        window_ends_.push_back(count_ += (here + T - 1) / T);
        if (here > 0) last_window_targets_ = (here - 1) % T + 1;
    }
    target_tokens_ = targets;
    if (targets == 0)
        throw Error("the validation data (", shards_->total_tokens(), " tokens in ",
                    shards_->shard_count(),
                    " shards) hold nothing to predict; a shard needs at least 2 tokens");
}

int ValidationWindows::shards_read() const {
    const auto last = std::ranges::find(window_ends_, count_);
    return static_cast<int>(last - window_ends_.begin()) + 1;
}

void ValidationWindows::fill(int64_t first_window, int B, int32_t* tokens, int32_t* targets,
                             int32_t* doc_start, std::optional<uint32_t> document_boundary) const {
    assert(first_window >= 0);
    for (int64_t b = 0; b < B; ++b) {
        int32_t* row_tokens = tokens + b * T_;
        int32_t* row_targets = targets + b * T_;
        const int64_t window = first_window + b;
        int n = 0;  // targets of this window
        if (window < count_) {
            const Place place = locate(window_ends_, window);
            const int64_t offset = place.window * T_;
            const int64_t left = window == count_ - 1
                                     ? last_window_targets_
                                     : shards_->shard_tokens(place.shard) - 1 - offset;
            n = static_cast<int>(std::min<int64_t>(left, T_));
            // Two reads of n instead of one of n + 1: the rows have no room for the extra token.
            shards_->copy(place.shard, offset, n, row_tokens);
            shards_->copy(place.shard, offset + n, 1, row_targets + n - 1);
            std::copy_n(row_tokens + 1, n - 1, row_targets);
        }
        std::fill(row_tokens + n, row_tokens + T_, 0);
        std::fill(row_targets + n, row_targets + T_, -1);
        if (!doc_start) continue;
        int32_t* row_start = doc_start + b * T_;
        mark_documents(row_tokens, n, document_boundary, row_start);
        std::fill(row_start + n, row_start + T_, n > 0 ? row_start[n - 1] : 0);
    }
}

}  // namespace train_gpt
