#include "training/watch/loss_watch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("the last sane checkpoint is the last one from which a step began with a sane loss") {
    for (int i = 0; i < 200; ++i) {
        const auto vocab = random_int(10, 100000);
        const double guess = std::log(static_cast<double>(vocab));
        LossWatch watch(vocab);
        // Losses fall from a guess to a third of it, with noise, until they diverge.
        const int64_t steps = random_int(2, 60), diverges = random_int(2, steps);
        std::optional<int64_t> expected, judged;
        std::vector<int64_t> saved;
        for (int64_t step = 1; step <= steps; ++step) {
            const double noise = 0.04 * static_cast<double>(random_int(-100, 100)) / 100;
            double loss = guess * (1 - 2.0 / 3 * static_cast<double>(step) / 60 + noise);
            if (step >= diverges) {
                const double worse[] = {2 * guess, 1e30, std::numeric_limits<double>::infinity(),
                                        std::numeric_limits<double>::quiet_NaN()};
                loss = worse[random_int(0, 3)];
            }
            const auto before = watch.sane_checkpoint();
            CHECK(watch.add(step, loss) ==
                  (step < diverges && !saved.empty() && saved.back() == step - 1));
            if (step >= diverges) CHECK(watch.sane_checkpoint() == before);
            if (!saved.empty() && saved.back() + 1 < diverges && saved.back() < step)
                expected = saved.back();
            CHECK(watch.sane_checkpoint() == expected);
            if (random_int(0, 2) == 0) {
                watch.saved(step);
                saved.push_back(step);
            }
        }
    }
}

TEST_CASE("a run that starts with a high loss, or fine-tunes, has sane losses") {
    LossWatch high(100);
    high.add(1, 80);
    high.saved(1);
    CHECK(high.add(2, 60));
    high.saved(2);
    CHECK(high.add(3, 69));  // half of the way back to 80 is 70
    high.saved(3);
    CHECK_FALSE(high.add(4, 71));
    CHECK(high.sane_checkpoint() == 2);

    LossWatch tuned(50000);
    tuned.add(1, 2.5);
    tuned.saved(1);
    CHECK(tuned.add(2, 3.5));  // a learning rate that warms up again
    tuned.saved(2);
    CHECK_FALSE(tuned.add(3, 9));
    CHECK(tuned.sane_checkpoint() == 1);
}

TEST_CASE("a checkpoint from which no step follows has the last step's judgement") {
    for (const bool diverged : {false, true}) {
        LossWatch watch(100);
        watch.add(1, diverged ? 1e9 : 4.5);
        watch.add(2, diverged ? 1e10 : 4.4);
        watch.saved(2);
        CHECK_FALSE(watch.sane_checkpoint());
        watch.end();
        CHECK(watch.sane_checkpoint() == (diverged ? std::nullopt : std::optional<int64_t>(2)));
    }
}

TEST_CASE("a resumed run knows from its metrics which of its checkpoints were sane") {
    for (int i = 0; i < 20; ++i) {
        const TemporaryDirectory directory;
        const int64_t every = random_int(1, 3), resumed = random_int(4, 30),
                      diverges = random_int(2, resumed);
        std::string metrics;
        LossWatch expected(300), replayed(300), received(300);
        for (int64_t step = 1; step <= resumed; ++step) {
            const double loss = step < diverges ? 5.7 - 0.1 * static_cast<double>(step) : 40;
            const bool logged = step == 1 || step % every == 0;
            if (logged) expected.add(step, loss);
            if (logged) metrics += concat("{\"step\": ", step, ", \"loss\": ", loss, "}\n");
            metrics += concat("{\"step\": ", step, ", \"val_loss\": ", 3.1, "}\n");
            if (step % 3 == 1 || step == resumed) {
                char name[32];
                std::snprintf(name, sizeof name, "/step-%08d", static_cast<int>(step));
                make_directory(directory / name);
                write_file(directory / name + "/manifest.json", concat("{\"step\": ", step, "}"));
                expected.saved(step);
            }
        }
        write_file(directory / "metrics.jsonl", metrics);
        CAPTURE(metrics);
        replayed.replay(directory.path(), resumed);
        received.read_text(replayed.to_text());
        for (LossWatch* watch : {&replayed, &received}) {
            CHECK(watch->sane_checkpoint() == expected.sane_checkpoint());
            CHECK(watch->add(resumed + 1, 41) == false);
        }
    }
}
