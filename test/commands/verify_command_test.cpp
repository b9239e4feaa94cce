// Changed bytes in token shards: noticed by train, eval and verify.
#include "dataloader/verify.h"
#include "test/commands/program.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;

namespace {

/// A copy of the workplace's data in its own folder, to be damaged, and arguments that make a run
/// use it.
struct Data {
    explicit Data(bool with_hashes = true) {
        fs::copy(fs::path(Workplace::get().data("data.json")).parent_path(), folder);
        if (!with_hashes) fs::remove(folder + "/data.json");
    }
    Arguments of(const Arguments& more = {}) const {
        return Arguments{"--set", "data.train=" + folder + "/train_*.bin",
                         "--set", "data.val=" + folder + "/val_*.bin",
                         "--set", "checkpoint.every=4"} +
               more;
    }
    /// Replaces a token with another one of the vocabulary.
    std::string damage(const std::string& name) const {
        const std::string path = folder + "/" + name;
        std::string bytes = read(path);
        bytes[1024 + 2 * static_cast<size_t>(random_int(0, std::ssize(bytes) / 2 - 513))] ^= 1;
        write(path, bytes);
        return path;
    }
    void restore(const std::string& name) const {
        write(folder + "/" + name, read(Workplace::get().data(name)));
    }

    TemporaryDirectory directory;
    std::string folder = directory / "data";
};

}  // namespace

TEST_CASE(
    "training on a damaged shard ends with the shard's name, and the last good checkpoint is the "
    "newest",
    "[cli]") {
    const Workplace& w = Workplace::get();
    const Data data;
    const std::string run = data.directory / "run", whole = data.directory / "whole";
    check_succeeds(train_gpt_with(w.train(whole, data.of())));
    check_succeeds(train_gpt_with(w.train(run, data.of({"--stop-at", "8"}))));
    const std::string shard = data.damage("train_000000.bin");
    check_refused(train_gpt_with(w.train(run, data.of())), 1,
                  {shard, "damaged", "resumes from " + run + "/" + step_folder(8)});
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4, 8});
    check_refused(train_gpt_with(w.train(data.directory / "new", data.of())), 1,
                  {shard, "damaged", "starts again from the beginning"});
    CHECK(list_checkpoints(data.directory / "new").empty());

    // As if the start at step 4 had been stopped before all data were read.
    const fs::path kept = run + "/verified.json";
    SortedJson json = SortedJson::parse(read(kept));
    json["sound_step"] = 4;
    write(kept, json.dump());
    check_refused(train_gpt_with(w.train(run, data.of())), 1,
                  {shard, "1 checkpoint", "resumes from " + run + "/" + step_folder(4)});
    CHECK(fs::exists(run + "/" + step_folder(8) + ".suspect"));
    fs::remove_all(run + "/" + step_folder(8) + ".suspect");

    data.restore("train_000000.bin");
    check_succeeds(train_gpt_with(w.train(run, data.of())));
    check_same_state(whole, run, 12);
}

TEST_CASE("damage ends a run after the current step, long before its end", "[cli]") {
    const Data data;
    const std::string shard = data.damage("train_000000.bin");
    check_refused(train_gpt_with(Workplace::get().train(data.directory / "run", data.of(endless))),
                  1, {shard, "damaged"});
}

TEST_CASE("a run whose data were not all verified is not complete", "[cli]") {
    const Data data;
    const std::string run = data.directory / "run";
    check_succeeds(train_gpt_with(Workplace::get().train(run, data.of())));
    const fs::path kept = run + "/verified.json";
    for (const char* text : {R"({"sound_step": 4, "files": []})", "no JSON"}) {
        const std::string shard = data.damage("train_000000.bin");
        write(kept, text);
        check_refused(train_gpt_with(Workplace::get().train(run, data.of())), 1,
                      {shard, "damaged"});
        data.restore("train_000000.bin");
        check_succeeds(train_gpt_with(Workplace::get().train(run, data.of())));
    }
}

TEST_CASE("damaged validation data end a run too, and what was trained is kept", "[cli]") {
    const Data data;
    const std::string run = data.directory / "run", shard = data.damage("val_000000.bin");
    const Outcome outcome = train_gpt_with(Workplace::get().train(run, data.of()));
    check_refused(outcome, 1, {shard, "damaged", "is saved in " + run});
    CHECK_FALSE(checkpoints_in(run).empty());
    check_refused(train_gpt_with({"eval", run}), 1, {shard, "damaged"});
    check_refused(train_gpt_with({"eval", run, "--data", shard}), 1, {shard, "damaged"});
    data.restore("val_000000.bin");
    check_succeeds(train_gpt_with({"eval", run}));
}

TEST_CASE(
    "a shard of another program that is swapped for one of its size is noticed on resume and by "
    "eval",
    "[cli]") {
    const Workplace& w = Workplace::get();
    const Data data(false);
    const std::string run = data.directory / "run";
    check_succeeds(train_gpt_with(w.train(run, data.of({"--stop-at", "5"}))));
    CHECK(SortedJson::parse(read(run + "/manifest.json"))["train"][0]["xxh3"] ==
          hash_file(data.folder + "/train_000000.bin"));
    check_succeeds(train_gpt_with({"eval", run}));
    const std::string val = data.damage("val_000000.bin");
    check_refused(train_gpt_with({"eval", run}), 1, {val, "differs from its hash in " + run});
    data.restore("val_000000.bin");
    const std::string shard = data.damage("train_000000.bin");
    check_refused(train_gpt_with(w.train(run, data.of())), 1,
                  {shard, "is not the file that this run read before", run + "/manifest.json"});
    fs::remove(run + "/manifest.json");
    check_succeeds(train_gpt_with(w.train(run, data.of())));
}

TEST_CASE("if one of several ranks finds damage, all end with the shard's name", "[cli]") {
    const Workplace& w = Workplace::get();
    const Data data;
    const std::string run = data.directory / "run";
    const auto train = [&](const Arguments& more) {
        return run_ranks(2, Arguments{binary()} + w.train(run, data.of(more)));
    };
    const ProgramResult first = train({"--stop-at", "5"});
    INFO(first.output);
    REQUIRE(first.exit_code == 0);
    // There is one training shard and one validation shard, and each rank verifies one of them.
    const bool trains = random_int(0, 1);
    const std::string shard = data.damage(trains ? "train_000000.bin" : "val_000000.bin");
    const ProgramResult second = train({});
    CAPTURE(second.output);
    CHECK(second.exit_code == 1);
    CHECK(contains(second.output, concat("rank ", trains ? 0 : 1, ": ", shard, " is damaged")));
    if (!trains) return;
    // If the damage was found late, the checkpoint of step 8 has been set aside.
    fs::remove_all(run + "/" + step_folder(8) + ".suspect");
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4, 5});
}

TEST_CASE("verify prints what is whole, damaged, missing and without a hash", "[cli]") {
    const Data data;
    const auto row = [](const std::string& out, const std::string& name) {
        const size_t at = out.find("  " + name + " ");
        CAPTURE(out, name);
        REQUIRE(at != std::string::npos);
        const std::string line = out.substr(at, out.find('\n', at) - at);
        return line.substr(line.rfind("  ") + 2);
    };
    const Outcome whole = check_succeeds(train_gpt_with({"verify", data.folder}));
    for (const char* name : {"tokenizer.json", "train_000000.bin", "val_000000.bin"})
        CHECK(row(whole.out, name) == "ok");
    check_succeeds(train_gpt_with({"verify", data.folder + "/data.json"}));

    fs::remove(data.folder + "/tokenizer.json");
    CHECK(train_gpt_with({"verify", data.folder}).code == 1);
    data.damage("val_000000.bin");
    write(data.folder + "/other.bin", read(data.folder + "/train_000000.bin"));
    const Outcome outcome = train_gpt_with({"verify", data.folder});
    CHECK(outcome.code == 1);
    CHECK(row(outcome.out, "tokenizer.json") == "missing");
    CHECK(row(outcome.out, "train_000000.bin") == "ok");
    CHECK(row(outcome.out, "val_000000.bin") == "damaged");
    CHECK(row(outcome.out, "other.bin") == "no hash");
    check_succeeds(train_gpt_with({"verify", data.folder + "/[ot]*.bin"}));
    CHECK(train_gpt_with({"verify", data.folder + "/*.bin"}).code == 1);

    const std::string run = data.directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    CHECK(row(check_succeeds(train_gpt_with({"verify", run})).out, optimizer_file) == "ok");
    const std::string weights = run + "/" + step_folder(8) + "/model.safetensors";
    std::string bytes = read(weights);
    bytes.back() ^= 1;
    write(weights, bytes);
    CHECK(train_gpt_with({"verify", run}).code == 1);
    CHECK(train_gpt_with({"verify", run + "/" + step_folder(8)}).code == 1);
    check_succeeds(train_gpt_with({"verify", run + "/" + step_folder(4)}));
    check_refused(train_gpt_with({"verify", data.directory / "none"}), 1, {"none"});
    check_refused(train_gpt_with({"verify"}), 2, {"what"});
}

TEST_CASE("until the data are verified, the newest checkpoint from before is not pruned", "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    prune_checkpoints(run, 1, 7);
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4, 12});
    prune_checkpoints(run, 1);
    CHECK(checkpoints_in(run) == std::vector<int64_t>{12});
}
