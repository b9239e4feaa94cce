#include "training/config/micro_batches.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "training/config/config_checks.h"
#include "training/config/feeding.h"
#include "training/config/layout.h"

namespace train_gpt {

namespace {

/// Ranks of the run for each data-parallel one.
int others(const Config& config) {
    const auto& p = config.parallel;
    return p.tensor * p.context * p.pipeline;
}

/// Whether a changed configuration feeds so many data-parallel ranks, and breaks no rule between
/// keys that it kept before.
bool feeds_as_well(const Config& before, const Config& changed, int ranks) {
    return can_feed(changed, ranks) &&
           (keeps_rules(changed, ranks * others(changed)) || !keeps_rules(before, 0));
}

/// The key of the smallest step's tokens.
const char* step_key(const Config& config) {
    return config.batch.warmup_tokens > 0 ? "batch.warmup_tokens_per_step"
                                          : "batch.tokens_per_step";
}

/// The tokens of the smallest step nearest to `wanted` that feeds so many data-parallel ranks, as a
/// whole number of parts; nothing if there is none.
std::optional<int64_t> feeding_tokens(const Config& config, int64_t wanted, int64_t part,
                                      int ranks) {
    constexpr int64_t most_tokens = int64_t{1} << 32,  // the limit of batch.tokens_per_step
        tries = 4096;
    const int64_t count = std::max<int64_t>(1, (wanted + part / 2) / part);
    for (int64_t distance = 0; distance < tries; ++distance)
        for (const int64_t tokens : {(count - distance) * part, (count + distance) * part}) {
            Config changed = config;
            (config.batch.warmup_tokens > 0 ? changed.batch.warmup_tokens_per_step
                                            : changed.batch.tokens_per_step) = tokens;
            if (tokens > 0 && tokens <= most_tokens && feeds_as_well(config, changed, ranks))
                return tokens;
        }
    return {};
}

/// The Error for a step with too few micro-batches for the data-parallel ranks; it says what would
/// feed them.
Error too_few_micro_batches(const Config& config, int ranks) {
    const int64_t T = config.sequence_length(), B = std::max(config.batch.micro_batch, 1);
    const int64_t sequences = config.least_tokens_per_step() / T;
    const std::string of =
        concat(" cannot feed ", ranks, others(config) > 1 ? " data-parallel" : "", " ranks");
    const auto tokens_for_all = [&](int64_t size) {
        const auto tokens = feeding_tokens(config, ranks * size * T, size * T, ranks);
        return tokens ? concat(step_key(config), "=", *tokens) : "";
    };
    const auto either = [](const std::string& a, const std::string& b, const char* after) {
        return a.empty() && b.empty()
                   ? ""
                   : concat("; ", a, a.empty() || b.empty() ? "" : " or ", b, after);
    };
    if (sequences < ranks) {
        Config one = config;
        if (B > 1) one.batch.micro_batch = 1;
        int64_t fewer = sequences;
        while (fewer > 0 && !feeds_as_well(config, one, static_cast<int>(fewer))) --fewer;
        return Error(
            "a step of ", sequences, " sequences", of,
            either(fewer > 0 ? concat("take ", fewer * others(config), " ranks at most") : "",
                   tokens_for_all(1), B > 1 ? ", and batch.micro_batch=1" : ""));
    }
    Config smaller = config;
    int64_t fitting = sequences / ranks;
    for (; fitting > 0; --fitting) {
        smaller.batch.micro_batch = static_cast<int>(fitting);
        if (feeds_as_well(config, smaller, ranks)) break;
    }
    return Error("a step of ", sequences / B, " micro-batches", of,
                 either(fitting > 0 ? concat("batch.micro_batch=", fitting) : "", tokens_for_all(B),
                        " can"));
}

Error uneven_pipelines(const Config& config, int64_t micro_batches, int data_ranks) {
    const int64_t multiple = step_multiple(config, data_ranks);
    const auto tokens = feeding_tokens(
        config, config.least_tokens_per_step(),
        multiple * std::max(config.batch.micro_batch, 1) * config.sequence_length(), data_ranks);
    Config other = config;
    other.parallel.schedule = PipelineKind::one_f_one_b;
    other.parallel.stages_per_rank = 1;
    return Error(
        "parallel.schedule = \"interleaved\" cannot run a step of ", micro_batches,
        " micro-batches on ", data_ranks, " pipeline", data_ranks == 1 ? "" : "s", " of ",
        config.parallel.pipeline, " ranks: it needs a multiple of ", multiple,
        tokens ? concat("; the nearest value of ", step_key(config), " that gives one is ", *tokens)
               : "",
        feeds_as_well(config, other, data_ranks)
            ? "; parallel.schedule=1f1b with parallel.stages_per_rank=1 takes any number"
            : "");
}

}  // namespace

std::vector<int> possible_micro_batches(const Config& config, const Device& device, int ranks) {
    const int given = config.batch.micro_batch;
    const int64_t sequences = config.least_tokens_per_step() / config.sequence_length();
    std::vector<int> possible = feeding_micro_batches(config, most_tokens(device), ranks);
    std::string too_many;
    if (config.parallel.sums == GradientSums::exact && given == 0)
        std::erase_if(possible, [&](int B) {
            Config with = config;
            with.batch.micro_batch = B;
            too_many = contributions_problem(with);
            return !too_many.empty();
        });
    if (!possible.empty()) return possible;
    if (!too_many.empty()) throw Error(too_many);
    const int64_t B = std::max(given, 1);
    if (sequences / B < ranks) throw too_few_micro_batches(config, ranks);
    if (sequences / B % step_multiple(config, ranks) != 0)
        throw uneven_pipelines(config, sequences / B, ranks);
    require_even_rows(config, B, given > 0 ? "tokens of a micro-batch" : "tokens of a sequence");
    return {static_cast<int>(B)};
}

}  // namespace train_gpt
