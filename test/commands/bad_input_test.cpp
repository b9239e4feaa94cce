// Missing, unreadable and misplaced files, whatever the command.
#include <algorithm>

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("missing, unreadable and misplaced files are named in one line", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run", empty = directory / "empty",
                      none = directory / "none";
    write(empty, "");
    check_refused(train_gpt_with({"train", none}), 1, {none, "No such file"});
    check_refused(train_gpt_with({"train", directory.path()}), 1, {directory.path(), "directory"});
    check_refused(train_gpt_with({"train", empty}), 1, {empty, "empty"});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.train=" + none})), 1, {none});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.train=" + directory.path()})), 1,
                  {directory.path()});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.val=" + empty})), 1,
                  {empty, "shard"});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.train=" + w.text()})), 1,
                  {w.text(), "shard"});
    check_refused(train_gpt_with(w.train(run, {"--set", "tokenizer.path=" + none})), 1, {none});
    check_refused(train_gpt_with(w.train(run, {"--set", "tokenizer.path=" + w.text()})), 1,
                  {w.text()});
    check_refused(train_gpt_with(w.train(run, {"--set", "evaluation.hellaswag=" + none})), 1,
                  {none});
    check_refused(train_gpt_with(w.train(run, {"--set", "model.init_from=" + none})), 1, {none});
    check_refused(train_gpt_with(w.train(empty)), 1, {empty});
    check_refused(train_gpt_with({"sample", none}), 1, {none});
    check_refused(train_gpt_with({"sample", directory.path()}), 1,
                  {directory.path(), "checkpoint"});
    check_refused(train_gpt_with({"sample", w.text()}), 1, {w.text(), "is a file"});
    check_refused(train_gpt_with({"eval", finished_run(), "--data", none}), 1, {none});
    check_refused(train_gpt_with({"eval", finished_run(), "--hellaswag", empty}), 1, {empty});
    check_refused(train_gpt_with({"tokenize", none, "--train-vocab", "300", "--out", run}), 1,
                  {none});
    check_refused(
        train_gpt_with({"tokenize", directory.path(), "--train-vocab", "300", "--out", run}), 1,
        {directory.path(), "holds no text"});
    check_refused(train_gpt_with({"tokenize", w.text(), "--train-vocab", "300", "--out", w.text()}),
                  1, {w.text()});

    const std::string tokenizer = read(w.data("tokenizer.json"));
    write(directory / "tokenizer.json", tokenizer.substr(0, tokenizer.size() / 2));
    check_refused(
        train_gpt_with(w.train(run, {"--set", "tokenizer.path=" + (directory / "tokenizer.json")})),
        1, {directory / "tokenizer.json"});

    fs::create_directory(directory / "shut");
    fs::permissions(directory / "shut", fs::perms::none);
    for (const char* name : {"shut/*.bin", "shut/a.bin"}) {
        const Outcome shut =
            train_gpt_with(w.train(run, {"--set", "data.train=" + (directory / name)}),
                           {.bound_by_permissions = true});
        if (shut.code != 99) check_refused(shut, 1, {name, "permissions"});
    }
    fs::permissions(directory / "shut", fs::perms::owner_all);
    check_refused(
        train_gpt_with(w.train(run, {"--set", "data.train=" + (directory / "[x]/*.bin")})), 1,
        {"[x]/*.bin", "write [[]"});
    fs::create_directory(directory / "gone");
    fs::copy_file(w.data("val_000000.bin"), directory / "gone/val.bin");
    check_succeeds(train_gpt_with(
        w.train(run, {"--stop-at", "1", "--set", "data.val=" + (directory / "gone/*.bin")})));
    fs::remove_all(directory / "gone");
    check_refused(train_gpt_with({"eval", run}), 1, {"gone/*.bin", "--data GLOB"});
    const std::string locked = directory / "locked.json";
    fs::copy_file(w.config(), locked);
    fs::permissions(locked, fs::perms::none);
    const Outcome unreadable = train_gpt_with({"plan", locked}, {.bound_by_permissions = true});
    if (unreadable.code != 99) check_refused(unreadable, 1, {locked, "Permission denied"});
    fs::create_directory(directory / "read-only");
    fs::permissions(directory / "read-only", fs::perms::owner_read | fs::perms::owner_exec);
    const Outcome unwritable =
        train_gpt_with(w.train(directory / "read-only/run"), {.bound_by_permissions = true});
    if (unwritable.code != 99)
        check_refused(unwritable, 1, {directory / "read-only/run", "Permission denied"});
    fs::permissions(directory / "read-only", fs::perms::owner_read);
    const Outcome unsearchable =
        train_gpt_with(w.train(directory / "read-only"), {.bound_by_permissions = true});
    if (unsearchable.code != 99)
        check_refused(unsearchable, 1, {directory / "read-only", "Permission denied"});
    fs::permissions(directory / "read-only", fs::perms::owner_all);
}

TEST_CASE(
    "a token id beyond the vocabulary stops the run, names file and byte, and keeps the trained "
    "steps",
    "[cli]") {
    const TemporaryDirectory directory;
    std::string shard = read(Workplace::get().data("train_000000.bin"));
    // In the first epoch, every window of 32 tokens comes up once, so one of these four stops a run
    // within one epoch.
    const size_t tokens = (shard.size() - 1024) / 2 / 32 * 32;
    std::set<std::string> bytes;
    for (size_t quarter = 1; quarter <= 4; ++quarter) {
        const size_t at = 1024 + 2 * (tokens * quarter / 4 - 16);
        shard[at] = shard[at + 1] = '\x77';
        bytes.insert("byte " + std::to_string(at));
    }
    write(directory / "train.bin", shard);
    const Outcome outcome = train_gpt_with(Workplace::get().train(
        directory / "run",
        {"--set", "data.train=" + (directory / "train.bin"), "--set", "schedule.steps=500"}));
    check_refused(outcome, 1, {directory / "train.bin", "30583"});
    CHECK(std::any_of(bytes.begin(), bytes.end(),
                      [&](const auto& byte) { return contains(outcome.err, byte); }));
    int64_t done = 0;
    while (contains(outcome.out, "step " + std::to_string(done + 1) + "/")) ++done;
    CHECK(checkpoints_in(directory / "run") ==
          (done > 0 ? std::vector<int64_t>{done} : std::vector<int64_t>{}));
}

TEST_CASE(
    "a model that cannot fit is refused with the plan of its memory, and nothing is left behind",
    "[cli][cuda]") {
    const TemporaryDirectory directory;
    for (const char* embd : {"12288", "262144"}) {
        const Outcome outcome = train_gpt_with(Workplace::get().train(
            directory / "run", {"--set", "model.n_layer=500", "--set", "model.n_head=2048", "--set",
                                std::string("model.n_embd=") + embd}));
        CAPTURE(outcome.err);
        CHECK(outcome.code == 1);
        for (const char* part :
             {"memory", "parameters", "gradients", "moments", "activations", "total"})
            CHECK(contains(outcome.err, part));
        CHECK_FALSE(fs::exists(directory / "run"));
    }
}

TEST_CASE("a launcher with several ranks is refused", "[cli]") {
    const TemporaryDirectory directory;
    for (const auto& [variable, name] :
         {std::pair{"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE"},
          {"PMI_SIZE=8", "PMI_SIZE"},
          {"SLURM_STEP_NUM_TASKS=3", "SLURM_PROCID"},
          {"TRAIN_GPT_WORLD=3", "TRAIN_GPT_RANK"}}) {
        const Surroundings launched{// MPI's library leaks memory
                                    .environment = {variable, "ASAN_OPTIONS=detect_leaks=0"}};
        check_refused(train_gpt_with(Workplace::get().train(directory / "run"), launched), 1,
                      {name, "rank"});
    }
    CHECK_FALSE(fs::exists(directory / "run"));
}

TEST_CASE("deeply nested JSON in any file is a sentence or a line that is left out", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    std::string deep;
    for (int i = 0; i < 20'000; ++i) deep += random_int(0, 1) ? "[" : "{\"a\": ";
    const std::string words = "nested more than 1000 levels deep";
    write(directory / "deep.json", deep);
    check_refused(train_gpt_with({"plan", directory / "deep.json"}), 1,
                  {directory / "deep.json", words});
    check_refused(train_gpt_with(w.train(directory / "new",
                                         {"--set", "tokenizer.path=" + (directory / "deep.json")})),
                  1, {directory / "deep.json", words});
    check_refused(train_gpt_with({"eval", finished_run(), "--hellaswag", directory / "deep.json"}),
                  1, {directory / "deep.json, line 1"});
    check_refused(train_gpt_with({"plan", w.config(), "--set", "schedule.steps=" + deep}), 1,
                  {"schedule.steps"});
    const std::string run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    for (const char* name :
         {"metrics.jsonl", "history.jsonl", "config.json", "choices.json", "manifest.json"}) {
        const std::string before = read(fs::path(run) / name);
        write(fs::path(run) / name, (contains(name, "jsonl") ? before : "") + deep + "\n");
        CAPTURE(name);
        check_succeeds(train_gpt_with({"report", run}));
        write(fs::path(run) / name, before);
    }
    const std::string checkpoint = run + "/" + step_folder(12);
    write(checkpoint + "/manifest.json", deep);
    check_refused(train_gpt_with({"verify", checkpoint}), 1, {"manifest.json", words});
    fs::create_directory(directory / "data");
    write(directory / "data/data.json", deep);
    const Outcome data = train_gpt_with({"verify", directory / "data"});
    CHECK(data.code == 1);
    CHECK(contains(data.err, words));
}
