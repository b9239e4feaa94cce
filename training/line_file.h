// A file of lines to which a run appends, one at a time.
#pragma once
#include <filesystem>
#include <string_view>

namespace train_gpt {

class LineFile {
  public:
    /// Opens or creates the file. A last line without an end, which a process that was killed has
    /// left, gets one, so that the next line is a line of its own. Throws Error if the file cannot
    /// be written.
    explicit LineFile(std::filesystem::path path);
    ~LineFile();
    LineFile(const LineFile&) = delete;
    LineFile& operator=(const LineFile&) = delete;

    /// Appends one line, given without its end. If the disk is full, it says so once on stderr, with
    /// `lost`, such as "metrics are lost"; lines are missing until there is space again.
    void append(std::string_view line, const char* lost);

  private:
    std::filesystem::path path_;
    int file_ = -1;
    bool failed_ = false;
};

}  // namespace train_gpt
