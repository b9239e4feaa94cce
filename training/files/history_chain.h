// The chain in a run's history.jsonl. Each line is a JSON object whose last field is "previous":
// the SHA-256 of the bytes of the line before it, without its end. So a line that was changed,
// removed, added or moved breaks the chain, unless all lines after it were written anew.
//
// The first line of a new file has the hash of no bytes. Where an older version wrote lines without
// a chain, the first line of the chain has the hash of all bytes before it, and says so (event
// "chain"). From then on the older lines are part of what the chain holds.
//
// A program that is killed, or a machine that loses power, may leave a last line that is not whole.
// What holds is everything up to the last whole line. Who opens the file to write next cuts the
// rest off, and appends an event "torn" that has it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json_text.h"
#include "training/files/append_file.h"

namespace train_gpt {

constexpr const char* history_file = "history.jsonl";

struct HistoryLine {
    int64_t number = 0;  // counted from 1
    std::string hash;    // what the next line has as "previous"
    Json event;
};

/// The first line that does not follow from the lines before it.
struct HistoryBreak {
    int64_t line = 0;
    std::string what;  // the rest of a sentence that begins with "line 7 of FILE "
};

struct HistoryChain {
    std::vector<HistoryLine> lines;  // that are JSON objects, up to the break
    int64_t first = 0;               // the line with which the chain begins; 0: there is no chain
    std::optional<HistoryBreak> broken;
    std::string head;  // the "previous" of the line that comes next, also after a break
    size_t whole = 0;  // bytes of the whole lines; what follows them is a torn line

    /// The line with this hash, if it belongs to the chain; null if there is none.
    const HistoryLine* line_of(const std::string& hash) const;
};

/// Reads the text of a history.
HistoryChain read_chain(std::string_view text);
/// Reads the history of a run's folder. A folder without the file has an empty history.
HistoryChain read_history(const std::filesystem::path& run_dir);
/// "line 7 of RUN/history.jsonl was changed …"
std::string describe_break(const std::filesystem::path& run_dir, const HistoryBreak& broken);

/// Appends to a run's history. At most one process may have an open writer: it holds the run's
/// folder (RunFolder).
class HistoryWriter {
  public:
    /// Opens the file, or makes an empty one, and cuts off a torn last line. Begins the chain in
    /// the history of an older version; the event then also has the hashes of the manifests of the
    /// checkpoints that are there. Throws Error if the file cannot be written.
    explicit HistoryWriter(const std::filesystem::path& run_dir);

    /// What was there when the file was opened; a second call returns nothing of it.
    HistoryChain take_found() { return std::move(found_); }

    /// Appends an event. If the disk is full the event is lost, and the chain continues without it.
    void append(Json event);
    /// The hash of the last line. Before a file that names it is complete, the history must be on
    /// the disk (sync_file), so that a loss of power does not take the line away.
    const std::string& head() const { return head_; }

  private:
    HistoryChain found_;
    std::string head_;
    AppendFile file_;
};

/// Appends an event to the history of a run that no process trains, such as a supervisor's. Adds
/// "time", and without a "step" the step of the last event. It takes the lock of the run's folder
/// while it writes, so that two writers cannot both continue the same line. Throws Error, and
/// writes nothing, if a process trains into the folder: the events are then that process's to
/// write. A run that starts in this very moment ends with the same error.
void append_to_history(const std::filesystem::path& run_dir, Json event);

/// An event with the present time. `name` is what happened.
Json history_event(const char* name, int64_t step);

/// The SHA-256 of a checkpoint's manifest, by which the history knows the checkpoint. Throws Error
/// if there is none.
std::string manifest_hash(const std::filesystem::path& checkpoint);

}  // namespace train_gpt
