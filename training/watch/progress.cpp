#include "training/watch/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <unistd.h>

#include "base/formatted.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "device/memory.h"

namespace train_gpt {

namespace {

std::string percent(double part, double whole) {
    return formatted("%.0f%%", whole > 0 ? 100 * part / whole : 0.0);
}

/// "184k tok/s"; empty where that is not shorter.
std::string brief_rate(double rate) {
    if (rate >= 999'500) return formatted("%.3gM tok/s", 1e-6 * rate);
    return rate >= 1e4 ? formatted("%.0fk tok/s", 1e-3 * rate) : "";
}

/// "63.9 GiB"; less precise than format_bytes().
std::string brief_bytes(uint64_t bytes) {
    const double mib = static_cast<double>(bytes) / (1 << 20);
    return mib < 1000 ? formatted("%.0f MiB", mib) : formatted("%.3g GiB", mib / 1024);
}

}  // namespace

std::vector<ProgressField> fields_of(const StepReport& r) {
    const std::string step = formatted("%lld/%lld", static_cast<long long>(r.step),
                                       static_cast<long long>(r.steps)),
                      peak = percent(r.flops_per_second, r.peak_flops_per_second);
    std::string limit = peak + " of peak", short_limit = peak + " peak";
    if (r.datasheet_flops_per_second > 0) {
        short_limit = percent(r.flops_per_second, r.datasheet_flops_per_second) + " MFU";
        limit = short_limit + ", " + limit;
    }
    std::vector<ProgressField> fields{
        {"step " + step, 0, step},
        {formatted("loss %.4f", r.loss), 1},
        {formatted("norm %.3f", r.grad_norm), 8},
        {formatted("lr %.2e", r.learning_rate), 7},
        {formatted("%.1f ms", 1e3 * r.seconds), 6},
        {formatted("%.0f tok/s", r.tokens_per_second), 3, brief_rate(r.tokens_per_second)},
        {formatted("%.3f TFLOP/s", 1e-12 * r.flops_per_second), 10},
        {limit, 4, short_limit},
        {format_bytes(r.memory), 5, brief_bytes(r.memory)},
        {"ETA " + format_duration(r.seconds_left), 2}};
    if (r.ranks > 1)
        fields.push_back({formatted("compute %.0f%%, communication %.0f%%",
                                    100 * r.times[StepPhase::compute] / r.times.total(),
                                    100 * r.times[StepPhase::communication] / r.times.total()),
                          9});
    if (const double share = bubble_share(r.times); share > 0)
        fields.push_back({formatted("bubble %.0f%%", 100 * share), 9});
    return fields;
}

std::string format_duration(double seconds) {
    const long long s = seconds > 0 ? std::llround(seconds) : 0;
    if (s >= 3600) return formatted("%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    return formatted("%lld:%02lld", s / 60, s % 60);
}

std::string rough_duration(double seconds) {
    constexpr double minute = 60, hour = 60 * minute, day = 24 * hour;
    if (seconds < 2 * minute) return formatted("%.0f s", seconds);
    if (seconds < 2 * hour) return formatted("%.0f min", seconds / minute);
    if (seconds < 2 * day) return formatted("%.1f h", seconds / hour);
    return formatted("%.0f days", seconds / day);
}

std::string describe_slow_steps(double flops, double seconds, int64_t steps) {
    return "a step takes at least " + rough_duration(seconds) +
           formatted(
               " (%.3g FLOPs at the %.3g TFLOP/s measured here for matrix products), the "
               "remaining %lld at least ",
               flops, 1e-12 * flops / seconds, static_cast<long long>(steps)) +
           rough_duration(seconds * static_cast<double>(steps));
}

std::string fit_fields(std::vector<ProgressField> fields, int columns) {
    const auto joined = [&] {
        std::string line;
        for (const ProgressField& field : fields) line += (line.empty() ? "" : " | ") + field.text;
        return line;
    };
    const auto drop_down_to = [&](int rank) {
        while (fields.size() > 1 && std::ssize(joined()) > columns) {
            const auto least = std::ranges::max_element(fields, {}, &ProgressField::rank);
            if (least->rank <= rank) return;
            fields.erase(least);
        }
    };
    if (columns <= 0) return joined();
    drop_down_to(last_essential_rank);
    if (std::ssize(joined()) > columns)
        for (ProgressField& field : fields)
            if (!field.brief.empty()) field.text = field.brief;
    drop_down_to(0);
    std::string line = joined();
    line.resize(std::min(line.size(), static_cast<size_t>(columns)));
    return line;
}

Progress::Progress(ProgressStyle style, bool speaks, bool quiet, double line_seconds)
    : rewrite_(style == ProgressStyle::line ||
               (style == ProgressStyle::automatic && ::isatty(STDOUT_FILENO))),
      speaks_(speaks && !quiet),
      warns_(speaks),
      line_seconds_(line_seconds) {}

void Progress::draw() const {
    std::vector<ProgressField> fields = fields_;
    if (!note_.empty()) fields.push_back({note_, fields_.empty() ? 0 : 1});
    std::printf("\r\033[K%s", fit_fields(std::move(fields), columns_of(stdout)).c_str());
    std::fflush(stdout);
}

void Progress::report(const StepReport& r) {
    if (!speaks_) return;
    fields_ = fields_of(r);
    note_.clear();
    if (rewrite_) {
        draw();
        line_open_ = true;
    } else {
        std::printf("%s\n", fit_fields(fields_, 0).c_str());
        std::fflush(stdout);
        since_shown_.restart();
    }
}

void Progress::show(const std::string& done, double seconds_left) {
    if (!speaks_) return;
    if (rewrite_ ? !note_.empty() && since_shown_.seconds() < 0.2
                 : since_shown_.seconds() < line_seconds_)
        return;
    since_shown_.restart();
    const std::string note = done + ", " + format_duration(seconds_left) + " left";
    if (!rewrite_) {
        std::printf("%s\n", note.c_str());
        std::fflush(stdout);
        return;
    }
    note_ = note;
    draw();
    line_open_ = true;
}

void Progress::show_step(int64_t step, int done, int all, double seconds, double expected) {
    if (done > 0) expected = seconds * all / done;
    if (expected < slow_step_seconds) return;
    show(formatted("step %lld: micro-batch %d/%d", static_cast<long long>(step), done + 1, all),
         expected - seconds);
}

void Progress::say(const std::string& line) {
    if (!speaks_) return;
    end_line();
    print_line(stdout, printable(line));
    std::fflush(stdout);
}

void Progress::show_text(const std::string& text) {
    if (!speaks_) return;
    end_line();
    std::printf("%s\n", printable(text).c_str());
    std::fflush(stdout);
}

void Progress::warn(const std::string& line) {
    if (!warns_) return;
    end_line();
    print_line(stderr, "warning: " + printable(line));
}

void Progress::end_line() {
    if (!line_open_) return;
    if (!note_.empty()) {
        note_.clear();
        draw();
    }
    if (!fields_.empty()) std::printf("\n");
    line_open_ = false;
    std::fflush(stdout);
}

}  // namespace train_gpt
