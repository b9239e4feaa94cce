#include "training/watch/step_trace.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "base/stopwatch.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view head = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n",
                           separator = ",\n", tail = "\n]}\n";

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

/// A track's number as a thread; 0 is the idle thread in Perfetto.
int thread_of(TraceTrack track) { return 1 + static_cast<int>(track); }

/// A line about a process (a rank) or one of its threads (a track).
std::string metadata(const char* what, int rank, int thread, const Json& args) {
    return to_text(
        Json{{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", args}});
}

std::string event(const TracedSpan& span, int rank, double start) {
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

}  // namespace

void StepTrace::start(Stream& stream, int64_t step, const World& world) {
    // Steps are alike, but for spans that depend on what has to be waited for.
    const size_t of_step = tracer_.spans() + tracer_.spans() / 4 + 64;
    const auto steps = static_cast<size_t>(steps_);
    tracer_.reserve(of_step * steps, steps + 1);
    start_ = common_time(world);
    first_step_ = step;
    state_ = State::tracing;
    tracer_.activate(stream);
}

void StepTrace::begin_step(Stream& stream, int64_t step, int64_t step_of_process) {
    if (steps_ > 0 && step_of_process == warm_up - 1) {
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
    out.write(head);
    out.write(metadata("process_name", rank, 0,
                       {{"name", concat("rank ", rank, " (", world.host(), ")")}}));
    out.write(separator);
    out.write(metadata("process_sort_index", rank, 0, {{"sort_index", rank}}));
    for (int i = 0; i < static_cast<int>(TraceTrack::count); ++i) {
        const auto track = static_cast<TraceTrack>(i);
        out.write(separator);
        out.write(metadata("thread_name", rank, thread_of(track), {{"name", name_of(track)}}));
        out.write(separator);
        out.write(metadata("thread_sort_index", rank, thread_of(track), {{"sort_index", i}}));
    }
    for (const TracedSpan& span : tracer_.collect()) {
        out.write(separator);
        out.write(event(span, rank, start_));
    }
    out.write(tail);
    out.commit();
}

void StepTrace::merge(int ranks) const {
    AtomicFile all(file());
    all.write(head);
    for (int rank = 0; rank < ranks; ++rank) {
        const MappedFile part(file(rank));
        if (rank > 0) all.write(separator);
        all.write(part.text().substr(head.size(), part.text().size() - head.size() - tail.size()));
    }
    all.write(tail);
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
