#include "training/watch/spikes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/error.h"

namespace train_gpt {

namespace {

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4g", x);
    return text;
}

std::string above(const char* what, double value, double mean, double sigma) {
    return concat(what, " ", number(value), " (before: ", number(mean), " ± ", number(sigma), ")");
}

/// The losses of all micro-batches of the step, on all ranks.
std::vector<double> losses_of_all(const RunStart& start, const TrainLoader& loader) {
    std::vector<double> all(static_cast<size_t>(start.config.micro_batches_per_step()));
    const std::vector<double> own = start.trainer.losses_at_spike();
    for (size_t i = 0; i < own.size(); ++i)
        all[static_cast<size_t>(loader.first_micro_batch()) + i] += own[i];
    start.mesh.world().all_reduce_sum(all);
    return all;
}

/// "data/train_000000.bin from token 4096 (“In the beginning”)".
std::string describe(const RunStart& start, const SampleOrigin& origin) {
    const std::string file = origin.file.empty() ? "synthetic data" : origin.file.string();
    std::string words;
    if (const Tokenizer* tokenizer = start.data.tokenizer())
        words =
            tokenizer->decode(std::vector<uint32_t>(origin.tokens.begin(), origin.tokens.end()));
    std::ranges::replace(words, '\n', ' ');
    return concat(file, " from token ", origin.first_token,
                  words.empty() ? "" : concat(" (“", words, "”)"));
}

}  // namespace

std::string describe_spike(const RunStart& start, const TrainLoader& loader, int64_t step,
                           const StepOutcome& outcome) {
    const std::vector<double> losses = losses_of_all(start, loader);
    if (!start.on_first_rank()) return "";
    const Config& config = start.config;
    const LoaderOptions options = start.loading();
    const auto largest = std::ranges::max_element(losses);
    const int64_t micro_batch = largest - losses.begin(), B = config.batch.micro_batch,
                  before = step - 1 - start.first_step(),
                  first = options.first_sample + (before * std::ssize(losses) + micro_batch) * B;
    const double tokens = static_cast<double>(B * config.sequence_length());
    const SpikeHistory history = start.trainer.optimizer.spike_history();
    const Optimizer::Growth growth = start.trainer.optimizer.grown_most();
    const double loss = outcome.sums.loss / tokens / static_cast<double>(losses.size());
    std::string text = concat(
        "spike: step ", step, " has ",
        above("the loss", loss, history.loss_mean, history.loss_sigma), " and ",
        above("the gradient norm", outcome.state.norm, history.norm_mean, history.norm_sigma));
    if (!growth.tensor.empty())
        text += concat("; ", growth.tensor, " has grown most, ", number(growth.factor), " times");
    text += concat("; micro-batch ", micro_batch + 1, " of ", losses.size(),
                   " has the largest loss, ", number(*largest / tokens), ": ");
    constexpr int64_t most_samples = 4;
    constexpr int words = 12;
    for (int64_t b = 0; b < std::min(B, most_samples); ++b)
        text += concat(b > 0 ? ", " : "",
                       describe(start, origin_of(start.data.sources(), options, first + b, words)));
    if (B > most_samples) text += concat(" and ", B - most_samples, " more samples");
    return text + (outcome.state.skip ? "; its update is not applied" : "");
}

}  // namespace train_gpt
