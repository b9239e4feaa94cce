#include "training/report/comparison_notes.h"

#include <set>

#include "base/error.h"
#include "training/report/html_text.h"
#include "training/report/setting_text.h"

namespace train_gpt {

namespace {

/// The keys whose values differ: with the values where the text stays short, as "model.n_layer: 4
/// and 6", else their names.
std::string described_differences(const std::vector<RecordedRun>& runs,
                                  const std::vector<std::string>& keys) {
    constexpr size_t most_characters = 80, most_names = 3;
    std::string text;
    for (const std::string& key : keys) {
        std::vector<std::string> values;
        for (const RecordedRun& run : runs) {
            const std::string value = setting_text(key, run.setting(key));
            values.push_back(value.empty() ? "not recorded" : value);
        }
        text += concat(text.empty() ? "" : "; ", key, ": ", listed(values));
    }
    if (text.size() <= most_characters) return text;
    std::vector<std::string> names = keys;
    if (names.size() > most_names + 1) {
        names.resize(most_names);
        names.push_back(concat(keys.size() - most_names, " more keys"));
    }
    return listed(names);
}

}  // namespace

std::vector<std::string> notes_on_comparison(const std::vector<RecordedRun>& runs) {
    std::vector<std::string> notes;
    if (runs.size() < 2) return notes;
    std::set<std::string> model_keys, tokenizers, data;
    for (const RecordedRun& run : runs) {
        for (const auto& [key, value] : run.config())
            if (key.starts_with("model.") && key != "model.init_from") model_keys.insert(key);
        if (const Json* start = run.last_start())
            tokenizers.insert(to_text(start->value("tokenizer", Json())));
        data.insert(to_text(run.setting("data.val")));
    }
    std::vector<std::string> different;
    for (const std::string& key : model_keys) {
        std::set<std::string> values;
        for (const RecordedRun& run : runs) values.insert(to_text(run.setting(key)));
        if (values.size() > 1) different.push_back(key);
    }
    if (!different.empty())
        notes.push_back("these runs train different models (" +
                        described_differences(runs, different) +
                        "): compare them at equal time or cost rather than at equal steps");
    if (tokenizers.size() > 1)
        notes.push_back(
            "these runs have different tokenizers, so that their losses per token cannot be "
            "compared; bits per byte can");
    if (data.size() > 1)
        notes.push_back(
            "these runs have different validation data (data.val), so that their validation "
            "losses cannot be compared");
    return notes;
}

}  // namespace train_gpt
