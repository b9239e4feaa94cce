// How far the reading of texts is, for a terminal or a log.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/stopwatch.h"
#include "dataloader/documents.h"

namespace train_gpt {

/// A text as std::snprintf makes it, of at most 127 bytes.
template <class... Args>
std::string format(const char* pattern, Args... args) {
    char text[128];
    std::snprintf(text, sizeof text, pattern, args...);
    return text;
}

/// Says how far the reading is: on a terminal in a line that renews itself, else in a line now and
/// then.
class Reporter {
  public:
    /// Every `seconds`, and on a terminal every half of one.
    Reporter(std::FILE* log, double seconds, const std::vector<Source>& sources);

    template <class... Args>
    void say(const Args&... args) {
        if (!log_) return;
        end_line();
        std::fprintf(log_, "%s\n", printable(concat(args...)).c_str());
        std::fflush(log_);
    }

    /// A reading of all sources begins at one of them.
    void begin(const char* what, size_t source);
    /// A batch with so many bytes of text was read, and there are so many tokens.
    void count(const Batch& batch, int64_t bytes, int64_t tokens);

  private:
    void show(int64_t tokens);
    void end_line();

    std::FILE* log_;
    const bool terminal_;
    const double pause_seconds_;
    std::vector<int64_t> before_;  // bytes of files before each source, and of all
    bool knows_total_ = true, seen_first_ = false, line_open_ = false;
    const char* what_ = "";
    int64_t from_ = 0, done_ = 0, text_ = 0;
    Stopwatch since_start_, since_last_;
};

}  // namespace train_gpt
