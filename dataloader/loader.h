// Batches from token shards: training samples in a shuffled order that depends only on the seed and
// the sample's number, prefetched on a thread; and the complete validation split in file order.
//
// A training sample is a window: T + 1 consecutive tokens of one shard, starting at a multiple of
// T. Window w holds tokens [w·T, w·T + T]: the last token of one window is the first of the next,
// so that each is predicted once. A shard of n tokens has floor((n - 1) / T) windows; the remaining
// tokens (fewer than T + 1) are left out.
//
// Documents: a document_boundary token counts as the first token of a document, so that the
// model predicts that document's first word from this token alone. As a target, it ends the
// document before it. doc_start[t] is the position in the window of the first token of the document
// that token t belongs to; it is 0 before the first document boundary in the window.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
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

/// One micro-batch: tokens, targets (the token after each token) and doc_start, all [B, T]; and the
/// source of each sample, [B].
struct HostBatch {
    int64_t first_sample = 0;  // the number of its first sample
    std::span<const int32_t> tokens, targets, doc_start, sources;
};

/// One of the sources of training samples, and its weight relative to the others.
struct TrainSource {
    std::shared_ptr<const TokenShards> shards;
    double weight = 1;
};

struct LoaderOptions {
    uint64_t seed = 0;
    int B = 0, T = 0;
    int64_t first_sample = 0;        // of the first step
    int micro_batches_per_step = 1;  // over all ranks
    int rank = 0, world = 1;
    std::optional<uint32_t> document_boundary;
    int prefetch = 4;  // micro-batches prepared ahead of the one in use
    /// From the loader's step `first_step` on, steps have so many micro-batches. Ascending.
    struct Change {
        int64_t first_step;
        int micro_batches;
    };
    std::vector<Change> changes = {};
};

/// Where a training sample is from.
struct SampleOrigin {
    int source = 0;
    std::filesystem::path file;   // empty: synthetic tokens
    int64_t first_token = 0;      // in the file
    std::vector<int32_t> tokens;  // the first ones
};
/// The origin of a sample, by its number (TrainLoader), with up to `tokens` of its first tokens.
SampleOrigin origin_of(const std::vector<TrainSource>& sources, const LoaderOptions& options,
                       int64_t sample, int tokens);

/// The number of windows in all shards together. Throws Error if there are none.
int64_t count_windows(const TokenShards& shards, int T);

/// This rank's training micro-batches, in order, without end. Sample b of micro-batch m of the
/// loader's step s, counted from 0, is number
///
///     g = first_sample + (before(s) + m) · B + b,  (source, i) = mixture(g)
///     epoch = floor(i / windows),  window = permutation(seed, source, epoch, i mod windows)
///
/// where before(s) micro-batches are in the steps before s: s · micro_batches_per_step unless there
/// are changes; over the windows of all shards of its source: each window is seen exactly once per
/// epoch of that source. The order of samples depends neither on how they are divided into steps
/// and these into micro-batches nor on the number of ranks.
/// Rank r of `world` takes micro-batches [r·m/world, (r+1)·m/world) of a step's m.
class TrainLoader {
  public:
    /// Returns `bytes` bytes of memory, aligned for int32, that outlives the loader.
    using Allocator = std::function<void*(size_t bytes)>;

    /// Starts the thread. `allocate` is called once, with buffer_bytes(options); by default the
    /// loader owns its memory. Throws Error when options are out of range, when there are fewer
    /// micro-batches than ranks, and when the shards of a source have no window.
    TrainLoader(const std::vector<TrainSource>& sources, const LoaderOptions& options,
                const Allocator& allocate = {});
    /// The same for a single source.
    TrainLoader(std::shared_ptr<const TokenShards> shards, const LoaderOptions& options,
                const Allocator& allocate = {})
        : TrainLoader({{std::move(shards), 1}}, options, allocate) {}
    ~TrainLoader();
    TrainLoader(const TrainLoader&) = delete;
    TrainLoader& operator=(const TrainLoader&) = delete;

    /// The bytes of memory that a loader with these options needs: (prefetch + 1) micro-batches
    /// with three int32 per token and one per sample. Throws Error for options out of range.
    static size_t buffer_bytes(const LoaderOptions& options);

    /// The next micro-batch; valid until the next call. Rethrows an exception of the thread, after
    /// the micro-batches before it.
    const HostBatch& next();

    /// next() continues with the first micro-batch of a step, counted as in next()'s order from 0.
    void seek(int64_t step);

    /// The step of the micro-batch that next() gives next.
    int64_t next_step() const { return step_of(holding_ ? consumed_ + 1 : consumed_); }
    /// This rank's micro-batches in the next step.
    int micro_batches() const { return micro_batches(next_step()); }
    int micro_batches(int64_t step) const { return part_at(step).rank_micro_batches; }
    /// Micro-batches in the next step of the rank that has the most.
    int most_micro_batches() const {
        return (part_at(next_step()).micro_batches + options_.world - 1) / options_.world;
    }
    /// This rank's first micro-batch among the micro-batches of a step.
    int first_micro_batch(int64_t step) const { return part_at(step).first_micro_batch; }

  private:
    struct Source {
        std::shared_ptr<const TokenShards> shards;
        std::vector<int64_t> window_ends;  // windows of shards 0..i
        Permutation order;                 // of order_epoch
        int64_t order_epoch = 0;
    };

    /// Steps with the same number of micro-batches.
    struct Part {
        int64_t first_step;
        int micro_batches;
        int first_micro_batch, rank_micro_batches;  // this rank's, in each step
        int64_t before, rank_before;  // micro-batches of earlier steps: of all ranks, of this rank
    };
    const Part& part_at(int64_t step) const;
    /// The step of this rank's micro-batch `number`, which counts over all steps.
    int64_t step_of(int64_t number) const;

    void start(int64_t first);
    void stop();
    void prefetch_loop(int64_t first);
    void fill(int64_t number, size_t slot);
    void read_window(Source& source, int64_t sample);

    LoaderOptions options_;
    std::vector<Part> parts_;
    Mixture draws_;                // used only by the thread
    std::vector<Source> sources_;  // `order` and `order_epoch` are used only by the thread

    std::vector<int32_t> own_memory_;
    int32_t* memory_ = nullptr;  // [slot][tokens, targets, doc_start: B · T each; sources: B]
    std::vector<int32_t> window_;
    std::vector<HostBatch> slots_;

    std::mutex mutex_;
    std::condition_variable produced_changed_, consumed_changed_;
    int64_t produced_ = 0, consumed_ = 0;  // micro-batches; number i is in slot i mod slots
    bool stop_ = false;
    std::exception_ptr failure_;
    bool holding_ = false;  // the caller is using micro-batch number consumed_
    std::thread thread_;    // last: it uses all of the above
};

/// The validation split in file order: windows of T targets, shard after shard. The last window of
/// a shard may be short: its remaining positions have token 0 and target -1. Thus every token of a
/// shard except the first is predicted exactly once, up to max_tokens targets in total.
class ValidationWindows {
  public:
    /// max_tokens = 0 means all. Throws Error when T < 1, max_tokens < 0, or there is nothing to
    /// predict.
    ValidationWindows(std::shared_ptr<const TokenShards> shards, int T, int64_t max_tokens);

    /// The total number of windows.
    int64_t count() const { return count_; }
    /// The number of shards that windows are taken from: these are the first ones.
    int shards_read() const;
    /// The total number of targets that are not -1.
    int64_t target_tokens() const { return target_tokens_; }

    /// Fills tokens, targets, doc_start [B, T] with windows first_window … first_window + B - 1;
    /// those past the end have token 0, target -1 and doc_start 0 everywhere. doc_start may be
    /// null. Throws what TokenShards::copy throws.
    void fill(int64_t first_window, int B, int32_t* tokens, int32_t* targets, int32_t* doc_start,
              std::optional<uint32_t> document_boundary) const;

  private:
    std::shared_ptr<const TokenShards> shards_;
    int T_;
    std::vector<int64_t> window_ends_;
    int64_t count_ = 0, target_tokens_ = 0;
    int64_t last_window_targets_ = 0;
};

}  // namespace train_gpt
