// What a supervisor writes into its run's folder:
//
//   supervise.log     all lines that the ranks of all starts have printed, and what the supervisor
//                     did. Lines of rank 0 are as they are. Others begin with host and rank:
//                     "node2 rank 9: …". Lines of the supervisor begin with the time.
//   supervise.jsonl   what the supervisor did: an object a line, with "event", "step" (the last
//                     step of the run's metrics), "time" (seconds since 1970), "text" (a sentence)
//                     and, of the events
//
//   ranks_start   start (counted from 1), ranks, hosts, checkpoint (its step, −1: none)
//   ranks_end     kind ("done", "lost", "blocked", "failed", "hopeless"), code, line (what the
//                 ranks said)
//   host_out      host: it gets no ranks
//   supervisor_end   code (the exit code)
//
// The events also become lines of the run's chained history, from the run's own first line on.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "training/files/append_file.h"

namespace train_gpt {

constexpr const char* supervisor_log_file = "supervise.log";
constexpr const char* supervisor_events_file = "supervise.jsonl";

class SupervisorLog {
  public:
    /// Opens the files. Throws Error if they cannot be written, or if another supervisor writes
    /// them.
    explicit SupervisorLog(const std::filesystem::path& run_dir);
    ~SupervisorLog();
    SupervisorLog(const SupervisorLog&) = delete;
    SupervisorLog& operator=(const SupervisorLog&) = delete;

    /// A line of the log alone.
    void line(const std::string& text);
    /// A line about what the supervisor does, which is also printed on stderr.
    void say(const std::string& text);
    /// Like say(), and records an event. All events pass here. While a rank that is not gone yet
    /// holds the run's folder, the history gets the event together with the next one.
    void record(const char* event, const std::string& text, const Json& fields = Json::object());

  private:
    void add_to_history(const Json& event);

    std::filesystem::path run_dir_;
    int lock_ = -1;
    std::optional<AppendFile> log_, events_;
    std::vector<Json> not_in_history_;
};

/// The step of the last line of metrics.jsonl that has one; 0 if there is none.
int64_t last_recorded_step(const std::filesystem::path& run_dir);

}  // namespace train_gpt
