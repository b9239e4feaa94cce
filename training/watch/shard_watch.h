// Verifies a run's token shards while the run trains. One of the ranks reads each shard once, and
// compares it with the hash that `tokenize` or an earlier start of the run has recorded. A
// low-priority thread does this. It pauses often, so that it takes at most a hundredth of a core.
//
// RUN_DIR/verified.json records the files that have been read, with size, modification time and
// inode. A file is not read again while these three stay the same:
//
//     {"sound_step": 8,
//      "files": [{"path": …, "bytes": …, "modified": …, "inode": …, "xxh3": …}, …]}
//
// sound_step: checkpoints up to this step were trained on verified data. Until all data has been
// read, checkpoints of later steps may have been trained on damaged data. null: all data is
// verified.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/json_text.h"
#include "dataloader/verify.h"
#include "parallel/world.h"
#include "training/files/run_folder.h"

namespace train_gpt {

/// A shard of the run's data.
struct WatchedShard {
    std::filesystem::path path;
    bool trains = true;  // false: it is only for validation
};

class ShardWatch {
  public:
    /// All ranks call it with the same shards. first_step: the step from which the run starts. The
    /// thread starts if this rank has anything to read. `folder` and `world` must outlive the
    /// object.
    ShardWatch(const RunFolder& folder, const std::vector<WatchedShard>& shards, int64_t first_step,
               const World& world);
    ~ShardWatch();
    ShardWatch(const ShardWatch&) = delete;
    ShardWatch& operator=(const ShardWatch&) = delete;

    /// Whether this rank has found damage.
    bool found_damage() const { return found_damage_; }

    /// Ends the thread, and reads the rest of this rank's share now, until stop() returns true.
    void finish(const std::function<bool()>& stop);
    /// Bytes of this rank's share that are left to read.
    uint64_t bytes_left() const { return bytes_left_; }

    struct Damage {
        std::string message;  // names the shard and, if there are several ranks, the rank
        bool trained = true;  // false: only validation data is damaged
    };
    /// All ranks call it. Records in the run folder what the ranks have read so far. Adds hashes to
    /// manifest.json for shards that had none. Returns damage that any rank has found.
    std::optional<Damage> settle();

    /// Checkpoints up to this step were trained on verified data; INT64_MAX: all checkpoints. The
    /// last settle() has set it, to the same step on all ranks.
    int64_t sound_step() const { return sound_step_; }

    /// The sound_step that a run folder records. Nothing if all data was verified, or if the folder
    /// records none.
    static std::optional<int64_t> kept_sound_step(const std::filesystem::path& run_dir);

  private:
    /// Identifies the file that was verified.
    struct Stamp {
        uint64_t bytes = 0, inode = 0;
        int64_t modified = 0;  // nanoseconds
        bool operator==(const Stamp&) const = default;
    };
    struct Shard {
        RecordedFile file;
        bool trains = true, recorded_by_run = false;
    };
    struct Verified {
        size_t shard = 0;
        Stamp stamp;
        std::string hash;
    };
    static Stamp stamp_of(const std::filesystem::path& path);
    static std::optional<Verified> verified_from(const Json& entry);
    std::string known_of(const std::vector<WatchedShard>& shards);
    void read_shards(const std::function<void(double)>& pause, const std::function<bool()>& stop);
    void verify(size_t shard, const Stamp& stamp, const std::string& hash);
    void find_damage(size_t shard, const std::string& message);  // call with mutex_ held
    void in_background();
    void end_thread();
    void keep(const std::vector<Json>& of_ranks);

    const RunFolder& folder_;
    const World& world_;
    int64_t sound_step_;
    std::vector<Shard> shards_;
    std::vector<size_t> queue_;             // indices into shards_ that this rank reads
    size_t next_ = 0;                       // in queue_; only the thread that reads uses it
    std::unique_ptr<FileReading> reading_;  // of the next shard; null until it begins
    Stamp stamp_;                           // of the shard that reading_ reads
    // Only on rank 0: the entries of verified.json by path, and the file's text.
    std::map<std::string, Json> kept_;
    std::string written_;

    mutable std::mutex mutex_;
    std::condition_variable wake_;
    bool ending_ = false;             // the thread must end
    std::vector<Verified> verified_;  // since the last settle()
    std::optional<Damage> damage_;    // the first damage that this rank has found
    std::atomic<bool> found_damage_{false};
    std::atomic<uint64_t> bytes_left_{0};
    std::atomic<bool> complete_{false};
    std::thread thread_;
};

}  // namespace train_gpt
