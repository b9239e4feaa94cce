#include "training/config/nearest_key.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "training/config/config_keys.h"

namespace train_gpt {

namespace {

/// Insertions, deletions, substitutions and swaps of neighbours that turn a into b (optimal string
/// alignment).
size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        before = std::exchange(above, row);
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            row[j] =
                std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], before[j - 2] + 1);
        }
    }
    return row[b.size()];
}

/// 0 for equal words, 1 for words that share nothing.
double unlikeness(std::string_view a, std::string_view b) {
    const size_t longer = std::max(a.size(), b.size());
    return longer == 0 ? 0 : static_cast<double>(edit_distance(a, b)) / static_cast<double>(longer);
}

/// Whether one word may be a typing mistake for the other.
constexpr double most_unlike = 0.4;

/// Other programs' names for some keys, without sections.
const std::map<std::string_view, const char*>& other_names() {
    static const std::map<std::string_view, const char*> names = {
        {"lr", "optimizer.learning_rate"},
        {"max_lr", "optimizer.learning_rate"},
        {"min_lr", "schedule.final_fraction"},
        {"eps", "optimizer.epsilon"},
        {"max_grad_norm", "optimizer.grad_clip"},
        {"clip_grad", "optimizer.grad_clip"},
        {"batch_size", "batch.tokens_per_step"},
        {"total_batch_size", "batch.tokens_per_step"},
        {"global_batch_size", "batch.tokens_per_step"},
        {"gradient_accumulation_steps", "batch.tokens_per_step"},
        {"device_batch_size", "batch.micro_batch"},
        {"micro_batch_size", "batch.micro_batch"},
        {"block_size", "batch.sequence_length"},
        {"seq_len", "batch.sequence_length"},
        {"seq_length", "batch.sequence_length"},
        {"max_iters", "schedule.steps"},
        {"max_steps", "schedule.steps"},
        {"train_iters", "schedule.steps"},
        {"num_iterations", "schedule.steps"},
        {"warmup_iters", "schedule.warmup_steps"},
        {"eval_interval", "evaluation.every"},
        {"save_interval", "checkpoint.every"},
        {"hidden_size", "model.n_embd"},
        {"d_model", "model.n_embd"},
        {"num_layers", "model.n_layer"},
        {"depth", "model.n_layer"},
        {"num_heads", "model.n_head"},
        {"out_dir", "run_dir"},
        {"output_dir", "run_dir"}};
    return names;
}

}  // namespace

std::string key_called(std::string_view name) {
    if (const auto known = other_names().find(name); known != other_names().end())
        return known->second;
    std::string called;
    for (const ConfigKey& key : config_keys()) {
        if (name_of_key(key.path) != name) continue;
        if (!called.empty()) return "";
        called = key.path;
    }
    return called;
}

std::string nearest_key(const std::string& path) {
    if (const auto known = other_names().find(name_of_key(path)); known != other_names().end())
        return known->second;
    // The name matters more than the section: the right name in the wrong section, or without one,
    // is near.
    std::string nearest;
    double least = infinity;
    for (const ConfigKey& key : config_keys()) {
        const double name = unlikeness(name_of_key(path), name_of_key(key.path));
        const double section = path.find('.') == std::string::npos
                                   ? 0
                                   : unlikeness(section_of_key(path), section_of_key(key.path));
        if (name > most_unlike || name + 0.5 * section >= least) continue;
        least = name + 0.5 * section;
        nearest = key.path;
    }
    return nearest;
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& names) {
    const auto nearest = std::min_element(
        names.begin(), names.end(),
        [&](const auto& a, const auto& b) { return unlikeness(name, a) < unlikeness(name, b); });
    return nearest != names.end() && unlikeness(name, *nearest) <= most_unlike ? *nearest : "";
}

std::string nearest_section(const std::string& name) {
    const std::vector<std::string_view> sections = config_sections();
    const auto begins = [&](std::string_view section) {
        return name.size() >= 3 && section.starts_with(name);
    };
    if (std::ranges::count_if(sections, begins) == 1)
        return std::string(*std::ranges::find_if(sections, begins));
    return nearest_name(name, {sections.begin(), sections.end()});
}

}  // namespace train_gpt
