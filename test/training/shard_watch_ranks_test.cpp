// Verification in the background on several ranks, which each read a part of the shards.
#include "base/file.h"
#include "dataloader/manifest.h"
#include "test/dataloader/shard_files.h"
#include "test/parallel/ranks.h"
#include "training/watch/shard_watch.h"

using namespace train_gpt;
namespace fs = std::filesystem;

TEST_CASE("ranks: damage of training and of validation data", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    for (const size_t trains : {0, 1}) {
        // The same two shards on both ranks, of which each reads one.
        const TemporaryDirectory directory;
        const std::vector<fs::path> files = glob_files(write_shards(
            directory.path(), {random_tokens(2000, 300), random_tokens(500, 300)}, 300));
        DataManifest manifest;
        manifest.complete = true;
        manifest.tokenizer = "none";
        std::vector<WatchedShard> shards;
        for (size_t i = 0; i < files.size(); ++i) {
            manifest.shards.push_back(
                {files[i].filename().string(), "train", 1, 1, hash_file(files[i])});
            shards.push_back({files[i], i == trains});
        }
        write_data_manifest(directory.path(), manifest);
        for (const fs::path& file : files) {
            std::string bytes = read(file);
            bytes.back() ^= 1;
            write(file, bytes);
        }
        const RunFolder folder(world.broadcast(directory / "run"), world);
        ShardWatch watch(folder, shards, 3, world);
        watch.finish([] { return false; });
        const auto damage = watch.settle();
        REQUIRE(damage);
        // Checkpoints are set aside for this one, whichever rank found the other.
        CHECK(damage->trained);
        CHECK(contains(damage->message, concat("rank ", trains, ": ")));
        CHECK(contains(damage->message, files[trains].filename().string() + " is damaged"));
        world.all_gather("done");  // rank 0 removes the folder
    }
}

TEST_CASE("damage of training data on one rank counts before damage of validation data on another",
          "[shard_watch]") {
    check_case_on_ranks(2, "ranks: damage of training and of validation data");
}
