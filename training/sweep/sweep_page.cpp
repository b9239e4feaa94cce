#include "training/sweep/sweep_page.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/formatted.h"
#include "base/version.h"
#include "training/report/html_text.h"
// Made from page.css (Makefile).
#include "training/report/page_files.h"

namespace train_gpt {

namespace {

using Row = SweepSummary::Row;

std::string cell(const std::string& text) { return "<td>" + html(text) + "</td>"; }

std::string head(const std::vector<std::string>& names) {
    std::string text = "<thead><tr>";
    for (const std::string& name : names) text += "<th scope=\"col\">" + html(name) + "</th>";
    return text + "</tr></thead>\n";
}

std::string combinations_html(const SweepSummary& summary) {
    std::vector<std::string> names{"mean", "spread", "seeds"};
    for (const VariedKey& key : summary.keys) names.push_back(key.key);
    names.emplace_back("runs");
    std::string text = "<div class=\"wide\"><table>" + head(names) + "<tbody>";
    for (const Row& row : summary.rows) {
        text += "<tr>" + cell(loss_text(row.mean)) + cell(loss_text(row.spread)) +
                cell(row.complete() ? concat(row.seeds) : concat(row.finished, " of ", row.seeds));
        for (const std::string& value : summary.combinations[row.combination].values)
            text += cell(plain_value(value));
        text += "<td>";
        for (const SweptRun& run : summary.runs) {
            if (run.combination != row.combination) continue;
            const std::string what = run.state == SweptRun::State::finished
                                         ? loss_text(run.loss)
                                         : std::string(word_of(run.state));
            text += concat("<a href=\"", html(run.name), "/report.html\">seed ", run.seed, ": ",
                           html(what), "</a><br>");
        }
        text += "</td></tr>\n";
    }
    return text + "</tbody></table></div>\n";
}

/// A plot of the best mean loss with each value of a key; empty if fewer than two are known. The
/// axis of values is logarithmic if all are above 0.
std::string plot_html(const SweepSummary& summary, size_t k) {
    const VariedKey& key = summary.keys[k];
    const SweepSummary::Key& result = summary.key_results[k];
    if (!key.is_number) return "";
    const bool logarithmic = std::stod(key.values.front()) > 0;
    struct Point {
        double at, mean, spread;
        std::string label;
    };
    std::vector<Point> points;
    for (size_t v = 0; v < key.values.size(); ++v) {
        if (!result.best_with[v]) continue;
        const Row& row = summary.rows[*result.best_with[v]];
        const double value = std::stod(key.values[v]);
        points.push_back({logarithmic ? std::log(value) : value, row.mean,
                          std::isfinite(row.spread) ? row.spread : 0, key.values[v]});
    }
    if (points.size() < 2) return "";
    constexpr double left = 70, right = 20, top = 16, bottom = 40, width = 640, height = 280;
    double low = std::numeric_limits<double>::infinity(), high = -low;
    for (const Point& p : points)
        low = std::min(low, p.mean - p.spread), high = std::max(high, p.mean + p.spread);
    const double extent = high > low ? high - low : 1, first = points.front().at,
                 length = points.back().at - first;
    const auto x = [&](double at) { return left + (width - left - right) * (at - first) / length; };
    const auto y = [&](double mean) {
        return top + (height - top - bottom) * (high - mean) / extent;
    };
    std::string line, marks;
    for (const Point& p : points) {
        line += formatted("%.1f,%.1f ", x(p.at), y(p.mean));
        marks += formatted("<path stroke=\"var(--c0)\" d=\"M%.1f %.1fV%.1f\"/>", x(p.at),
                           y(p.mean - p.spread), y(p.mean + p.spread));
        marks += formatted("<circle fill=\"var(--c0)\" r=\"4\" cx=\"%.1f\" cy=\"%.1f\"/>", x(p.at),
                           y(p.mean));
        marks += formatted("<text text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">", x(p.at),
                           height - bottom + 22) +
                 html(p.label) + "</text>";
    }
    for (const double mean : {low, high})
        marks += formatted("<text text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">%.4f</text>", left - 10,
                           y(mean) + 4, mean);
    return concat("<div class=\"chart\"><svg viewBox=\"0 0 ", width, " ", height,
                  "\" style=\"max-width:", width, "px\" role=\"img\"><title>",
                  html(name_of(summary.measure)), " by ", html(key.key),
                  "</title><polyline fill=\"none\" stroke=\"var(--c0)\" points=\"", line, "\"/>",
                  marks, "</svg></div>\n");
}

std::string key_html(const SweepSummary& summary, size_t k) {
    const VariedKey& key = summary.keys[k];
    const SweepSummary::Key& result = summary.key_results[k];
    const std::string edge = describe_edge(summary, k);
    std::string text = concat("<section><h2>", html(key.key),
                              "</h2>\n<p class=\"good\">Each value with its best of the other keys",
                              edge.empty() ? "" : "; ", html(edge), "</p>\n", plot_html(summary, k),
                              "<div class=\"wide\"><table>",
                              head({"value", "mean", "spread", "to the best", "with"}), "<tbody>");
    for (size_t v = 0; v < key.values.size(); ++v) {
        const Row* row = result.best_with[v] ? &summary.rows[*result.best_with[v]] : nullptr;
        text += "<tr>" + cell(plain_value(key.values[v])) + cell(loss_text(row ? row->mean : NAN)) +
                cell(loss_text(row ? row->spread : NAN)) +
                cell(!row               ? "–"
                     : v == result.best ? "best"
                                        : formatted("%+.4f", row->mean - summary.rows[0].mean)) +
                cell(row ? describe(summary.keys, summary.combinations[row->combination].values)
                         : "–") +
                "</tr>\n";
    }
    return text + "</tbody></table></div></section>\n";
}

std::string failures_html(const SweepSummary& summary) {
    std::string text;
    for (const SweptRun& run : summary.runs)
        if (run.state == SweptRun::State::failed)
            text += "<li>" + html(concat(run.name, " failed: ", run.reason)) + "</li>\n";
    return text.empty() ? "" : "<ul class=\"notes\">" + text + "</ul>\n";
}

}  // namespace

std::string sweep_page(const SweepSummary& summary, const std::string& title) {
    std::string text = concat(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
        "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
        html(title), " · train_gpt</title>\n<style>\n", page_css,
        "</style>\n</head>\n<body>\n<main>\n<header>\n<p class=\"kind\">Sweep</p>\n<h1>",
        html(title), "</h1>\n<p class=\"lead\">",
        summary.best()
            ? html(concat(
                  "The lowest ", name_of(summary.measure), ", ", loss_text(summary.best()->mean),
                  ", is that of ",
                  describe(summary.keys, summary.combinations[summary.best()->combination].values),
                  "."))
            : "No combination has finished with all its seeds.",
        "</p>\n</header>\n", failures_html(summary),
        "<section><h2>Combinations</h2>\n<p class=\"good\">", html(name_of(summary.measure)),
        ": mean and spread (standard deviation) over seeds; lower is better</p>\n",
        combinations_html(summary), "</section>\n");
    for (size_t k = 0; k < summary.keys.size(); ++k)
        if (summary.keys[k].values.size() > 1) text += key_html(summary, k);
    return text + concat("<footer>Written by train_gpt ", html(version()), ", ",
                         utc_time(std::time(nullptr)), ".</footer>\n</main>\n</body>\n</html>\n");
}

}  // namespace train_gpt
