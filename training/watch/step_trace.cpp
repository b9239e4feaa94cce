#include "training/watch/step_trace.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "base/file.h"
#include "base/stopwatch.h"
#include "training/watch/trace_lines.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// The first rank's clock at about the present, on this rank's clock. All ranks leave a barrier at
/// nearly the same time; the median over several of them is the estimate.
double common_time(const World& world) {
    constexpr int barriers = 9;
    std::vector<double> left(barriers);
    for (double& time : left) {
        world.barrier();
        time = monotonic_seconds();
    }
    std::vector<double> of_first = left;
    if (world.rank() != 0) std::fill(of_first.begin(), of_first.end(), 0.0);
    world.all_reduce_sum(of_first);
    std::vector<double> ahead(barriers);
    for (size_t i = 0; i < ahead.size(); ++i) ahead[i] = left[i] - of_first[i];
    std::nth_element(ahead.begin(), ahead.begin() + barriers / 2, ahead.end());
    return of_first.back() + ahead[barriers / 2];
}

}  // namespace

void StepTrace::start(Stream& stream, int64_t step, const World& world) {
    // Steps are alike, but for spans that depend on what has to be waited for.
    const size_t of_step = tracer_.spans() + tracer_.spans() / 4 + 64;
    const auto steps = static_cast<size_t>(steps_.count());
    tracer_.reserve(of_step * steps, steps + 1);
    start_ = common_time(world);
    first_step_ = step;
    state_ = State::tracing;
    tracer_.activate(stream);
}

void StepTrace::begin_step(Stream& stream, int64_t step, int64_t step_of_process) {
    if (steps_.start_after(step_of_process + 1)) {
        state_ = State::counting;
        tracer_.count();
    }
    if (state_ == State::tracing) ++traced_;
    tracer_.begin_step(stream, step);
    step_span_.emplace(TraceTrack::host, "step", static_cast<int>(step));
}

void StepTrace::pause() {
    if (state_ == State::off) return;
    pause_span_.emplace(TraceTrack::host, "between steps");
    tracer_.deactivate();
}

void StepTrace::resume(Stream& stream) {
    pause_span_.reset();
    if (state_ == State::counting) tracer_.count();
    if (state_ == State::tracing) tracer_.activate(stream);
}

fs::path StepTrace::file(std::optional<int> rank) const {
    char name[64];
    std::snprintf(name, sizeof name, rank ? "step-%08lld-rank-%05d.json" : "step-%08lld.json",
                  static_cast<long long>(first_step_), rank.value_or(0));
    return run_dir_ / "trace" / name;
}

void StepTrace::write_rank(const World& world) const {
    const int rank = world.rank();
    make_directory(run_dir_ / "trace");
    AtomicFile out(world.size() > 1 ? file(rank) : file());
    out.write(trace_head);
    out.write(trace_tracks(rank, concat("rank ", rank, " (", world.host(), ")")));
    for (const TracedSpan& span : tracer_.collect()) {
        out.write(trace_separator);
        out.write(trace_event(span, rank, start_));
    }
    out.write(trace_tail);
    out.commit();
}

void StepTrace::merge(int ranks) const {
    AtomicFile all(file());
    all.write(trace_head);
    for (int rank = 0; rank < ranks; ++rank) {
        const MappedFile part(file(rank));
        if (rank > 0) all.write(trace_separator);
        all.write(part.text().substr(trace_head.size(),
                                     part.text().size() - trace_head.size() - trace_tail.size()));
    }
    all.write(trace_tail);
    all.commit();
}

void StepTrace::finish(const World& world, Progress& progress) {
    const bool traced = state_ == State::tracing;
    step_span_.reset();
    pause_span_.reset();
    tracer_.deactivate();
    state_ = State::off;
    if (!traced) return;
    const size_t lost = tracer_.lost();
    std::string trouble;
    const auto attempt = [&](const auto& work) {
        try {
            work();
        } catch (const std::exception& error) {
            trouble = message_of(error);
        }
    };
    attempt([&] { write_rank(world); });
    tracer_.reserve(0, 0);
    for (const std::string& of_rank : world.all_gather(trouble))
        if (trouble.empty()) trouble = of_rank;
    if (world.size() > 1 && world.rank() == 0 && trouble.empty())
        attempt([&] { merge(world.size()); });
    if (!trouble.empty())
        progress.warn("there is no trace, since it could not be written: " + trouble);
    else
        progress.say(concat("trace of ", traced_, traced_ == 1 ? " step: " : " steps: ",
                            file().string(), ", for https://ui.perfetto.dev",
                            lost > 0 ? concat("; ", lost, " spans are missing") : ""));
}

}  // namespace train_gpt
