// A run's folder: one run at a time writes into it, and it tells afterwards what the run was.
//
//   config.json        the resolved configuration
//   manifest.json      version, host, seed, data files with sizes, and with the hashes that `tokenize` or shard_watch.h recorded
//   verified.json      the data files that were verified: shard_watch.h
//   choices.json       what the run picked by itself: choices.h
//   metrics.jsonl      one JSON object a line: training steps, evaluations: metrics.h
//   metrics.old.jsonl  the longest that a new run found in its place, without a checkpoint to go on from
//   step-NNNNNNNN/     checkpoints
//   lock               held while a run is going on
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "parallel/world.h"
#include "training/config.h"

namespace train_gpt {

class RunFolder {
  public:
    /// Makes the folder where it does not exist and locks it. Throws Error when another run holds it, and for a folder that
    /// has files of these names which no run wrote, such as a checkpoint. Of several ranks the first does so, and all find
    /// out whether they see the same folder.
    explicit RunFolder(const std::filesystem::path& path, const World& world = {});
    ~RunFolder();
    RunFolder(const RunFolder&) = delete;
    RunFolder& operator=(const RunFolder&) = delete;

    const std::filesystem::path& path() const { return path_; }
    /// Writes config.json and manifest.json. Returns which data ("data.train", "data.val") had other contents or weights in
    /// the manifest that was there.
    std::vector<std::string> describe(const Config& config) const;

    /// The hashes in manifest.json, by path, of data that no data.json speaks of: what an earlier start of the run read.
    std::map<std::string, std::string> recorded_hashes() const;
    /// Adds hashes to the entries of these paths there.
    void record_hashes(const std::map<std::string, std::string>& hashes) const;

  private:
    void lock();

    std::filesystem::path path_;
    int lock_ = -1;
};

}  // namespace train_gpt
