#include "training/report/router_picture.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

namespace train_gpt {

namespace {

std::optional<RouterSnapshot> snapshot_of(const Json& line) {
    const Json load = line.value("load", Json());
    if (!load.is_array()) return {};
    RouterSnapshot snapshot;
    snapshot.step = line["step"].get<int64_t>();
    for (size_t layer = 0; layer < load.size(); ++layer) {
        if (load[layer].is_null()) continue;
        if (!load[layer].is_array()) return {};
        snapshot.layers.push_back(static_cast<int>(layer));
        std::vector<double>& loads = snapshot.loads.emplace_back();
        for (const Json& of_expert : load[layer]) {
            if (!of_expert.is_number()) return {};
            loads.push_back(of_expert.get<double>());
        }
        if (loads.size() != snapshot.loads[0].size()) return {};
    }
    if (snapshot.experts() == 0) return {};
    return snapshot;
}

}  // namespace

void add_snapshot(std::vector<RouterSnapshot>& snapshots, const Json& line) {
    std::optional<RouterSnapshot> added = snapshot_of(line);
    if (!added) return;
    std::erase_if(snapshots, [&](const RouterSnapshot& other) {
        return other.step >= added->step || other.layers != added->layers ||
               other.experts() != added->experts();
    });
    snapshots.push_back(std::move(*added));
}

char load_letter(double thousandths) {
    constexpr std::string_view letters =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    if (!(thousandths > 0)) return letters[0];
    const double level = std::round(32 + 6 * std::log2(thousandths / 1000));
    return letters[static_cast<size_t>(std::clamp(level, 1.0, 63.0))];
}

std::string routers_json(const std::vector<RouterSnapshot>& snapshots, size_t most_letters) {
    if (snapshots.empty()) return "null";
    const RouterSnapshot& last = snapshots.back();
    const size_t letters = last.layers.size() * static_cast<size_t>(last.experts());
    const size_t n = snapshots.size(), shown = std::clamp<size_t>(most_letters / letters, 1, n);
    Json json{{"layers", last.layers},
              {"experts", last.experts()},
              {"steps", Json::array()},
              {"load", Json::array()}};
    for (size_t i = 0; i < shown; ++i) {
        const RouterSnapshot& of = snapshots[shown == 1 ? n - 1 : i * (n - 1) / (shown - 1)];
        std::string text;
        for (const std::vector<double>& loads : of.loads)
            for (const double load : loads) text += load_letter(load);
        json["steps"].push_back(of.step);
        json["load"].push_back(text);
    }
    return to_text(json);
}

}  // namespace train_gpt
