// A run as its folder records it: what a report shows.
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json_text.h"
#include "training/data_use.h"
#include "training/report/router_picture.h"

namespace train_gpt {

/// The lines of one kind in metrics.jsonl, by field. A value is NaN if the line lacks the field or
/// has null.
struct MetricsTable {
    std::vector<double> step;
    std::map<std::string, std::vector<double>> columns;
    /// Rows that thin() keeps for their place and not for a value: a fair sample of the steps.
    std::vector<bool> is_sample;

    size_t rows() const { return step.size(); }
    bool has(const std::string& name) const { return columns.contains(name); }
    /// The column. If there is no such column, a column of NaNs.
    std::vector<double> column(const std::string& name) const;
    /// The last finite value of a column; NaN if there is none.
    double last(const std::string& name) const;
    /// The row of the last finite value of a column; nothing if there is none.
    std::optional<size_t> last_row(const std::string& name) const;
    /// The first row with the smallest value of column `name`; nothing if there is none. Only rows
    /// count that have the same value of column `like` as last_row(name).
    std::optional<size_t> smallest_row(const std::string& name, const std::string& like) const;

    /// Adds a line. Removes rows of the same or a later step, since these steps were run again.
    void add(double at, const Json& line);
    /// Leaves rows out until at most `most` are left. In each of many equal intervals of steps,
    /// these rows stay: the first, the last, the first and the last of is_sample, and the rows with
    /// the smallest and the largest value of each column.
    void thin(size_t most);
};

class RecordedRun {
  public:
    /// Reads a run's folder. Throws Error, in a sentence, if it is not one, or has no metrics yet.
    /// most_rows: where a table has twice as many, it is thinned to these, which bounds the memory.
    /// Means and sums are then over the rows that are left.
    explicit RecordedRun(std::filesystem::path folder,
                         size_t most_rows = std::numeric_limits<size_t>::max() / 2);

    /// Reads what has been written since the last call; from files of lines, such as metrics.jsonl,
    /// only the new ones.
    void update();

    const std::filesystem::path& folder() const { return folder_; }
    /// The folder's name, unless rename() gave another one.
    std::string name() const;
    void rename(std::string name) { name_ = std::move(name); }
    /// The lines that were read of all files: a number that grows while the run trains.
    int64_t lines_read() const {
        return metrics_lines_.count + history_lines_.count + routers_lines_.count +
               supervisor_lines_.count;
    }

    const MetricsTable& training() const { return training_; }
    const MetricsTable& evaluations() const { return evaluations_; }
    /// The lines of history.jsonl that belong to this run; empty for runs of older versions.
    const std::vector<Json>& history() const { return history_; }
    /// The lines of supervise.jsonl, also of earlier runs in the folder; empty without a
    /// supervisor.
    const std::vector<Json>& supervised() const { return supervised_; }
    /// The lines of routers.jsonl.
    const std::vector<RouterSnapshot>& routers() const { return routers_; }
    /// The last start in the history; null if none is recorded.
    const Json* last_start() const;
    /// Every key of config.json with its value as JSON; empty if it cannot be read.
    const std::map<std::string, Json>& config() const { return config_; }
    /// A key's value; null if there is none.
    Json setting(const std::string& key) const;
    /// manifest.json; not an object if it cannot be read.
    const Json& manifest() const { return manifest_; }
    /// choices.json; not an object if it cannot be read.
    const Json& choices() const { return choices_; }
    /// The names of several sources of training data, in their order; empty if there is one.
    std::vector<std::string> sources() const;
    /// Whether a process, also this one, is writing into the folder.
    bool active() const { return active_; }
    /// The tokens that the run had read by each row of a table; NaN where they are unknown.
    std::vector<double> tokens(const MetricsTable& table) const;
    /// The length of the whole schedule in steps; 0 if it is unknown.
    int64_t steps_planned() const;
    /// The whole schedule's passes over the sources of training data. The last start recorded them.
    std::vector<SourceUse> passes_planned() const;
    /// The last step of any line.
    int64_t last_step() const;

    /// What is wrong with the files; each text is a sentence.
    std::vector<std::string> notes() const;

  private:
    /// A file of JSON lines that is read piece by piece.
    struct LinesFile {
        uint64_t read = 0;      // bytes, up to the end of a line
        int64_t count = 0;      // lines read
        int64_t bad = 0;        // lines among these that are not JSON objects
        int64_t first_bad = 0;  // counted from 1
        bool half = false;      // the last line has no end
        // These show whether the file is still the one that was read:
        uint64_t device = 0, inode = 0;
        std::string last = {};  // the last line that was read
        bool replaced = false;  // it is another file, of which no line has been read yet
    };
    /// clear: forgets the lines of a file that was replaced.
    template <class Clear, class Take>
    void read_lines(const char* file, LinesFile& lines, const Clear& clear, const Take& take);
    void take_metrics(const Json& line);
    void read_documents();
    void resolve_config();

    std::filesystem::path folder_;
    std::string name_;
    size_t most_rows_;
    LinesFile metrics_lines_, history_lines_, routers_lines_, supervisor_lines_;
    MetricsTable training_, evaluations_;
    std::vector<Json> history_, supervised_;
    std::vector<RouterSnapshot> routers_;
    std::map<std::string, Json> config_;
    Json manifest_, choices_;
    std::vector<std::string> unreadable_;  // documents that could not be read
    bool active_ = false;
};

}  // namespace train_gpt
