// Spikes: seen where they are, described, skipped, and the same on any number of ranks.
#include "kernels/spikes.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <regex>
#include <string>
#include <vector>

#include "dataloader/loader.h"
#include "test/catch.h"
#include "test/kernels/kernel_test.h"
#include "test/parallel/training_job.h"
#include "training/files/spikes_file.h"

using namespace train_gpt;
using namespace train_gpt::training_job;

namespace {

/// Mean and standard deviation, in another way than the kernel's.
std::pair<double, double> reference_statistics(const std::vector<double>& all) {
    const std::vector<double> last(all.end() - SpikeHistory::steps, all.end());
    const double n = SpikeHistory::steps;
    double mean = 0, variance = 0;
    for (const double x : last) mean += x / n;
    for (const double x : last) variance += (x - mean) / n * (x - mean);
    return {mean, std::sqrt(variance)};
}

}  // namespace

TEST_CASE("a step far above the last 128 is a spike, and none before there are so many",
          "[cuda][spikes]") {
    ON_EACH_DEVICE();
    TestStream stream;
    const SharedArray<SpikeHistory> history(1);
    const SharedArray<StepState> state(1);
    const SharedArray<double> loss(1), kept(6), now(3);
    history.values()[0] = {};
    const bool skips = random_int(0, 1) == 1;
    const double scale = 0.5;
    std::vector<double> losses, norms;
    int64_t spikes = 0;
    const auto step = [&](double of_loss, float of_norm) {
        loss.values()[0] = of_loss / scale;
        state.values()[0] = {.norm = of_norm, .multiplier = 1};
        watch_for_spike(stream, {.history = history.data(),
                                 .state = state.data(),
                                 .loss = loss.data(),
                                 .scale = scale,
                                 .skips = skips});
        return StepState(state.values()[0]);
    };
    const auto usual = [&] {
        return std::pair{2.0 + 0.01 * random_normal(1)[0], 1.0f + 0.1f * random_normal(1)[0]};
    };
    // A jump before there are 128 steps is none.
    for (int i = 0; i < SpikeHistory::steps + 100; ++i) {
        auto [of_loss, of_norm] = usual();
        if (i == 70) of_loss = 9;
        // Within the bounds, with which later steps are compared
        of_loss = std::min(of_loss, 2.05), of_norm = std::min(of_norm, 1.5f);
        if (i == 70) of_loss = 9;
        const StepState found = step(of_loss, of_norm);
        losses.push_back(of_loss), norms.push_back(of_norm);
        CAPTURE(i, of_loss, of_norm);
        REQUIRE(found.spike == 0);
        REQUIRE(found.skip == 0);
    }
    for (const bool of_loss : {true, false}) {
        const auto [loss_mean, loss_sigma] = reference_statistics(losses);
        const auto [norm_mean, norm_sigma] = reference_statistics(norms);
        const double mean = of_loss ? loss_mean : norm_mean,
                     sigma = of_loss ? loss_sigma : norm_sigma;
        for (const double times : {5.99, 6.01}) {
            SpikeHistory before = history.values()[0];
            const double value = mean + times * sigma;
            const StepState found = of_loss ? step(value, static_cast<float>(norm_mean))
                                            : step(loss_mean, static_cast<float>(value));
            CAPTURE(of_loss, times, mean, sigma);
            CHECK(found.spike == (times > 6 ? 1 : 0));
            CHECK(found.skip == (times > 6 && skips ? 1 : 0));
            if (times < 6) {
                history.values()[0] = before;
                continue;
            }
            CHECK(found.spikes == ++spikes);
            CHECK(history.values()[0].before[spikes % 2].loss_mean == Approx(loss_mean));
            CHECK(history.values()[0].before[spikes % 2].loss_sigma == Approx(loss_sigma));
            CHECK(history.values()[0].before[spikes % 2].norm_mean == Approx(norm_mean));
            CHECK(history.values()[0].before[spikes % 2].norm_sigma == Approx(norm_sigma));
            // The history takes it with the bound.
            losses.push_back(of_loss ? mean + 6 * sigma : loss_mean);
            norms.push_back(of_loss ? norm_mean : mean + 6 * sigma);
        }
        for (double& x : now.values()) x = random_normal(1)[0];
        for (double& x : kept.values()) x = 7;
        keep_at_spike(stream, state.data(),
                      {.to = kept.data(), .stride = 3, .from = now.data(), .n = 2});
        const auto place = static_cast<std::ptrdiff_t>(3 * (spikes % 2));
        CHECK(std::equal(now.values().begin(), now.values().begin() + 2,
                         kept.values().begin() + place));
        CHECK(std::ranges::count(kept.values(), 7.0) == 4);
        keep_if_taken(stream, state.data(), kept.data(), now.data(), 3);
        CHECK(std::ranges::equal(now.values(), kept.values().first(3)));
    }
    // Steps that stop the run, come again or are not finite are not taken.
    const SpikeHistory before = history.values()[0];
    for (const int kind : {0, 1, 2, 3}) {
        loss.values()[0] = kind == 3 ? std::nan("") : 1e9;
        state.values()[0] = {.norm = kind == 2 ? INFINITY : 1.0f,
                             .stop = kind == 0,
                             .overflow = kind == 1,
                             .spike = 1};
        watch_for_spike(stream, {.history = history.data(),
                                 .state = state.data(),
                                 .loss = loss.data(),
                                 .scale = scale,
                                 .skips = true});
        CAPTURE(kind);
        CHECK(StepState(state.values()[0]).spike == 0);
        CHECK(SpikeHistory(history.values()[0]).count == before.count);
        kept.values()[0] = kept.values()[3] = 7;
        keep_at_spike(stream, state.data(),
                      {.to = kept.data(), .stride = 3, .from = now.data(), .n = 3});
        keep_if_taken(stream, state.data(), kept.data(), now.data(), 3);
        CHECK(kept.values()[0] == 7);
        CHECK(kept.values()[3] == 7);
    }
}

TEST_CASE("the history of losses and norms goes through its file unchanged", "[spikes]") {
    const TemporaryDirectory directory;
    SpikeHistory history;
    for (double& x : history.losses) x = random_normal(1)[0] / 3.0;
    for (double& x : history.norms) x = std::exp(random_normal(1)[0]);
    history.count = random_int(0, 1000), history.spikes = random_int(0, 9);
    CHECK(write_spikes(directory.path(), history) == "spikes.json");
    const SpikeHistory read = read_spikes(directory.path());
    CHECK(std::ranges::equal(read.losses, history.losses));
    CHECK(std::ranges::equal(read.norms, history.norms));
    CHECK(read.count == history.count);
    CHECK(read.spikes == history.spikes);
    write(directory / "spikes.json", R"({"steps": 3, "spikes": 0, "losses": [1], "norms": [2]})");
    CHECK(contains(error_of([&] { read_spikes(directory.path()); }), "does not have 128 losses"));
    fs::remove(directory / "spikes.json");
    CHECK(read_spikes(directory.path()).count == 0);
}

TEST_CASE("a spike planted in the data is found where it is, and skipped on any number of ranks",
          "[spikes][training]") {
    // Windows of one pattern, and one of random tokens, which comes when the loss is low.
    constexpr int64_t T = 12, steps = 420, per_step = 3;
    const TemporaryDirectory directory;
    const uint64_t seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    const auto vocabulary = static_cast<uint32_t>(random_int(20, 60));
    std::vector<uint32_t> tokens(static_cast<size_t>(steps * per_step * T + 1));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint32_t>(i % 4);
    const std::string glob = write_shards(directory.path(), {tokens}, vocabulary);
    LoaderOptions options;
    options.seed = seed, options.B = 1, options.T = T, options.micro_batches_per_step = per_step;
    const int64_t spike_step = random_int(352, 400),
                  sample = (spike_step - 1) * per_step + random_int(0, per_step - 1);
    const int64_t planted =
        origin_of({{std::make_shared<TokenShards>(glob, vocabulary), 1}}, options, sample, 3)
            .first_token;
    for (int64_t t = 1; t < T; ++t)
        tokens[static_cast<size_t>(planted + t)] =
            static_cast<uint32_t>(random_int(5, vocabulary - 1));
    write_shards(directory.path(), {tokens}, vocabulary);
    const char* const states[] = {"fp32", "bf16", "int8"};
    const char* const state = states[random_int(0, 2)];
    const TrainingJob job(per_step, {{"seed", std::to_string(seed)},
                                     {"optimizer.state_dtype", state},
                                     {"data.train", glob},
                                     {"data.val", ""},
                                     {"model.vocab_size", std::to_string(vocabulary)},
                                     {"model.n_layer", "1"},
                                     {"model.n_ctx", std::to_string(T)},
                                     {"batch.sequence_length", std::to_string(T)},
                                     {"batch.micro_batch", "1"},
                                     {"batch.tokens_per_step", std::to_string(per_step * T)},
                                     {"schedule.steps", std::to_string(steps)},
                                     {"evaluation.every", "0"},
                                     {"parallel.sums", "exact"},
                                     {"optimizer.on_spike", "skip"}});
    CAPTURE(seed, planted, spike_step, state);
    const ProgramResult one =
        run_program(job.command("train", "one", {}, {"--profile", std::to_string(steps - 2)}),
                    {{"OMP_NUM_THREADS", "1"}});
    INFO(one.output);
    REQUIRE(one.exit_code == 0);
    CHECK(contains(one.output, concat("spike: step ", spike_step, " has the loss ")));
    CHECK(contains(one.output, concat("micro-batch ", sample % per_step + 1, " of ", per_step,
                                      " has the largest loss")));
    CHECK(contains(one.output, concat(directory.path(), "/train_000000.bin from token ", planted)));
    CHECK(contains(one.output, " has grown most, "));
    // Its gradients are too large for the grids of the steps before. A profile counts what was in
    // vain: in each step that was computed, an embedding for each micro-batch.
    CHECK(contains(one.output, concat("note: gradients of step ", spike_step)));
    CHECK(std::regex_search(one.output,
                            std::regex(concat("profile of ", steps - 2,
                                              " steps and of [1-9] that were computed again"))));
    CHECK(std::regex_search(one.output,
                            std::regex(concat("\n  embedding_forward +", per_step, "\\.0 "))));
    CHECK(contains(one.output, "; its update is not applied"));
    const std::vector<SortedJson> metrics = metrics_of(job.path("one"));
    const auto spikes_of = [](const SortedJson& line) { return line.value("spikes", 0); };
    CHECK(spikes_of(metrics.back()) >= 1);
    // Ranks agree, also after a resume shortly before the spike.
    const ProgramResult two = job.start(2, "two", zero(2), {}, {{"OMP_NUM_THREADS", "1"}});
    INFO(two.output);
    REQUIRE(two.exit_code == 0);
    CHECK(contains(two.output, concat("spike: step ", spike_step, " has the loss ")));
    check_equal(job.path("one"), job.path("two"), steps);
    job.train(1, "resumed", {}, {"--stop-at", std::to_string(spike_step - 1)});
    job.train(1, "resumed");
    check_equal(job.path("one"), job.path("resumed"), steps);
    // With "report" the update is applied.
    job.train(1, "reported", {{"optimizer.on_spike", "report"}});
    CHECK(metrics_of(job.path("reported")).back() != metrics.back());
}

TEST_CASE("memory is planned for a rank with many micro-batches", "[spikes][training]") {
    const TrainingJob job(static_cast<int>(random_int(40, 120)),
                          {{"schedule.steps", "2"},
                           {"schedule.warmup_steps", "1"},
                           {"parallel.sums", random_int(0, 1) ? "exact" : "fp32"}});
    CHECK(std::isfinite(metrics_of(job.train(1, "one")).back().at("val_loss").get<double>()));
}
