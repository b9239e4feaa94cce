#include "training/watch/spike_lines.h"

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

/// The losses of all micro-batches of the step (from 0), on all ranks.
std::vector<double> losses_of_all(const RunStart& start, const TrainLoader& loader, int64_t step,
                                  int64_t spike) {
    std::vector<double> all(static_cast<size_t>(start.micro_batches_of(step)));
    const std::vector<double> own = start.trainer.losses_at_spike(spike);
    const int first = loader.first_micro_batch(step - start.first_step());
    for (size_t i = 0; i < own.size(); ++i) all[static_cast<size_t>(first) + i] += own[i];
    start.mesh.world().all_reduce_sum(all);
    return all;
}

/// "data/train_000000.bin from token 4096 (“In the beginning”)". A file that can no longer be read
/// ends the run elsewhere.
std::string describe(const RunStart& start, const LoaderOptions& options, int64_t sample) try {
    constexpr int words = 12;
    const SampleOrigin origin = origin_of(start.data.sources(), options, sample, words);
    const std::string file = origin.file.empty() ? "synthetic data" : origin.file.string();
    std::string text;
    if (const Tokenizer* tokenizer = start.data.tokenizer())
        text = tokenizer->decode(std::vector<uint32_t>(origin.tokens.begin(), origin.tokens.end()));
    std::ranges::replace(text, '\n', ' ');
    return concat(file, " from token ", origin.first_token,
                  text.empty() ? "" : concat(" (“", text, "”)"));
} catch (const Error& error) {
    return concat("sample ", sample, ", which cannot be read (", error.what(), ")");
}

}  // namespace

std::string describe_spike(const RunStart& start, const TrainLoader& loader, int64_t step,
                           const StepOutcome& outcome) {
    const std::vector<double> losses = losses_of_all(start, loader, step - 1, outcome.state.spikes);
    if (!start.on_first_rank()) return "";
    const Config& config = start.config;
    const LoaderOptions options = start.loading();
    const auto largest = std::ranges::max_element(losses);
    const int64_t micro_batch = largest - losses.begin(), B = config.batch.micro_batch,
                  first = start.schedule.start().order.sample_after(
                              start.schedule.tokens_before(step - 1)) +
                          micro_batch * B;
    const double tokens = static_cast<double>(B * config.sequence_length());
    const int64_t spike = outcome.state.spikes;
    const SpikeHistory::Before was = start.trainer.optimizer.spike_history().before[spike % 2];
    const Optimizer::Growth growth = start.trainer.optimizer.grown_most(spike);
    const double loss = outcome.sums.loss / tokens / static_cast<double>(losses.size());
    std::string text = concat(
        "spike: step ", step, " has ", above("the loss", loss, was.loss_mean, was.loss_sigma),
        " and ", above("the gradient norm", outcome.state.norm, was.norm_mean, was.norm_sigma));
    if (!growth.tensor.empty())
        text += concat("; ", growth.tensor, " has grown most, ", number(growth.factor), " times");
    text += concat("; micro-batch ", micro_batch + 1, " of ", losses.size(),
                   " has the largest loss, ", number(*largest / tokens), ": ");
    constexpr int64_t most_samples = 4;
    for (int64_t b = 0; b < std::min(B, most_samples); ++b)
        text += concat(b > 0 ? ", " : "", describe(start, options, first + b));
    if (B > most_samples) text += concat(" and ", B - most_samples, " more samples");
    return text + (outcome.state.skip ? "; its update is not applied" : "");
}

}  // namespace train_gpt
