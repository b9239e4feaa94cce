// Batches from token shards: training samples in a shuffled order that depends on (seed, step)
// alone, prefetched on a thread; and the validation split in file order, complete.
//
// A training sample is a window: T + 1 consecutive tokens of one shard, starting at a multiple of
// T. Window w holds tokens [w·T, w·T + T]: the last token of one window is the first of the next,
// so that each is predicted once. A shard of n tokens has floor((n - 1) / T) windows; the rest of
// its tokens (fewer than T + 1) is left out.
//
// Documents: an end_of_text token begins a document, whose first word it lets a model predict from
// nothing else; that it ends the one before is seen in the targets. doc_start[t] is the position in
// the window of the first token of the document that token t belongs to; before the first border in
// a window it is 0.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "dataloader/mixture.h"
#include "dataloader/permutation.h"
#include "dataloader/shard.h"

namespace train_gpt {

/// One micro-batch: tokens, targets (the token that follows each) and doc_start, all [B, T]; and
/// the source of each sample, [B].
struct HostBatch {
    int64_t step = 0;
    int micro_batch = 0;  // its number in the step, over all ranks
    std::span<const int32_t> tokens, targets, doc_start, sources;
};

/// One of the sources that training samples come from, and its share beside the others.
struct TrainSource {
    std::shared_ptr<const TokenShards> shards;
    double weight = 1;
};

struct LoaderOptions {
    uint64_t seed = 0;
    int B = 0, T = 0;
    int64_t first_step = 0;
    int micro_batches_per_step = 1;  // over all ranks
    int rank = 0, world = 1;
    std::optional<uint32_t> end_of_text;
    int prefetch = 4;  // micro-batches made ahead of the one in use
};

/// Windows of all shards together. Throws Error when there is none.
int64_t count_windows(const TokenShards& shards, int T);

/// This rank's training micro-batches, in order, without end. Sample b of micro-batch m of a step
/// is number
///
///     g = (step · micro_batches_per_step + m) · B + b,  (source, i) = mixture(g)
///     epoch = floor(i / windows),  window = permutation(seed, source, epoch, i mod windows)
///
/// over the windows of all shards of its source: each is seen exactly once an epoch of that source,
/// and a step's samples and their order depend neither on the number of ranks nor on how they are
/// cut into micro-batches.
/// Rank r of `world` takes micro-batches [r·m/world, (r+1)·m/world) of the m of a step.
class TrainLoader {
  public:
    /// Returns memory for that many bytes, aligned for int32, which outlives the loader.
    using Allocator = std::function<void*(size_t bytes)>;

    /// Starts the thread. `allocate` is called once, for buffer_bytes(options); by default the
    /// loader owns its memory. Throws Error when options are out of range, when there are fewer
    /// micro-batches than ranks, and when the shards hold no window.
    TrainLoader(const std::vector<TrainSource>& sources, const LoaderOptions& options,
                const Allocator& allocate = {});
    /// The same of one source.
    TrainLoader(std::shared_ptr<const TokenShards> shards, const LoaderOptions& options,
                const Allocator& allocate = {})
        : TrainLoader({{std::move(shards), 1}}, options, allocate) {}
    ~TrainLoader();
    TrainLoader(const TrainLoader&) = delete;
    TrainLoader& operator=(const TrainLoader&) = delete;

    /// The memory a loader of these options holds: (prefetch + 1) micro-batches of three int32 each
    /// token and one each sample. Throws Error for options out of range.
    static size_t buffer_bytes(const LoaderOptions& options);

    /// The next micro-batch; valid until the following next(). Rethrows what went wrong on the
    /// thread, after the batches before it.
    const HostBatch& next();

    /// Windows of a source.
    int64_t windows_per_epoch(int source = 0) const {
        return sources_[static_cast<size_t>(source)].window_ends.back();
    }
    /// How many samples of each source all ranks together have seen when a step begins.
    std::vector<int64_t> samples_before(int64_t step) const {
        return mixture_.counts_before(step * options_.micro_batches_per_step * options_.B);
    }
    /// Of each step, this rank's.
    int micro_batches() const { return rank_micro_batches_; }
    /// Of each step, of the rank that has most.
    int most_micro_batches() const {
        return (options_.micro_batches_per_step + options_.world - 1) / options_.world;
    }
    /// Seconds that next() has waited for data so far.
    double wait_seconds() const { return wait_seconds_; }

  private:
    struct Source {
        std::shared_ptr<const TokenShards> shards;
        std::vector<int64_t> window_ends;  // windows of shards 0..i
        Permutation order;                 // of order_epoch
        int64_t order_epoch = 0;
    };

    void prefetch_loop();
    void fill(int64_t number, size_t slot);
    void read_window(Source& source, int64_t sample);

    LoaderOptions options_;
    int first_micro_batch_, rank_micro_batches_;  // of each step, this rank's
    const Mixture mixture_;
    Mixture draws_;                // the thread's
    std::vector<Source> sources_;  // their order is the thread's

    std::vector<int32_t> own_memory_;
    int32_t* memory_ = nullptr;  // [slot][tokens, targets, doc_start of B · T; sources of B]
    std::vector<int32_t> window_;
    std::vector<HostBatch> slots_;

    std::mutex mutex_;
    std::condition_variable produced_changed_, consumed_changed_;
    int64_t produced_ = 0, consumed_ = 0;  // micro-batches; slot of number i: i mod slots
    bool stop_ = false;
    std::exception_ptr failure_;
    bool holding_ = false;  // the caller has batch number consumed_
    double wait_seconds_ = 0;
    std::thread thread_;  // last: it uses all of the above
};

/// The validation split in file order: windows of T targets, shard after shard. The last window of
/// a shard may be short: its remaining positions have token 0 and target -1. So every token of a
/// shard but the first is predicted exactly once, up to max_tokens targets in all.
class ValidationWindows {
  public:
    /// max_tokens = 0 means all. Throws Error when T < 1, max_tokens < 0, or there is nothing to
    /// predict.
    ValidationWindows(std::shared_ptr<const TokenShards> shards, int T, int64_t max_tokens);

    /// Windows in all.
    int64_t count() const { return count_; }
    /// Shards that windows are taken of: the first so many.
    int shards_read() const;
    /// Targets in all that are not -1.
    int64_t target_tokens() const { return target_tokens_; }

    /// Fills tokens, targets, doc_start [B, T] with windows first_window … first_window + B - 1;
    /// those past the end have token 0, target -1 and doc_start 0 everywhere. doc_start may be
    /// null. Throws what TokenShards::copy throws.
    void fill(int64_t first_window, int B, int32_t* tokens, int32_t* targets, int32_t* doc_start,
              std::optional<uint32_t> end_of_text) const;

  private:
    std::shared_ptr<const TokenShards> shards_;
    int T_;
    std::vector<int64_t> window_ends_;
    int64_t count_ = 0, target_tokens_ = 0;
    int64_t last_window_targets_ = 0;
};

}  // namespace train_gpt
