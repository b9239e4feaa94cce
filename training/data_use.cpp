#include "training/data_use.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/formatted.h"

namespace train_gpt {

std::optional<DataUse> data_use_if_readable(const Config& config, int64_t vocab_size) try {
    std::vector<TrainSource> sources;
    for (const auto& [glob, weight, name] : config.data.train)
        sources.push_back(
            {std::make_shared<TokenShards>(glob, static_cast<uint32_t>(vocab_size)), weight});
    return DataUse(config, sources);
} catch (const Error&) {
    return {};
}

std::string describe_passes(double passes) {
    return formatted("%.3g", passes) + (passes == 1 ? " pass" : " passes");
}

DataUse::DataUse(const Config& config, const std::vector<TrainSource>& sources)
    : sources_(config.data.train), order_{.seed = config.seed, .T = config.sequence_length()} {
    for (const TrainSource& source : sources) {
        const int64_t tokens = count_windows(*source.shards, order_.T) * order_.T;
        epoch_tokens_ += tokens;
        epochs_.push_back(source.shards->synthetic() ? 0 : tokens);
        order_.sources.push_back({source.shards->fingerprint(), source.weight});
    }
}

std::vector<SourceUse> DataUse::after(const DataOrder& order, int64_t tokens) const {
    std::vector<int64_t> given = order.tokens_of_sources(tokens);
    for (size_t s = 0; s < given.size(); ++s) {
        const auto before = order.tokens_before.find(order.sources[s].content);
        if (before != order.tokens_before.end()) given[s] += before->second;
    }
    std::vector<SourceUse> use;
    for (size_t s = 0; s < given.size(); ++s)
        use.push_back({.name = sources_[s].name,
                       .tokens = given[s],
                       .passes = epochs_[s] > 0 ? static_cast<double>(given[s]) /
                                                      static_cast<double>(epochs_[s])
                                                : std::numeric_limits<double>::quiet_NaN()});
    return use;
}

std::string describe_use(const std::vector<SourceUse>& planned) {
    std::string text = "training data, as far as the schedule goes: ";
    if (planned.size() == 1) {
        if (std::isnan(planned[0].passes)) return "";
        text += describe_passes(planned[0].passes) + " over " + planned[0].name;
    } else {
        text.pop_back();
        double all = 0;
        for (const SourceUse& source : planned) all += static_cast<double>(source.tokens);
        all = std::max(all, 1.0);
        for (const SourceUse& source : planned) {
            const auto tokens = static_cast<double>(source.tokens);
            text += formatted("\n  %5.1f %%, %.4g tokens", 100 * tokens / all, tokens);
            text += std::isnan(source.passes) ? " of "
                                              : ", " + describe_passes(source.passes) + " over ";
            text += source.name;
        }
    }
    const std::string note = note_on_repetition(planned);
    return text + (note.empty() ? "" : "\nnote: " + note);
}

std::string note_on_repetition(const std::vector<SourceUse>& planned) {
    std::string often;
    for (const SourceUse& source : planned)
        if (source.passes > good_passes)
            often += concat(often.empty() ? "" : ", ", source.name,
                            formatted(" %.3g times", source.passes));
    if (often.empty()) return "";
    return concat("the schedule reads ", often, "; up to ", good_passes,
                  " passes are nearly as good as new text, further ones help less and less "
                  "(Muennighoff et al. 2023, arXiv 2305.16264)");
}

Json passes_json(const std::vector<SourceUse>& planned) {
    Json json = Json::object();
    for (const SourceUse& source : planned)
        if (!std::isnan(source.passes)) json[source.name] = source.passes;
    return json;
}

std::vector<SourceUse> passes_of(const Json& json) {
    std::vector<SourceUse> use;
    if (json.is_object())
        for (const auto& [name, passes] : json.items())
            if (passes.is_number()) use.push_back({.name = name, .passes = passes.get<double>()});
    return use;
}

}  // namespace train_gpt
