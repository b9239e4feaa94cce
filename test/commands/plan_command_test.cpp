// train_gpt plan beside the run that it describes.

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("the plan is what the run takes", "[cli][cuda]") {
    const TemporaryDirectory directory;
    for (const char* level : {"none", "elementwise", "block"}) {
        const Arguments overrides{"--set", std::string("precision.recompute=") + level,
                                  "--set", "schedule.steps=1",
                                  "--set", "schedule.warmup_steps=0"};
        const std::string plan =
            check_succeeds(train_gpt_with(Arguments{"plan", Workplace::get().config()} + overrides))
                .out;
        const std::string run =
            check_succeeds(train_gpt_with(Workplace::get().train(directory / level, overrides)))
                .out;
        const std::string label = std::string("precision.recompute = ") + level + ": ";
        const size_t at = plan.find(label);
        CAPTURE(plan, run);
        REQUIRE(at != std::string::npos);
        const std::string total =
            plan.substr(at + label.size(), plan.find(" of ", at) - at - label.size());
        CHECK(contains(total, "MiB"));
        CHECK(contains(run, ", " + total + ", into "));
    }
    const std::string two =
        check_succeeds(train_gpt_with({"plan", Workplace::get().config(), "--world", "2"})).out;
    CHECK(contains(two, "2 ranks"));
    CHECK(contains(two, "1 to 1 each"));
    CHECK(contains(two, "ZeRO-1: "));
    check_refused(train_gpt_with({"plan", Workplace::get().config(), "--world", "3"}), 1,
                  {"3", "batch.tokens_per_step"});
}
