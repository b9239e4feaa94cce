// history.jsonl in a run's folder: what happened to the run besides its steps. Each line is one JSON
// object with "event", "step" and "time" (seconds since 1970), and with what belongs to the event:
//
//   start       resumes, steps (of the whole run, as scheduled), passes (over each source of training
//               data by then), version, device, ranks, hosts (each once), parameters, vocabulary,
//               tokenizer (its hash), memory (bytes of a rank by purpose)
//   checkpoint
//   sample      prompt, text
//   end         reason, code (the exit code)
//
// Lines are never removed. Those before the last start that does not resume belong to an earlier run
// in the same folder.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "device/memory.h"
#include "training/data_use.h"
#include "training/files/append_file.h"

namespace train_gpt {

constexpr const char* history_file = "history.jsonl";

class RunHistory {
  public:
    /// Of several ranks only one writes. Throws Error if the file cannot be written.
    RunHistory(const std::filesystem::path& run_dir, bool writes);

    struct Start {
        int64_t step = 0;
        bool resumes = false;
        int64_t steps = 0;               // of the whole run, as scheduled
        std::vector<SourceUse> planned;  // by the whole run
        std::string device;
        std::vector<std::string> hosts;  // of all ranks, by rank
        int64_t parameters = 0;
        int64_t vocabulary = 0;
        std::string tokenizer;  // hash of its tokenizer.json; empty if there is none
        const Arena& memory;
    };
    void start(const Start& start);
    void checkpoint(int64_t step);
    void sample(int64_t step, const std::string& prompt, const std::string& text);
    void end(int64_t step, const std::string& reason, int code);

  private:
    std::optional<AppendFile> file_;
};

}  // namespace train_gpt
