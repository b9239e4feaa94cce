// A run that would pin more of the host's memory than there is.
#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE("a run whose host has too little memory to pin ends before it writes anything",
          "[cli][offload][cuda]") {
    if (skip_without_gpus(1)) return;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    // Two moments in fp32 of 8·10¹¹ parameters take 6 TB.
    const Outcome outcome = train_gpt_with(Workplace::get().train(
        run, {"--set", "device=cuda", "--set", "memory.offload=optimizer", "--set",
              "model.n_layer=256", "--set", "model.n_embd=16384", "--set", "model.n_head=128"}));
    check_refused(outcome, 1,
                  {"this run pins ", " TiB of the host's memory on each rank, but only ",
                   " of what is free may be pinned; "});
    CHECK((!fs::exists(run) || fs::is_empty(run)));
}
