// The folder that `train_gpt tokenize` writes to: nobody else writes at the same time, what is unfinished is
// hidden, and what is finished is moved in place so that a kill at any moment spoils nothing.
#pragma once
#include <filesystem>
#include <map>
#include <set>
#include <string>

#include "dataloader/manifest.h"

namespace train_gpt {

constexpr const char* kTokenizerFile = "tokenizer.json";
constexpr const char* kProgressFile = "progress.json";

/// Everything that the shards are a function of, by name.
using Plan = std::map<std::string, std::string>;

class Workplace {
  public:
    /// Makes the folder where it is missing, and locks it. Throws Error when another process works in it.
    explicit Workplace(const std::filesystem::path& out);
    ~Workplace();
    Workplace(const Workplace&) = delete;
    Workplace& operator=(const Workplace&) = delete;

    /// The hidden folder, for what is not complete yet.
    const std::filesystem::path& staging() const { return staging_; }

    /// Opens the hidden folder for the making of what `plan` describes. What an interrupted run of the
    /// same plan left in it stays, anything else goes. Returns what of the interrupted run's plan was
    /// different ("inputs"), else an empty string.
    std::string open(const Plan& plan);
    /// Makes the hidden folder anew, for `plan`.
    void begin_anew(const Plan& plan);
    /// Whether an interrupted run left something to go on with.
    bool has(const char* name) const { return std::filesystem::exists(staging_ / name); }

    /// From now on the hidden folder outlives a failure.
    void keep() { kept_ = true; }
    /// It goes, with all that is in it.
    void drop() { kept_ = false; }

  private:
    void remove();

    std::filesystem::path staging_;
    int lock_ = -1;
    bool opened_ = false, kept_ = false;
};

/// Names in `out` that an earlier run made and that this one may replace. Throws Error when others are
/// in its way.
std::set<std::string> replaceable(const std::filesystem::path& out, bool keeps_tokenizer);

/// Whether each finished file is still in the staging folder or has been moved to `out` by a process
/// that was killed.
bool can_publish(const std::filesystem::path& staging, const std::filesystem::path& out,
                 const DataManifest& manifest, bool keeps_tokenizer);

/// Moves the finished files from the staging folder to `out`. Killed at any moment, the manifest
/// there lists every shard that may be left, old or new, so that no later run takes a mixture for
/// good or for foreign.
void publish(const std::filesystem::path& staging, const std::filesystem::path& out,
             DataManifest manifest, const std::set<std::string>& old, bool keeps_tokenizer);

}  // namespace train_gpt
