#include "training/watch/collapse_watch.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/formatted.h"

namespace train_gpt {

namespace {

std::string advice_of(const Config& config) {
    const Config::Router& router = config.router;
    std::string text = router.balance == Balance::none
                           ? "try router.balance=loss or router.balance=bias"
                           : concat("try a larger router.balance_rate than ", balance_rate(config));
    if (router.z_loss == 0) text += ", or router.z_loss=0.001";
    return text;
}

}  // namespace

CollapseWatch::CollapseWatch(std::vector<int> layers, int experts_per_token, const Config& config)
    : layers_(std::move(layers)),
      k_(experts_per_token),
      advice_(advice_of(config)),
      states_(layers_.size()) {}

std::string CollapseWatch::add(int64_t step, const RouterReport& report) {
    const int E = report.n_expert;
    const std::vector<RouterFigures> figures = router_figures(report);
    const double middle = (k_ + E) / 2.0;
    std::vector<std::string> collapsed;
    if (k_ >= E) return "";
    for (size_t r = 0; r < figures.size(); ++r) {
        const auto first = report.chosen.begin() + static_cast<int64_t>(r) * E;
        int64_t total = 0;
        std::for_each(first, first + E, [&](int32_t n) { total += n; });
        if (total < least_mean_load * E) continue;
        OfLayer& state = states_[r];
        const RouterFigures& of = figures[r];
        state.in_a_row = (of.effective < middle) != state.collapsed ? state.in_a_row + 1 : 0;
        if (state.in_a_row < steps) continue;
        state = {.collapsed = !state.collapsed};
        if (state.collapsed)
            collapsed.push_back(concat("layer ", layers_[r], " uses ",
                                       formatted("%.1f", of.effective), " of ", E, " (expert ",
                                       of.busiest, " has ", formatted("%.0f%%", 100 * of.load / E),
                                       " of the choices; idle experts: ", of.idle, ")"));
    }
    if (collapsed.empty()) return "";
    constexpr size_t most = 4;
    std::string text =
        concat("experts have collapsed: up to step ", step, ", for ", steps, " steps, fewer than ",
               formatted("%.3g", middle), " of ", E, " were in effective use: ");
    for (size_t i = 0; i < std::min(most, collapsed.size()); ++i)
        text += (i > 0 ? ", " : "") + collapsed[i];
    if (collapsed.size() > most) text += concat(" and ", collapsed.size() - most, " more layers");
    return concat(text, "; ", advice_);
}

}  // namespace train_gpt
