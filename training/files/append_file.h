// A file that grows by whole records while other programs read it, such as metrics.jsonl. From its
// first record on it is locked (flock), so that who can read it can see that it is being written.
#pragma once
#include <filesystem>
#include <string_view>

namespace train_gpt {

class AppendFile {
  public:
    /// Opens the file, or makes an empty one. Throws Error, with the reason, if that fails.
    explicit AppendFile(std::filesystem::path path);
    ~AppendFile();
    AppendFile(const AppendFile&) = delete;
    AppendFile& operator=(const AppendFile&) = delete;

    /// Appends one record. If the disk is full, nothing of it remains, and the first such failure
    /// is printed on stderr, with `lost`; records are missing until there is space again. A file
    /// that was removed or renamed is written again, whole. Throws Error if another one has taken
    /// its place, or if its folder is no longer there, and drops all later records. Returns whether
    /// the record was written.
    bool append(std::string_view record, const char* lost = "metrics are lost");
    /// In a file of lines: ends the last line if a killed process has left it without an end.
    void end_line();

  private:
    void keep_in_place();
    void write_again();

    std::filesystem::path path_;
    int folder_ = -1, file_ = -1;
    bool failed_ = false, replaced_ = false;
};

}  // namespace train_gpt
