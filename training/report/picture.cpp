#include "training/report/picture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "base/formatted.h"
#include "training/report/html_text.h"
#include "training/report/page_data.h"

namespace train_gpt {

namespace {

constexpr double width = 960, height = 600, left = 64, right = 24, top = 72, bottom = 56;

struct Range {
    double low = INFINITY, high = -INFINITY;

    void include(double value) {
        low = std::min(low, value);
        high = std::max(high, value);
    }
    /// 1, 2 or 5 times a power of ten, so that about n of them cover the range.
    double tick(int n) const {
        const double step = (high - low) / n, power = std::pow(10, std::floor(std::log10(step)));
        for (const double factor : {1.0, 2.0, 5.0})
            if (factor * power >= step) return factor * power;
        return 10 * power;
    }
};

/// The plot's area: from values to pixels.
struct Plot {
    Range x, y;

    double across(double value) const {
        return left + (value - x.low) / (x.high - x.low) * (width - left - right);
    }
    double up(double value) const {
        return height - bottom - (value - y.low) / (y.high - y.low) * (height - top - bottom);
    }
    std::string path(const Curve& curve) const {
        std::string text;
        for (size_t i = 0; i < curve.size(); ++i)
            text +=
                formatted("%s%.1f %.1f", i == 0 ? "M" : "L", across(curve.x[i]), up(curve.y[i]));
        return text;
    }
};

std::string label(double x, double y, const char* anchor, const std::string& text) {
    return formatted("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor) + html(text) +
           "</text>\n";
}

std::string axes(const Plot& plot) {
    std::string text;
    const double across = plot.x.tick(8), up = plot.y.tick(7);
    for (double y = std::ceil(plot.y.low / up) * up; y <= plot.y.high; y += up)
        text += formatted("<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>", left, plot.up(y),
                          width - right) +
                label(left - 8, plot.up(y) + 5, "end", formatted("%.10g", y));
    for (double x = std::ceil(plot.x.low / across) * across; x <= plot.x.high; x += across)
        text += label(plot.across(x), height - bottom + 22, "middle", formatted("%.10g", x));
    return text +
           formatted("<path class=\"axis\" d=\"M%.1f %.1fH%.1f\"/>", left, height - bottom,
                     width - right) +
           label((left + width - right) / 2, height - 12, "middle", "step") +
           label(left - 48, top - 14, "start", "nats per token");
}

/// The highest value to show: single losses of 10^7, say, would flatten all others. Where the
/// highest is 20 times as far above the lowest as 98 of 100 losses are, it is left out.
double highest_shown(const Range& all, double usual) {
    const double low = all.low, high = all.high;
    return usual > low && high - low > 20 * (usual - low) ? usual + 0.5 * (usual - low) : high;
}

struct LossCurves {
    Curve loss, mean, validation;
};

LossCurves loss_curves(const RecordedRun& run, int pixels) {
    LossCurves curves;
    for (auto& [name, curve] : curves_of(run, pixels))
        if (name == "loss")
            curves.loss = std::move(curve);
        else if (name == "loss_mean")
            curves.mean = std::move(curve);
        else if (name == "val_loss")
            curves.validation = std::move(curve);
    return curves;
}

std::string drawn(const Plot& plot, const LossCurves& curves, const char* colour, bool several) {
    const char* dots = several ? colour : run_colours[1];
    std::string text =
        formatted("<g stroke=\"%s\">\n<path class=\"loss\" d=\"", colour) + plot.path(curves.loss) +
        "\"/>\n<path class=\"mean\" d=\"" + plot.path(curves.mean) + "\"/></g>\n" +
        formatted("<g stroke=\"%s\" fill=\"%s\">\n<path class=\"val\" d=\"", dots, dots) +
        plot.path(curves.validation) + "\"/>\n";
    for (size_t i = 0; i < curves.validation.size(); ++i)
        text += formatted("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\"/>",
                          plot.across(curves.validation.x[i]), plot.up(curves.validation.y[i]));
    return text + "</g>\n";
}

/// Names of the curves, or of the runs, in the upper right corner.
std::string legend(const std::vector<RecordedRun>& runs) {
    std::vector<std::pair<std::string, const char*>> entries;
    if (runs.size() == 1) {
        entries = {{"training loss and its running mean", run_colours[0]}};
        if (runs[0].evaluations().rows() > 0)
            entries.emplace_back("validation loss", run_colours[1]);
    }
    for (size_t r = 0; r < runs.size() && runs.size() > 1; ++r)
        entries.emplace_back(runs[r].name(), run_colours[r]);
    std::string text;
    double y = top + 22;
    for (const auto& [name, colour] : entries) {
        text += formatted("<path d=\"M%.1f %.1fh28\" stroke=\"%s\" stroke-width=\"3\"/>",
                          width - right - 40, y - 5, colour) +
                label(width - right - 50, y, "end", name);
        y += 22;
    }
    return text;
}

}  // namespace

std::string loss_picture(const std::vector<RecordedRun>& runs, int pixels) {
    std::vector<LossCurves> curves;
    double usual = -INFINITY;
    Plot plot;
    for (const RecordedRun& run : runs) {
        curves.push_back(loss_curves(run, pixels));
        for (const Curve* curve : {&curves.back().loss, &curves.back().validation}) {
            for (const double x : curve->x) plot.x.include(x);
            for (const double y : curve->y) plot.y.include(y);
        }
        usual = std::fmax(usual, usual_loss(run.training(), "loss"));
        usual = std::fmax(usual, usual_loss(run.evaluations(), "val_loss"));
    }
    if (plot.x.low > plot.x.high) plot.x = plot.y = {0, 1};  // no loss was finite
    const double highest = plot.y.high;
    plot.y.high = highest_shown(plot.y, usual);
    const bool cut = plot.y.high < highest;
    plot.x.low = std::min(plot.x.low, 0.0);
    plot.x.high = std::max(plot.x.high, plot.x.low + 1);
    // A range that is 0, or nearly 0, becomes one that can be divided.
    const double margin =
        std::max(0.04 * (plot.y.high - plot.y.low), 1e-3 * std::max(1.0, std::abs(plot.y.high)));
    plot.y = {plot.y.low - margin, plot.y.high + margin};

    const std::string title =
        runs.size() == 1 ? "Loss of " + runs[0].name() : concat("Loss of ", runs.size(), " runs");
    std::string text = formatted(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
        "height=\"%.0f\" font-family=\"DejaVu Sans, sans-serif\" font-size=\"14\" "
        "fill=\"#333\">\n",
        width, height, width, height);
    text +=
        "<style>.grid{stroke:#e4e4e4;fill:none}.axis{stroke:#888;fill:none}"
        ".loss{stroke-width:1;stroke-opacity:.3;fill:none;stroke-linejoin:round}"
        ".mean{stroke-width:2.2;fill:none;stroke-linejoin:round}"
        ".val{stroke-width:1.6;fill:none}</style>\n"
        "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
    text += formatted("<g font-size=\"18\" font-weight=\"bold\">") +
            label(left - 48, 26, "start", title) + "</g>\n" + axes(plot);
    if (cut)
        text += label(left + 80, top - 14, "start",
                      formatted("; some are higher, up to %.3g", highest));
    text += formatted(
        "<clipPath id=\"area\"><rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\"/>"
        "</clipPath>\n<g clip-path=\"url(#area)\">\n",
        left - 6, top - 6, width - left - right + 12, height - top - bottom + 12);
    for (size_t r = 0; r < runs.size(); ++r)
        text += drawn(plot, curves[r], run_colours[r % most_runs], runs.size() > 1);
    return text + "</g>\n" + legend(runs) + "</svg>\n";
}

}  // namespace train_gpt
