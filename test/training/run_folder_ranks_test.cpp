// Each rank of a run sees when another folder takes the place of the run's.
#include <filesystem>
#include <iterator>

#include "base/error.h"
#include "test/catch.h"
#include "test/model/tiny_model.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/checkpoint.h"
#include "training/files/run_folder.h"

using namespace train_gpt;
namespace fs = std::filesystem;

TEST_CASE("ranks: a run's folder is replaced", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const TemporaryDirectory own;
    const fs::path directory = world.broadcast(own.path());
    const fs::path run = directory / "run", moved = directory / "moved";
    const RunFolder folder(run, world);
    CHECK(folder.in_place());
    CHECK_NOTHROW(folder.require_in_place());
    const auto on_first = [&](const auto& change) {
        world.all_gather("before");
        if (world.rank() == 0) change();
        world.all_gather("after");
    };

    on_first([&] {
        fs::rename(run, moved);
        fs::create_directory(run);
        write(run / "lock", "");
    });
    CHECK_FALSE(folder.in_place());
    CHECK(folder.place() == fs::canonical(moved));
    CHECK(contains(error_of([&] { folder.require_in_place(); }),
                   concat(run.string(), " was renamed to ", fs::canonical(moved).string())));
    // Threads that save in the background begin without waiting for the first rank's.
    const DecoderSpec spec =
        gpt2.spec({.n_layer = 1, .n_head = 1, .n_embd = 8, .n_ctx = 4, .vocab_size = 20});
    const TinyModel model(spec, 1, 2, DType::fp32);
    const Config config;
    CheckpointContents contents{random_int(1, 99), config, spec, *model.parameters};
    contents.require_in_place = [&] { folder.require_in_place(); };
    CHECK(contains(error_of([&] { CheckpointFiles(run, contents, [] {}).make_place(); }),
                   "was renamed to"));
    world.all_gather("tried");
    CHECK(std::distance(fs::directory_iterator(run), fs::directory_iterator()) == 1);  // the lock

    on_first([&] {
        fs::remove_all(run);
        fs::rename(moved, run);
    });
    CHECK_NOTHROW(folder.require_in_place());
    on_first([&] { fs::remove(run / "lock"); });
    CHECK(contains(error_of([&] { folder.require_in_place(); }), "or the file lock in it"));
    world.all_gather("done");  // rank 0 removes the folder
}

TEST_CASE("every rank sees that the run's folder was replaced, and writes nothing into the other",
          "[run_folder]") {
    check_case_on_ranks(3, "ranks: a run's folder is replaced");
}
