// Verifies a run's token shards while it trains: each is read once by one of the ranks and compared with the hash that
// `tokenize`, or an earlier start of the run, recorded. A thread of low priority does it, with pauses so that it takes no more
// than a hundredth of a core.
//
// What has been read is kept in RUN_DIR/verified.json, with size, time of modification and inode, and is not read again while
// these are the same:
//
//     {"sound_step": 8, "files": [{"path": …, "bytes": …, "modified": …, "inode": …, "xxh3": …}, …]}
//
// sound_step: the step before which all of the run's data had been verified; checkpoints of later steps may rest on damaged
// data until the reading is complete. null: it is.
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
#include "training/run_folder.h"

namespace train_gpt {

/// A shard of the run's data.
struct WatchedShard {
    std::filesystem::path path;
    bool trains = true;  // false: it is for validation alone
};

class ShardWatch {
  public:
    /// All ranks call it, with the same shards, and the step that the run starts from. The thread
    /// starts where this rank has anything to read. `folder` and `world` must outlive the object.
    ShardWatch(const RunFolder& folder, const std::vector<WatchedShard>& shards, int64_t first_step,
               const World& world);
    ~ShardWatch();
    ShardWatch(const ShardWatch&) = delete;
    ShardWatch& operator=(const ShardWatch&) = delete;

    /// Whether this rank has found damage.
    bool found_damage() const { return found_damage_; }

    /// Ends the thread and reads what is left of this rank's share now, unless stop() says so.
    void finish(const std::function<bool()>& stop);
    /// Bytes that are left of this rank's share.
    uint64_t bytes_left() const { return bytes_left_; }

    struct Damage {
        std::string message;  // names the rank, where there are several, and the shard
        bool trained = true;  // false: it is of validation data alone
    };
    /// All ranks call it: keeps in the run folder what they have read so far, with hashes of
    /// shards that had none in its manifest.json. Gives damage that any of them has found.
    std::optional<Damage> settle();

    /// Checkpoints up to this step rest on verified data; the largest number: all do. The same on
    /// all ranks, as of the last settle().
    int64_t sound_step() const { return sound_step_; }

    /// sound_step() as a run folder keeps it; nothing where all was verified, or nothing is known.
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
    void find_damage(size_t shard, const std::string& message);  // with mutex_ held
    void in_background();
    void end_thread();
    void keep(const std::vector<Json>& of_ranks);

    const RunFolder& folder_;
    const World& world_;
    int64_t sound_step_;
    std::vector<Shard> shards_;
    std::vector<size_t> queue_;             // of shards_, for this rank to read
    size_t next_ = 0;                       // in queue_; with reading_ for whoever reads
    std::unique_ptr<FileReading> reading_;  // of the next, when it has begun
    Stamp stamp_;                           // of that
    // Of rank 0: the entries of verified.json by path, and its text.
    std::map<std::string, Json> kept_;
    std::string written_;

    mutable std::mutex mutex_;
    std::condition_variable wake_;
    bool ending_ = false;             // the thread is to end
    std::vector<Verified> verified_;  // since the last settle()
    std::optional<Damage> damage_;    // the first that this rank found
    std::atomic<bool> found_damage_{false};
    std::atomic<uint64_t> bytes_left_{0};
    std::atomic<bool> complete_{false};
    std::thread thread_;
};

}  // namespace train_gpt
