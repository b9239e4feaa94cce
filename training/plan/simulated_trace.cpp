#include "training/plan/simulated_trace.h"

#include "base/error.h"
#include "base/file.h"
#include "training/watch/trace_lines.h"

namespace train_gpt {

namespace {

/// The names of a real trace, where it has such spans.
const char* name_of(SimulatedSpan::Kind kind) {
    constexpr const char* names[] = {"forward layer",
                                     "backward layer",
                                     "backward layer, inputs",
                                     "backward layer, weights",
                                     "wait for the exchange",
                                     "gather bucket",
                                     "reduce bucket",
                                     "send to pipeline rank, micro-batch",
                                     "update"};
    return names[static_cast<size_t>(kind)];
}

}  // namespace

void write_trace(const std::filesystem::path& path, const SimulatedStep& step,
                 const std::vector<int>& first_ranks) {
    AtomicFile file(path);
    file.write(trace_head);
    for (size_t r = 0; r < step.spans.size(); ++r) {
        const int rank = first_ranks[r];
        if (r > 0) file.write(trace_separator);
        file.write(trace_tracks(rank, concat("rank ", rank, " (predicted)")));
        for (const SimulatedSpan& span : step.spans[r]) {
            const bool update = span.kind == SimulatedSpan::Kind::optimizer;
            file.write(trace_separator);
            file.write(trace_event(
                {.track = span.is_exchange() ? TraceTrack::exchange : TraceTrack::device,
                 .name = name_of(span.kind),
                 .number = update ? -1 : span.number,
                 .step = 1,
                 .begin = span.begin,
                 .end = span.end},
                rank, 0));
        }
    }
    file.write(trace_tail);
    file.commit();
}

}  // namespace train_gpt
