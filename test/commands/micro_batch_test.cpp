// A run that chooses its micro-batch itself, and keeps it.
#include "test/commands/program.h"

using namespace train_gpt;

namespace {

const Arguments open_choice{"--set", "batch.micro_batch=0"};

/// Writes a checkpoint's choices as if the run had made them.
void choose_for(const fs::path& checkpoint, int micro_batch) {
    SortedJson choices = SortedJson::parse(read(checkpoint / "choices.json"));
    choices["micro_batch"] = micro_batch;
    replace_in_checkpoint(checkpoint, "choices.json", choices.dump(2));
}

}  // namespace

TEST_CASE("a run that chose its micro-batch resumes with the same bits", "[cli][cuda]") {
    const TemporaryDirectory directory;
    const auto train = [&](const std::string& run, const Arguments& more) {
        return check_succeeds(
            train_gpt_with(Workplace::get().train(directory / run, open_choice + more)));
    };
    const Outcome whole = train("whole", {});
    CHECK(contains(whole.out, "(1 micro-batch of 8 × 32)"));
    train("parts", {"--stop-at", "5"});
    const Outcome rest = train("parts", {});
    CHECK_FALSE(contains(rest.out, "note: "));
    check_same_state(directory / "whole", directory / "parts", 12);
    // The configuration keeps what was requested, and the choices keep what was chosen.
    const fs::path checkpoint = directory / ("parts/" + step_folder(12));
    for (const fs::path& file :
         {fs::path(directory / "parts/config.json"), checkpoint / "train_gpt.json"})
        CHECK(SortedJson::parse(read(file)).at("batch").at("micro_batch") == 0);
    for (const fs::path& file :
         {fs::path(directory / "parts/choices.json"), checkpoint / "choices.json"})
        CHECK(SortedJson::parse(read(file)).at("micro_batch") == 8);
    // The results are the same as if this micro-batch had been given.
    check_succeeds(train_gpt_with(
        Workplace::get().train(directory / "given", {"--set", "batch.micro_batch=8"})));
    check_same_state(directory / "whole", directory / "given", 12);
}

TEST_CASE("a resumed run computes with the micro-batch that its checkpoint names", "[cli][cuda]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const auto train = [&](const Arguments& more) {
        return check_succeeds(train_gpt_with(Workplace::get().train(run, open_choice + more)));
    };
    train({"--stop-at", "3"});
    choose_for(fs::path(run) / step_folder(3), 2);
    const Outcome kept = train({"--stop-at", "6"});
    CHECK(contains(kept.out, "(4 micro-batches of 2 × 32)"));
    CHECK_FALSE(contains(kept.out, "note: "));
    // A micro-batch that does not divide the step is replaced, and the run says so.
    choose_for(fs::path(run) / step_folder(6), 3);
    const Outcome changed = train({"--stop-at", "9"});
    CHECK(contains(changed.out, "(1 micro-batch of 8 × 32)"));
    CHECK(contains(changed.out, "note: the run had chosen batch.micro_batch=3"));
    // Checkpoints of earlier versions name no micro-batch.
    const fs::path checkpoint = fs::path(run) / step_folder(9);
    choose_for(checkpoint, 0);
    const Outcome older = train({});
    CHECK(contains(older.out, "(1 micro-batch of 8 × 32)"));
    CHECK_FALSE(contains(older.out, "note: "));
}

TEST_CASE("a run that falls back on an older checkpoint computes with that one's choices",
          "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const auto train = [&](const Arguments& more) {
        return check_succeeds(train_gpt_with(Workplace::get().train(run, open_choice + more)));
    };
    train({"--stop-at", "3"});
    choose_for(run / step_folder(3), 2);
    train({"--stop-at", "6"});
    write(run / step_folder(6) / "choices.json", "{}");
    const Outcome back = train({"--stop-at", "9"});
    CHECK(contains(back.err, "trying the checkpoint before it"));
    CHECK(contains(back.out, "(4 micro-batches of 2 × 32)"));
    CHECK(fs::exists(run / step_folder(9)));
}
