#include "training/progress.h"

#include <cmath>
#include <cstdio>

#include <unistd.h>

#include "kernels/memory.h"

namespace train_gpt {

Progress::Progress(const std::string& style, bool speaks)
    : rewrite_(style == "line" || (style == "auto" && ::isatty(STDOUT_FILENO))), speaks_(speaks) {}

std::string format_duration(double seconds) {
    const long long s = seconds > 0 ? std::llround(seconds) : 0;
    char text[48];
    if (s >= 3600)
        std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        std::snprintf(text, sizeof text, "%lld:%02lld", s / 60, s % 60);
    return text;
}

void Progress::report(const StepReport& r) {
    if (!speaks_) return;
    // The first step pays for what is made once; later ones count little by little.
    smoothed_seconds_ = r.step <= 2 || smoothed_seconds_ == 0
                            ? r.seconds
                            : 0.9 * smoothed_seconds_ + 0.1 * r.seconds;
    const double left = static_cast<double>(r.steps - r.step) * smoothed_seconds_;
    char line[320];
    std::snprintf(
        line, sizeof line,
        "step %lld/%lld | loss %.4f | norm %.3f | lr %.2e | %.1f ms | %.0f tok/s | %.3f TFLOP/s "
        "(%.0f%% of "
        "peak) | %s | ETA %s",
        static_cast<long long>(r.step), static_cast<long long>(r.steps), r.loss, r.grad_norm,
        r.learning_rate, 1e3 * r.seconds, r.tokens_per_second, 1e-12 * r.flops_per_second,
        r.peak_flops_per_second > 0 ? 100 * r.flops_per_second / r.peak_flops_per_second : 0.0,
        format_bytes(r.memory).c_str(), format_duration(left).c_str());
    std::string text = line;
    if (r.ranks > 1) {
        std::snprintf(line, sizeof line, " | compute %.0f%%, communication %.0f%%",
                      100 * r.times[StepPhase::compute] / r.times.total(),
                      100 * r.times[StepPhase::communication] / r.times.total());
        text += line;
    }
    if (rewrite_) {
        std::printf("\r\033[K%s", text.c_str());
        line_open_ = true;
    } else {
        std::printf("%s\n", text.c_str());
    }
    std::fflush(stdout);
}

void Progress::say(const std::string& line) {
    if (!speaks_) return;
    end_line();
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
}

void Progress::warn(const std::string& line) {
    if (!speaks_) return;
    end_line();
    std::fprintf(stderr, "warning: %s\n", line.c_str());
}

void Progress::end_line() {
    if (line_open_) std::printf("\n");
    line_open_ = false;
    std::fflush(stdout);
}

}  // namespace train_gpt
