#include "training/watch/loss_watch.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

#include "base/json_text.h"
#include "training/files/checkpoint.h"
#include "training/watch/metrics.h"

namespace train_gpt {

LossWatch::LossWatch(int64_t vocab_size) : first_loss_(std::log(static_cast<double>(vocab_size))) {}

bool LossWatch::is_sane(double loss) const {
    const double best = std::min(best_, loss);
    return std::isfinite(loss) &&
           loss <= best + std::max((first_loss_ - best) / 2, std::abs(best) / 10);
}

/// Judges the checkpoints before a step by the last loss.
bool LossWatch::judge(int64_t before_step) {
    const std::optional<int64_t> known = sane_;
    for (const int64_t checkpoint : waiting_)
        if (checkpoint < before_step && is_sane(last_loss_))
            sane_before_ = std::exchange(sane_, checkpoint);
    std::erase_if(waiting_, [&](int64_t checkpoint) { return checkpoint < before_step; });
    return sane_ != known;
}

bool LossWatch::add(int64_t step, double loss) {
    last_loss_ = loss;
    if (step == 1 && std::isfinite(loss)) first_loss_ = std::max(first_loss_, loss);
    const bool found = judge(step);
    if (std::isfinite(loss)) best_ = std::min(best_, loss);
    return found;
}

void LossWatch::not_saved(int64_t step) {
    std::erase(waiting_, step);
    if (sane_ == step) sane_ = sane_before_;
}

void LossWatch::end() { judge(std::numeric_limits<int64_t>::max()); }

void LossWatch::replay(const std::filesystem::path& run_dir, int64_t step) {
    std::vector<int64_t> checkpoints;
    for (const auto& path : list_checkpoints(run_dir))
        checkpoints.insert(checkpoints.begin(), checkpoint_step(path));
    read_metrics(run_dir, [&](const MetricsRecord& record) {
        for (; !checkpoints.empty() && checkpoints.front() < record.step;
             checkpoints.erase(checkpoints.begin()))
            saved(checkpoints.front());
        for (const auto& [name, value] : record.fields) {
            if (name != "loss" || record.step > step) continue;
            if (const auto* whole = std::get_if<int64_t>(&value))
                add(record.step, static_cast<double>(*whole));
            else if (const auto* loss = std::get_if<double>(&value))
                add(record.step, *loss);
        }
    });
    waiting_.assign(1, step);
}

std::string LossWatch::to_text() const {
    const double best = std::isfinite(best_) ? best_ : first_loss_;
    return train_gpt::to_text(
        {{"first", first_loss_}, {"best", best}, {"sane", sane_.value_or(-1)}, {"at", waiting_}});
}

void LossWatch::read_text(const std::string& text) {
    const Json json = parse_json(text);
    first_loss_ = json["first"].get<double>();
    best_ = json["best"].get<double>();
    waiting_ = json["at"].get<std::vector<int64_t>>();
    if (const int64_t sane = json["sane"].get<int64_t>(); sane >= 0) sane_ = sane;
}

}  // namespace train_gpt
