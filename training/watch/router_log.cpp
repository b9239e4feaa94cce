#include "training/watch/router_log.h"

#include <algorithm>
#include <utility>

#include "base/json_text.h"
#include "training/watch/step_lines.h"

namespace train_gpt {

RouterLog::RouterLog(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step,
                     Options options)
    : options_(std::move(options)),
      every_(std::max<int64_t>(1, (options_.steps + snapshots - 1) / snapshots)) {
    if (!options_.writes) return;
    keep_step_lines(run_dir / routers_log_file, resume_step);
    if (!options_.layers.empty()) file_.emplace(run_dir / routers_log_file);
}

void RouterLog::add(int64_t step, const RouterReport& report) {
    if (!file_ || (step != 1 && step != options_.steps && step % every_ != 0)) return;
    Json load(static_cast<size_t>(options_.n_layer), Json());
    const int64_t E = report.n_expert;
    for (int64_t r = 0; r < report.routers(); ++r) {
        const auto first = report.chosen.begin() + r * E;
        int64_t total = 0;
        std::for_each(first, first + E, [&](int32_t n) { total += n; });
        Json& of_layer = load[static_cast<size_t>(options_.layers[static_cast<size_t>(r)])];
        of_layer = Json::array();
        std::for_each(first, first + E, [&](int32_t n) {
            of_layer.push_back(total > 0 ? (1000 * E * n + total / 2) / total : 0);
        });
    }
    file_->append(to_text(Json{{"step", step}, {"load", load}}) + '\n',
                  "the loads of experts are lost");
}

}  // namespace train_gpt
