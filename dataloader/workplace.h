// The folder that `train_gpt tokenize` writes to. Only one process at a time writes to it.
// Unfinished files are hidden, and finished files are moved into place in such a way that a kill at
// any moment does no damage.
#pragma once
#include <filesystem>
#include <map>
#include <set>
#include <string>

#include "dataloader/manifest.h"

namespace train_gpt {

constexpr const char* tokenizer_file = "tokenizer.json";
constexpr const char* progress_file = "progress.json";

/// Everything that the shards depend on, by name.
using Plan = std::map<std::string, std::string>;

class Workplace {
  public:
    /// Creates the folder if it is missing, and locks it. Throws Error when another process is
    /// writing to it.
    explicit Workplace(const std::filesystem::path& out);
    ~Workplace();
    Workplace(const Workplace&) = delete;
    Workplace& operator=(const Workplace&) = delete;

    /// The hidden folder, for what is not complete yet.
    const std::filesystem::path& staging() const { return staging_; }

    /// Opens the hidden folder to make what `plan` describes. Files from an interrupted run of the
    /// same plan are kept, all others are removed. Returns which part of the interrupted run's plan
    /// was different ("inputs"), else an empty string.
    std::string open(const Plan& plan);
    /// Replaces the hidden folder with a new one that has only `plan`.
    void begin_anew(const Plan& plan);
    /// Whether the hidden folder has this file, which an interrupted run may have left.
    bool has(const char* name) const { return std::filesystem::exists(staging_ / name); }

    /// From now on, the hidden folder is kept on failure.
    void keep() { kept_ = true; }
    /// The destructor will remove the hidden folder and everything in it.
    void drop() { kept_ = false; }

  private:
    bool lock();
    void remove();

    std::filesystem::path staging_;
    const std::filesystem::path lock_file_;
    int lock_ = -1;
    bool opened_ = false, kept_ = false;
};

/// The names of files in `out` that an earlier run made and that this one may replace. Throws Error
/// when other files are in its way.
std::set<std::string> replaceable(const std::filesystem::path& out, bool keeps_tokenizer);

/// Whether each finished file is still in the staging folder, or was moved to `out` by a process
/// that was killed later.
bool can_publish(const std::filesystem::path& staging, const std::filesystem::path& out,
                 const DataManifest& manifest, bool keeps_tokenizer);

/// Moves the finished files from the staging folder to `out`. If the process is killed at any
/// moment, the manifest in `out` lists every shard that may be there, old or new, so that a later
/// run takes a mixture neither for a complete result nor for files of another program.
void publish(const std::filesystem::path& staging, const std::filesystem::path& out,
             DataManifest manifest, const std::set<std::string>& old, bool keeps_tokenizer);

}  // namespace train_gpt
