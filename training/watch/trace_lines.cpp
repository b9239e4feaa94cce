#include "training/watch/trace_lines.h"

#include <algorithm>
#include <cstdio>

#include "base/json_text.h"

namespace train_gpt {

namespace {

/// A track's number as a thread; 0 is the idle thread in Perfetto.
int thread_of(TraceTrack track) { return 1 + static_cast<int>(track); }

/// A line about a process (a rank) or one of its threads (a track).
std::string metadata(const char* what, int rank, int thread, const Json& args) {
    return to_text(
        Json{{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", args}});
}

}  // namespace

std::string trace_tracks(int rank, const std::string& name) {
    std::string lines = metadata("process_name", rank, 0, {{"name", name}});
    const auto add = [&](const std::string& line) { lines.append(trace_separator).append(line); };
    add(metadata("process_sort_index", rank, 0, {{"sort_index", rank}}));
    for (int i = 0; i < static_cast<int>(TraceTrack::count); ++i) {
        const auto track = static_cast<TraceTrack>(i);
        add(metadata("thread_name", rank, thread_of(track), {{"name", name_of(track)}}));
        add(metadata("thread_sort_index", rank, thread_of(track), {{"sort_index", i}}));
    }
    return lines;
}

std::string trace_event(const TracedSpan& span, int rank, double start) {
    char number[16] = "", text[256];
    if (span.number >= 0) std::snprintf(number, sizeof number, " %d", span.number);
    std::snprintf(
        text, sizeof text,
        "{\"ph\":\"X\",\"name\":\"%s%s\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,"
        "\"dur\":%.3f,\"args\":{\"step\":%lld}}",
        span.name, number, name_of(span.track), rank, thread_of(span.track),
        1e6 * std::max(0.0, span.begin - start), 1e6 * std::max(0.0, span.end - span.begin),
        static_cast<long long>(span.step));
    return text;
}

}  // namespace train_gpt
