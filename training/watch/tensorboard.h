// The run folder's event file for TensorBoard: the records of metrics.jsonl as scalars, and samples
// and the configuration as texts and hyperparameters.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "training/files/append_file.h"
#include "training/watch/metrics.h"

namespace train_gpt {

class TensorBoardSink : public MetricsSink {
  public:
    struct Options {
        std::string config;   // as recorded in config.json
        uint64_t memory = 0;  // bytes of each rank
    };
    /// The folder's metrics.jsonl holds the records up to resume_step (JsonLinesSink). The event
    /// file gets the same contents. Events of later steps are dropped, since these steps are run
    /// again. Incomplete records are dropped, too. Records of metrics.jsonl that have no events get
    /// events.
    ///
    /// If nothing of a file changes, the sink continues this file. Otherwise the events move to a
    /// new file, since a TensorBoard that reads the old file would not see the change. A run that
    /// starts from the beginning (no resume_step) keeps the largest earlier file as events.old. If
    /// a file cannot be written, the sink prints that on stderr, and does nothing else.
    TensorBoardSink(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step,
                    Options options);

    void write(const MetricsRecord& record) override;
    /// Writes a text that TensorBoard shows as it is, not as Markdown. The steps of texts only
    /// increase: a text that a start of the run writes again is left out.
    void write_text(int64_t step, const std::string& name, const std::string& text) override;

  private:
    struct Events;
    Events events_at_start(const std::filesystem::path& run_dir,
                           const std::vector<std::filesystem::path>& files,
                           std::optional<int64_t> resume_step) const;
    void open(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step);
    std::vector<std::string> values_of(const MetricsRecord& record) const;

    Options options_;
    int64_t last_text_ = -1;            // its step
    std::unique_ptr<AppendFile> file_;  // null if it cannot be written
};

}  // namespace train_gpt
