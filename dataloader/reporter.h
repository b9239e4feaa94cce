// Progress of reading texts, for a terminal or a log.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/stopwatch.h"
#include "base/terminal_text.h"
#include "dataloader/documents.h"

namespace train_gpt {

/// Formats a text like std::snprintf, of at most 127 bytes.
template <class... Args>
std::string format(const char* pattern, Args... args) {
    char text[128];
    std::snprintf(text, sizeof text, pattern, args...);
    return text;
}

/// Reports how much has been read: on a terminal in one line that is updated in place, else in a
/// new line now and then.
class Reporter {
  public:
    /// Reports every `seconds` s; on a terminal, every 0.5 s.
    Reporter(std::FILE* log, double seconds, const std::vector<Source>& sources);

    template <class... Args>
    void say(const Args&... args) {
        if (!log_) return;
        end_line();
        print_line(log_, printable(concat(args...)));
        std::fflush(log_);
    }

    /// A pass over the sources begins, at this one.
    void begin(const char* what, size_t source);
    /// A batch with `bytes` bytes of text was read; `tokens` is the number of tokens so far.
    void count(const Batch& batch, int64_t bytes, int64_t tokens);

  private:
    void show(int64_t tokens);
    void end_line();

    std::FILE* log_;
    const bool terminal_;
    const double pause_seconds_;
    std::vector<int64_t> before_;  // bytes of files before each source, then of all files
    bool knows_total_ = true, seen_first_ = false, line_open_ = false;
    const char* what_ = "";
    int64_t from_ = 0, done_ = 0, text_ = 0;
    Stopwatch since_start_, since_last_;
};

}  // namespace train_gpt
