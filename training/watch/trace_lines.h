// The lines of a trace's file (Trace Event Format), which Perfetto and Chrome's trace viewer read.
#pragma once
#include <string>
#include <string_view>

#include "device/trace.h"

namespace train_gpt {

constexpr std::string_view trace_head = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n",
                           trace_separator = ",\n", trace_tail = "\n]}\n";

/// The lines that name a rank and its tracks.
std::string trace_tracks(int rank, const std::string& name);
/// The line of a span. `start`: the time that the trace calls 0.
std::string trace_event(const TracedSpan& span, int rank, double start);

}  // namespace train_gpt
