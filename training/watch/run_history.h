// history.jsonl in a run's folder: what happened to the run besides its steps. Each line is one
// JSON object with "event", "step", "time" (seconds since 1970) and "previous" (the hash of the
// line before it: training/files/history_chain.h), and with these fields of the event:
//
//   start       what was started, by whom and on what: start_event.h
//   data        data: the hashes of shards that no data.json describes, as the run has read them
//   checkpoint  manifest: the SHA-256 of its manifest.json
//   evaluation  the fields of the line in metrics.jsonl
//   sample      prompt, text
//   spike       text: what was printed about it
//   signal      reason: its name
//   failure     reason: why a checkpoint could not be written
//   end         reason, code (the exit code; 1: the run failed)
//   chain, torn history_chain.h
//
// Lines are never removed. Lines before the last start that does not resume belong to an earlier
// run in the same folder.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "training/files/history_chain.h"
#include "training/watch/metrics.h"

namespace train_gpt {

struct RunStart;

class RunHistory {
  public:
    /// writes: whether this rank writes; only one of several ranks does. Throws Error if the file
    /// cannot be written.
    RunHistory(const std::filesystem::path& run_dir, bool writes);

    /// hosts: of all ranks. Returns what to warn of: that the history does not hold any more. Empty
    /// if it does.
    std::string start(const RunStart& start, std::vector<std::string> hosts);
    /// A complete checkpoint.
    void checkpoint(int64_t step);
    void evaluation(int64_t step, const MetricsRecord::Fields& fields);
    void sample(int64_t step, const std::string& prompt, const std::string& text);
    void spike(int64_t step, const std::string& text);
    void signal(int64_t step, const std::string& reason);
    void failure(int64_t step, const std::string& reason);
    /// The description of the data, if the run has changed it since it was last recorded.
    void data(int64_t step);
    void end(int64_t step, const std::string& reason, int code);

    /// HistoryWriter::head(); empty on ranks that do not write.
    std::string head() const { return writer_ ? writer_->head() : ""; }

  private:
    void add(const char* name, int64_t step, const Json& fields);

    std::filesystem::path run_dir_;
    std::optional<HistoryWriter> writer_;
    std::string manifest_;  // the hash of the folder's manifest.json when it was last recorded
};

/// Sends evaluations to the history.
class HistorySink : public MetricsSink {
  public:
    explicit HistorySink(RunHistory& history) : history_(history) {}
    void write(const MetricsRecord& record) override {
        if (record.kind == MetricsRecord::Kind::evaluation)
            history_.evaluation(record.step, record.fields);
    }

  private:
    RunHistory& history_;
};

}  // namespace train_gpt
