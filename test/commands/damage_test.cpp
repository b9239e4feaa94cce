// Damaged checkpoints and full disks.
#include <algorithm>
#include <csignal>

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("a run resumes from the checkpoint before a damaged one, and reports every damage",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    check_succeeds(train_gpt_with(w.train(directory / "whole", {"--stop-at", "9"})));
    check_succeeds(train_gpt_with(
        w.train(directory / "base", {"--set", "checkpoint.every=4", "--stop-at", "8"})));

    int number = 0;
    const auto check_mended = [&](const std::function<void(const fs::path&)>& damage,
                                  bool may_be_harmless) {
        const std::string run = directory / ("run-" + std::to_string(number++));
        fs::copy(directory / "base", run, fs::copy_options::recursive);
        damage(fs::path(run) / step_folder(8));
        const Outcome outcome = check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "9"})));
        CAPTURE(outcome.out, outcome.err);
        const bool fell_back = contains(outcome.out, "resuming from " + run + "/" + step_folder(4));
        if (!may_be_harmless) CHECK(fell_back);
        if (fell_back) {
            CHECK(outcome.err.starts_with("warning: "));
            CHECK(contains(outcome.err, step_folder(8)));
            // The damaged checkpoint is kept for inspection, out of the way.
            CHECK(fs::exists(run + "/" + step_folder(8) + ".damaged"));
            fs::remove_all(run + "/" + step_folder(8) + ".damaged");
        }
        check_same_state(directory / "whole", run, 9);
    };
    const auto names = names_in(directory / ("base/" + step_folder(8)));
    CHECK(names == std::set<std::string>{"grids.safetensors", "choices.json", "config.json",
                                         "manifest.json", "model.safetensors", optimizer_file,
                                         "position.json", "spikes.json", "tokenizer.json",
                                         "tokenizer_config.json", "train_gpt.json"});
    for (const std::string& name : names) {
        CAPTURE(name);
        check_mended(
            [&](const fs::path& checkpoint) {
                std::string bytes = read(checkpoint / name);
                bytes[static_cast<size_t>(random_int(0, static_cast<int64_t>(bytes.size()) - 1))] ^=
                    static_cast<char>(1 << random_int(0, 7));
                write(checkpoint / name, bytes);
            },
            name == "manifest.json");
    }
    for (const char* name : {"manifest.json", optimizer_file}) {
        CAPTURE(name);
        check_mended(
            [&](const fs::path& checkpoint) {
                fs::resize_file(
                    checkpoint / name,
                    static_cast<uintmax_t>(
                        random_int(0, static_cast<int64_t>(fs::file_size(checkpoint / name)) - 2)));
            },
            false);
        check_mended([&](const fs::path& checkpoint) { fs::remove(checkpoint / name); }, false);
    }

    SECTION("if none is whole, the run does not start from scratch and overwrite them") {
        const std::string run = directory / "all";
        fs::copy(directory / "base", run, fs::copy_options::recursive);
        fs::remove(run + "/" + step_folder(8) + "/model.safetensors");
        fs::resize_file(run + "/" + step_folder(4) + "/tokenizer.json", 10);
        const auto before = names_in(run);
        const std::string metrics = read(run + "/metrics.jsonl");
        const Outcome outcome = train_gpt_with(w.train(run));
        CAPTURE(outcome.out, outcome.err);
        CHECK(outcome.code == 1);
        CHECK(contains(outcome.err, "train_gpt: none of the 2 checkpoints in " + run));
        CHECK(names_in(run) == before);
        CHECK(read(run + "/metrics.jsonl") == metrics);
    }
    SECTION("sampling from a damaged checkpoint is refused") {
        std::string bytes = read(directory / ("base/" + step_folder(8) + "/model.safetensors"));
        bytes.back() ^= 1;
        write(directory / ("base/" + step_folder(8) + "/model.safetensors"), bytes);
        check_refused(train_gpt_with({"sample", directory / "base"}), 1,
                      {"model.safetensors", "damaged"});
        check_succeeds(train_gpt_with({"sample", directory / ("base/" + step_folder(4))}));
    }
}

TEST_CASE(
    "a full disk is reported, older checkpoints stay whole, and the next one is tried on time",
    "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Arguments options{"--set", "checkpoint.every=4", "--set", "checkpoint.keep=1"};
    check_succeeds(train_gpt_with(w.train(run, options + Arguments{"--stop-at", "4"})));
    const uintmax_t optimizer_bytes =
        fs::file_size(run + "/" + step_folder(4) + "/" + optimizer_file);
    const Surroundings full{.file_bytes = static_cast<rlim_t>(optimizer_bytes - 1)};

    const Outcome outcome = train_gpt_with(w.train(run, options), full);
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.code == 1);
    CHECK(contains(outcome.err, "warning: step 8 of 12 is not saved"));
    CHECK(contains(outcome.err, "train_gpt: step 12 of 12 is not saved: cannot write"));
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4});
    check_succeeds(train_gpt_with(w.train(run, options)));
    check_succeeds(train_gpt_with(w.train(directory / "whole", options)));
    check_same_state(directory / "whole", run, 12);

    SECTION("space that is freed is used") {
        Process process(w.train(directory / "later", options + endless), full);
        REQUIRE(process.wait_until([&] { return contains(process.err(), "is not saved"); }));
        const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
        REQUIRE(::prlimit(process.pid(), RLIMIT_FSIZE, &unlimited, nullptr) == 0);
        REQUIRE(process.wait_until([&] {
            const auto names = names_in(directory / "later");
            return std::any_of(names.begin(), names.end(), [](const auto& name) {
                return name.size() == 13 && name.starts_with("step-");
            });
        }));
        process.signal(SIGTERM);
        check_stopped(process.finish());
    }
    SECTION("a full disk under metrics.jsonl does not end the run, and its lines stay whole") {
        const fs::path finished = finished_run();
        uintmax_t smallest = 0;
        for (const char* name : {"config.json", "manifest.json", "choices.json"})
            smallest = std::max(smallest, fs::file_size(finished / name));
        const Outcome crowded = train_gpt_with(w.train(directory / "crowded"),
                                               {.file_bytes = static_cast<rlim_t>(smallest + 100)});
        CHECK(contains(crowded.err, "metrics.jsonl"));
        CHECK(crowded.code == 1);  // the last checkpoint does not fit either
        const std::string text = read(directory / "crowded/metrics.jsonl");
        CHECK_FALSE(text.empty());
        metrics_of(directory / "crowded");
    }
}
