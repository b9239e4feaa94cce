// What others may not see: files beyond the user's umask, and the job's secret.
#include <csignal>

#include <sys/stat.h>

#include "test/commands/program.h"

using namespace train_gpt;

namespace {

/// A program that is started with a umask, through a shell.
Outcome with_umask(const std::string& umask, const Arguments& arguments) {
    return train_gpt_with(
        Arguments{"-c", "umask " + umask + "; exec \"$0\" \"$@\"", fs::absolute(binary())} +
            arguments,
        {.program = "/bin/sh"});
}

/// The paths in a folder, itself included, that have permissions beyond those left by a umask.
std::vector<std::string> beyond(const fs::path& folder, mode_t umask) {
    std::vector<std::string> found;
    const auto check = [&](const fs::path& path) {
        struct stat status {};
        REQUIRE(::lstat(path.c_str(), &status) == 0);
        if (!S_ISLNK(status.st_mode) && (status.st_mode & umask)) found.push_back(path.string());
    };
    check(folder);
    for (const auto& entry : fs::recursive_directory_iterator(folder)) check(entry.path());
    return found;
}

/// The files in a folder, and the texts, that contain a word.
std::vector<std::string> files_with(const fs::path& folder, const std::string& word) {
    std::vector<std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
        if (entry.is_regular_file() && contains(read(entry.path()), word))
            found.push_back(entry.path().string());
    return found;
}

}  // namespace

TEST_CASE("no file or folder that a command makes exceeds the user's umask", "[cli]") {
    const Workplace& w = Workplace::get();
    for (const auto& [text, umask] : {std::pair{"077", 077}, {"027", 027}, {"007", 007}}) {
        const TemporaryDirectory directory;
        const std::string all = directory / "all", run = all + "/run";
        CAPTURE(text);
        const auto succeeds = [&, mask = std::string(text)](const Arguments& arguments) {
            check_succeeds(with_umask(mask, arguments));
        };
        succeeds({"tokenize", w.text(), "--train-vocab", "300", "--out", all + "/data"});
        succeeds(w.train(run, {"--set", "checkpoint.every=4", "--set", "log.tensorboard=true",
                               "--set", "log.fingerprint_every=4", "--trace", "1"}));
        succeeds({"export", run, "--out", all + "/exported"});
        succeeds({"export", run, "--out", all + "/model.bin", "--format", "llm.c"});
        succeeds({"import", all + "/exported", "--out", all + "/imported"});
        succeeds({"replay", run, "--to", "6"});
        succeeds({"report", run, "--out", all + "/report.html"});
        succeeds({"sweep", w.config(), "--set", "run_dir=" + all + "/sweep", "--vary",
                  "optimizer.learning_rate=0.001,0.002", "--set", "schedule.steps=4"});
        CHECK(beyond(all, static_cast<mode_t>(umask)) == std::vector<std::string>());
    }
}

TEST_CASE("the job's secret is in no file, no output and no report, and leaves the environment",
          "[cli]") {
    std::string secret;
    for (int i = 0; i < 40; ++i) secret += static_cast<char>('a' + random_int(0, 25));
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const ProgramResult trained = run_ranks(
        2,
        Arguments{binary()} + Workplace::get().train(run, {"--set", "checkpoint.every=4", "--set",
                                                           "log.tensorboard=true", "--trace", "1"}),
        {{"TRAIN_GPT_SECRET", secret}}, Launcher::own);
    CAPTURE(trained.output);
    REQUIRE(trained.exit_code == 0);
    CHECK_FALSE(contains(trained.output, secret));
    check_succeeds(train_gpt_with({"export", run, "--out", directory / "exported"},
                                  {.environment = {"TRAIN_GPT_SECRET=" + secret}}));
    CHECK(files_with(directory.path(), secret) == std::vector<std::string>());

    // A rank that waits for another one has read it.
    Process rank(
        Workplace::get().train(directory / "other"),
        {.environment = {"TRAIN_GPT_SECRET=" + secret, "TRAIN_GPT_RANK=0", "TRAIN_GPT_WORLD=2",
                         "TRAIN_GPT_ADDRESS=127.0.0.1:" + std::to_string(free_port())}});
    const std::string environment = "/proc/" + std::to_string(rank.pid()) + "/environ";
    const auto shown = [&] { return read(environment); };
    CHECK(rank.wait_until(
        [&] { return contains(shown(), "TRAIN_GPT_RANK=0") && !contains(shown(), secret); }));
    CHECK(contains(shown(), "TRAIN_GPT_ADDRESS="));  // only the secret's text is gone
}
