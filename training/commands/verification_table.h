// The table of files that `verify` prints, row by row as the files are read.
#pragma once
#include <array>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "dataloader/verify.h"

namespace train_gpt {

class VerificationTable {
  public:
    /// out: null prints nothing.
    explicit VerificationTable(std::FILE* out) : out_(out) {}

    /// Verifies files, with a row for each. whole_paths: rows have paths and not only names.
    void section(const std::string& title, const std::vector<RecordedFile>& files,
                 bool whole_paths = false);
    /// A section that cannot be read at all, or something else that is wrong. `what`: a sentence.
    void trouble(const std::string& title, const std::string& what);
    /// Lines that are only printed.
    void say(const std::string& lines);

    /// What was wrong first, a sentence; empty if nothing is.
    const std::string& first_trouble() const { return first_trouble_; }
    /// {"ok": 4, "damaged": 1}
    Json counts() const;
    /// The rows, without the files that are whole.
    const Json& bad_files() const { return bad_files_; }

    /// Prints the closing line. Returns whether nothing was wrong.
    bool close();

  private:
    void row(const RecordedFile& file, const std::string& name);
    int& count(FileState state) { return counts_[static_cast<size_t>(state)]; }

    std::FILE* out_;
    std::array<int, 4> counts_{};
    std::string first_trouble_;
    Json bad_files_ = Json::array();
};

}  // namespace train_gpt
