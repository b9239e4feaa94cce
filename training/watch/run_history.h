// history.jsonl in a run's folder: what happened to the run besides its steps. Each line is one
// JSON object with "event", "step" and "time" (seconds since 1970), and with these fields of the
// event:
//
//   start       resumes, steps (of the whole run, as scheduled), passes (over each source of
//               training data in the whole run), version, device, ranks, hosts (each once),
//               parameters, vocabulary, tokenizer (its hash), memory (bytes of a rank by purpose)
//   checkpoint
//   sample      prompt, text
//   end         reason, code (the exit code)
//
// Lines are never removed. Lines before the last start that does not resume belong to an earlier
// run in the same folder.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "training/files/append_file.h"

namespace train_gpt {

struct RunStart;

constexpr const char* history_file = "history.jsonl";

class RunHistory {
  public:
    /// writes: whether this rank writes; only one of several ranks does. Throws Error if the file
    /// cannot be written.
    RunHistory(const std::filesystem::path& run_dir, bool writes);

    /// hosts: of all ranks.
    void start(const RunStart& start, std::vector<std::string> hosts);
    void checkpoint(int64_t step);
    void sample(int64_t step, const std::string& prompt, const std::string& text);
    void end(int64_t step, const std::string& reason, int code);

  private:
    std::optional<AppendFile> file_;
};

}  // namespace train_gpt
