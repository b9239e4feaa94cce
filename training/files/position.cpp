#include "training/files/position.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/file.h"
#include "base/json_file.h"
#include "dataloader/mixture.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* position_name = "position.json";
constexpr int64_t most_per_step = int64_t{1} << 32;  // the limit of batch.tokens_per_step

}  // namespace

int64_t TokenCount::before(int64_t step) const {
    const auto after = std::ranges::upper_bound(parts_, step, {}, &Part::first_step);
    const Part& part = *std::prev(after);
    return part.first_token + (step - part.first_step) * part.per_step;
}

void TokenCount::change(int64_t step, int64_t per_step) {
    const int64_t tokens = before(step);
    while (!parts_.empty() && parts_.back().first_step >= step) parts_.pop_back();
    if (parts_.empty() || parts_.back().per_step != per_step)
        parts_.push_back({step, tokens, per_step});
}

bool DataOrder::has_sources_of(const DataOrder& other) const {
    const auto all = [](const std::vector<Source>& sources) {
        double sum = 0;
        for (const Source& source : sources) sum += source.weight;
        return sum;
    };
    const double mine = all(sources), theirs = all(other.sources);
    return std::ranges::equal(sources, other.sources, [&](const Source& a, const Source& b) {
        return a.content == b.content && std::abs(a.weight / mine - b.weight / theirs) < 1e-9;
    });
}

std::vector<int64_t> DataOrder::tokens_of_sources(int64_t tokens) const {
    std::vector<double> weights;
    for (const Source& source : sources) weights.push_back(source.weight);
    std::vector<int64_t> given =
        Mixture(key(), weights).counts_before(sample_after(std::max(tokens, first_token)));
    for (int64_t& n : given) n *= T;
    return given;
}

void write_position(const fs::path& checkpoint, const RunPosition& position) {
    const DataOrder& order = position.order;
    const int64_t tokens = position.tokens.before(position.step);
    Json steps = Json::array(), sources = Json::array();
    for (const DataOrder::Source& source : order.sources)
        sources.push_back({{"content", source.content}, {"weight", source.weight}});
    // Later steps follow from the configuration of the run that resumes.
    for (const TokenCount::Part& part : position.tokens.parts())
        if (part.first_step <= position.step)
            steps.push_back({{"first_step", part.first_step}, {"tokens_per_step", part.per_step}});
    write_file(checkpoint / position_name, to_text({{"tokens", tokens},
                                                    {"samples", order.sample_after(tokens)},
                                                    {"steps", steps},
                                                    {"order",
                                                     {{"seed", order.seed},
                                                      {"sequence_length", order.T},
                                                      {"sources", sources},
                                                      {"first_token", order.first_token},
                                                      {"tokens_before", order.tokens_before}}}},
                                                   2) +
                                               "\n");
}

RunPosition read_position(const fs::path& checkpoint, int64_t step, const Config& config) {
    const fs::path path = checkpoint / position_name;
    RunPosition position{.step = step,
                         .tokens = TokenCount(config.batch.tokens_per_step),
                         .order = {.seed = config.seed, .T = config.sequence_length()}};
    if (!fs::exists(path)) return position;
    const Json json = read_json(path);
    const auto require = [&](bool holds) {
        if (!holds)
            throw Error(path.string(),
                        " contradicts itself: the checkpoint is damaged; restore it "
                        "from a copy or use another one");
    };
    for (const Json& steps : field<std::vector<Json>>(json, "steps", path)) {
        const auto first = field<int64_t>(steps, "first_step", path);
        const auto per_step = field<int64_t>(steps, "tokens_per_step", path);
        require(first >= 0 && first <= step && per_step > 0 && per_step <= most_per_step);
        position.tokens.change(first, per_step);
    }
    const Json order = field<Json>(json, "order", path);
    position.order = {
        .seed = field<uint64_t>(order, "seed", path),
        .T = field<int>(order, "sequence_length", path),
        .first_token = field<int64_t>(order, "first_token", path),
        .tokens_before = field<std::map<std::string, int64_t>>(order, "tokens_before", path)};
    for (const Json& source : field<std::vector<Json>>(order, "sources", path))
        position.order.sources.push_back({.content = field<std::string>(source, "content", path),
                                          .weight = field<double>(source, "weight", path)});
    const int64_t tokens = position.tokens.before(step);
    require(tokens == field<int64_t>(json, "tokens", path));
    require(position.order.T > 0 && position.order.first_token >= 0 &&
            position.order.first_token <= tokens &&
            position.order.sample_after(tokens) == field<int64_t>(json, "samples", path));
    return position;
}

}  // namespace train_gpt
