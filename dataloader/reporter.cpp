#include "dataloader/reporter.h"

#include <cmath>

#include <unistd.h>

namespace train_gpt {

Reporter::Reporter(std::FILE* log, double seconds, const std::vector<Source>& sources)
    : log_(log),
      terminal_(log && ::isatty(::fileno(log))),
      pause_seconds_(terminal_ ? 0.5 : seconds) {
    before_.push_back(0);
    for (const Source& source : sources) {
        before_.push_back(before_.back() + source.size);
        if (source.path == "-") knows_total_ = false;
    }
}

void Reporter::begin(const char* what, size_t source) {
    what_ = what;
    since_start_.restart();
    since_last_.restart();
    from_ = done_ = before_[source];
    text_ = 0;
    seen_first_ = false;
}

void Reporter::count(const Batch& batch, int64_t bytes, int64_t tokens) {
    done_ = before_[batch.source] +
            (batch.last ? before_[batch.source + 1] - before_[batch.source] : batch.file_bytes);
    // The work of an interrupted run does not count for the ETA.
    if (!seen_first_) from_ = done_;
    seen_first_ = true;
    text_ += bytes;
    if (!log_ || since_last_.seconds() < pause_seconds_) return;
    since_last_.restart();
    show(tokens);
}

void Reporter::show(int64_t tokens) {
    const double passed = since_start_.seconds();
    const double rate = static_cast<double>(text_) / passed;
    std::string line = concat(what_, ": ", format("%.2f", 1e-9 * static_cast<double>(done_)));
    const int64_t total = before_.back();
    if (knows_total_ && total > 0)
        line += format(" of %.2f GB (%.0f%%)", 1e-9 * static_cast<double>(total),
                       100.0 * static_cast<double>(done_) / static_cast<double>(total));
    else
        line += " GB";
    line += format(" | %.1f MB/s", 1e-6 * rate);
    if (tokens > 0) line += format(" | %.1f million tokens", 1e-6 * static_cast<double>(tokens));
    if (knows_total_ && done_ > from_) {
        const long long left = std::llround(passed * static_cast<double>(total - done_) /
                                            static_cast<double>(done_ - from_));
        line += format(" | ETA %lld:%02lld:%02lld", left / 3600, left / 60 % 60, left % 60);
    }
    std::fprintf(log_, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
    std::fflush(log_);
    line_open_ = terminal_;
}

void Reporter::end_line() {
    if (line_open_) std::fprintf(log_, "\r\033[K");
    line_open_ = false;
}

}  // namespace train_gpt
