#include "training/watch/router_figures.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace train_gpt {

namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// −Σ x·log x of shares x of a sum; NaN if the sum is 0.
double entropy_of(std::span<const int32_t> parts) {
    double sum = 0, entropy = 0;
    for (const int32_t part : parts) sum += part;
    if (sum == 0) return nan;
    for (const int32_t part : parts)
        if (part > 0) entropy -= part / sum * std::log(part / sum);
    return entropy;
}

/// Short enough that a line with a number for each layer can be read.
double rounded(double value) { return std::round(1e4 * value) / 1e4; }

}  // namespace

std::vector<RouterFigures> router_figures(const RouterReport& report) {
    std::vector<RouterFigures> all;
    const auto E = static_cast<size_t>(report.n_expert);
    for (size_t first = 0; first < report.chosen.size(); first += E) {
        const std::span chosen = std::span(report.chosen).subspan(first, E);
        const auto most = std::ranges::max_element(chosen);
        double total = 0;
        for (const int32_t n : chosen) total += n;
        RouterFigures& of = all.emplace_back();
        of.busiest = static_cast<int>(most - chosen.begin());
        of.load = total > 0 ? *most * static_cast<double>(E) / total : nan;
        of.idle = static_cast<int>(std::ranges::count(chosen, 0));
        of.effective = std::exp(entropy_of(chosen));
        of.entropy = entropy_of(std::span(report.mass).subspan(first, E));
        of.dropped = report.dropped.empty() || total == 0 ? nan : report.dropped[first / E] / total;
        of.bias_range = nan;
        if (report.biases.empty()) continue;
        const auto [low, high] = std::ranges::minmax(std::span(report.biases).subspan(first, E));
        of.bias_range = double{high} - double{low};
    }
    return all;
}

MetricsRecord::Fields router_fields(const RouterReport& report, const std::vector<int>& layers,
                                    int n_layer) {
    const std::vector<RouterFigures> routers = router_figures(report);
    if (routers.empty()) return {};
    const auto by_layer = [&](auto figure) {
        std::vector<double> list(static_cast<size_t>(n_layer), nan);
        for (size_t r = 0; r < routers.size(); ++r)
            list[static_cast<size_t>(layers[r])] = rounded(figure(routers[r]));
        return list;
    };
    double load = 0;
    int64_t idle = 0;
    for (const RouterFigures& of : routers) {
        load = std::max(load, of.load);
        idle += of.idle;
    }
    MetricsRecord::Fields fields{
        {"router_load", load},
        {"router_idle", idle},
        {"router_load/layers", by_layer([](const RouterFigures& of) { return of.load; })},
        {"router_idle/layers", by_layer([](const RouterFigures& of) { return of.idle; })},
        {"router_entropy/layers", by_layer([](const RouterFigures& of) { return of.entropy; })}};
    if (!report.biases.empty())
        fields.emplace_back("router_bias_range/layers",
                            by_layer([](const RouterFigures& of) { return of.bias_range; }));
    if (!report.dropped.empty())
        fields.emplace_back("router_dropped/layers",
                            by_layer([](const RouterFigures& of) { return of.dropped; }));
    return fields;
}

}  // namespace train_gpt
