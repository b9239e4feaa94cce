#include "training/watch/step_profile.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "training/plan/peak.h"

namespace train_gpt {

StepProfile::StepProfile(const Device& device, int64_t steps, double peak_flops)
    : steps_(steps), peak_flops_(peak_flops), profiler_(device) {
    if (steps_.count() > 0) bandwidth_ = measure_bandwidth(device);
}

void StepProfile::begin_step(Stream& stream, int64_t step_of_process) {
    if (starts_before(step_of_process)) start(stream);
    if (stream.profiler) ++submitted_;
}

void StepProfile::start(Stream& stream) {
    stream.profiler = &profiler_;
    since_start_.restart();
}

void StepProfile::pause(Stream& stream) {
    if (!stream.profiler) return;
    seconds_ += since_start_.seconds();
    stream.profiler = nullptr;
    paused_ = true;
}

void StepProfile::resume(Stream& stream) {
    if (paused_) start(stream);
    paused_ = false;
}

std::string StepProfile::finish(Stream& stream) {
    pause(stream);
    paused_ = false;
    return profile_table(profiler_.totals(), steps_.count(), submitted_ - steps_.count(), seconds_,
                         peak_flops_, bandwidth_);
}

std::string profile_of_stages(const Mesh& mesh, const std::string& table) {
    const std::vector<int> first_ranks = mesh.layout().first_ranks(Axis::pipeline);
    if (first_ranks.size() == 1) return table;
    const std::vector<std::string> tables = mesh.world().all_gather(table);
    std::string text;
    for (size_t i = 0; i < first_ranks.size(); ++i) {
        const int rank = first_ranks[i];
        text += concat(i == 0 ? "" : "\n", "pipeline rank ", i, " (rank ", rank, "), ",
                       tables[static_cast<size_t>(rank)]);
    }
    return text;
}

std::string profile_table(const std::vector<Profiler::Total>& totals, int64_t steps,
                          int64_t repeats, double seconds, double peak_flops, double bandwidth) {
    std::vector<Profiler::Total> rows = totals;
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
    char text[256];
    std::snprintf(text, sizeof text, "; limits measured here: %.1f GB/s, %.2f TFLOP/s\n",
                  1e-9 * bandwidth, 1e-12 * peak_flops);
    std::string table = concat("profile of ", steps, " steps");
    if (repeats > 0) table += concat(" and of ", repeats, " that were computed again");
    table += text;
    std::snprintf(text, sizeof text, "  %-24s %10s %10s %7s %16s %8s\n", "kernel", "calls/step",
                  "ms/step", "share", "rate", "of limit");
    table += text;
    double in_kernels = 0;
    const double n = static_cast<double>(steps + repeats);
    for (const Profiler::Total& row : rows) {
        in_kernels += row.seconds;
        const double by_bytes = row.bytes / bandwidth, by_flops = row.flops / peak_flops;
        const bool flops = by_flops > by_bytes;
        const double rate =
            row.seconds > 0 ? (flops ? 1e-12 * row.flops : 1e-9 * row.bytes) / row.seconds : 0;
        const double of_limit = row.seconds > 0 ? std::max(by_bytes, by_flops) / row.seconds : 0;
        std::snprintf(text, sizeof text, "  %-24s %10.1f %10.3f %6.1f%%", row.kind.c_str(),
                      static_cast<double>(row.calls) / n, 1e3 * row.seconds / n,
                      100 * row.seconds / seconds);
        table += text;
        if (row.bytes > 0 || row.flops > 0) {  // else it waits
            std::snprintf(text, sizeof text, " %8.*f %s %7.1f%%", flops ? 3 : 1, rate,
                          flops ? "TFLOP/s" : "GB/s   ", 100 * of_limit);
            table += text;
        }
        table += '\n';
    }
    std::snprintf(text, sizeof text, "  %-24s %10s %10.3f %6.1f%%\n", "everything else", "",
                  1e3 * (seconds - in_kernels) / n, 100 * (seconds - in_kernels) / seconds);
    table += text;
    std::snprintf(text, sizeof text, "  %-24s %10s %10.3f", "step", "", 1e3 * seconds / n);
    return table + text;
}

}  // namespace train_gpt
