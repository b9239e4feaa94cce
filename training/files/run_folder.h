// A run's folder: one run at a time writes into it, and afterwards it documents the run.
//
//   config.json        the resolved configuration
//   manifest.json      version, host, seed, what runs attention on a GPU, and the data files with
//                      their sizes and the hashes that `tokenize` or shard_watch.h recorded
//   verified.json      the data files that were verified: shard_watch.h
//   choices.json       what the run chose by itself: kept_choices.h
//   metrics.jsonl      one JSON object per line, for training steps and evaluations: metrics.h
//   fingerprints.jsonl hashes of the tensors after some steps: fingerprint_log.h
//   routers.jsonl      how routers spread tokens over experts: router_log.h
//   history.jsonl      what happened to the run, as a chain: history_chain.h, run_history.h
//   supervise.log      of a supervised job: supervise/supervisor_log.h
//   supervise.jsonl    the same: what the supervisor did
//   report.html        a page about the run: report/report.h
//   metrics.old.jsonl  the longest metrics.jsonl that a new run found here when there was no
//                      checkpoint to resume from
//   events.out.tfevents.…  for TensorBoard: tensorboard.h
//   events.old             events of an earlier run
//   trace/             timelines: step_trace.h
//   step-NNNNNNNN/     checkpoints
//   lock               held while a run is active
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "kernels/attention/engine.h"
#include "parallel/world.h"
#include "training/config/config.h"

namespace train_gpt {

class RunFolder {
  public:
    /// Creates the folder if it does not exist, and locks it. The first rank does this; then all
    /// ranks check that they see the same folder. Throws Error if another run holds the lock.
    /// Throws Error if the folder has files with a run's names that no run has written: it may be a
    /// checkpoint.
    explicit RunFolder(const std::filesystem::path& path, const World& world = {});
    ~RunFolder();
    RunFolder(const RunFolder&) = delete;
    RunFolder& operator=(const RunFolder&) = delete;

    const std::filesystem::path& path() const { return path_; }
    /// Whether the path still leads to this folder and its lock.
    bool in_place() const;
    /// Where the folder is now; empty if it was removed, or its lock.
    std::filesystem::path place() const;
    /// Throws Error, which says where the folder is now, if it is not in place.
    void require_in_place() const;
    /// Writes config.json and manifest.json. `attention`: what runs it on the GPU.
    /// Returns which data ("data.train", "data.val") had different contents or weights in the
    /// previous manifest.
    std::vector<std::string> describe(const Config& config,
                                      const AttentionUse& attention = {}) const;

    /// Adds hashes to the entries of these paths in manifest.json.
    void record_hashes(const std::map<std::string, std::string>& hashes) const;

  private:
    void lock();

    std::filesystem::path path_;
    int lock_ = -1;  // the file: the first rank holds its lock, the others only know which it is
};

/// The file of a run's folder that names the run's data.
constexpr const char* run_manifest = "manifest.json";
/// Returns which data ("data.train", "data.val") have other contents or weights than a run folder's
/// manifest.json describes. Empty if the manifest is missing or describes no data.
std::vector<std::string> changed_data(const std::filesystem::path& run_folder,
                                      const Config& config);
/// The hashes in a run folder's manifest.json, by path, of data that no data.json describes. The
/// run has recorded these hashes when it read the files. Empty if the folder has no manifest.
std::map<std::string, std::string> hashes_by_run(const std::filesystem::path& run_folder);

}  // namespace train_gpt
