// Verification in the background. ThreadSanitizer runs these too.
#include "training/watch/shard_watch.h"

#include <chrono>
#include <limits>
#include <thread>

#include "base/file.h"
#include "base/json_file.h"
#include "dataloader/manifest.h"
#include "test/dataloader/shard_files.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

constexpr int64_t all_steps = std::numeric_limits<int64_t>::max();

/// Shards, with a data.json if wanted, and a run that reads them: the first two are for training,
/// the third is for validation.
struct Run {
    explicit Run(bool with_hashes) {
        fs::create_directory(directory / "data");
        for (int i = 0; i < 3; ++i) tokens.push_back(random_tokens(random_int(2000, 900000), 300));
        files = glob_files(write_shards(directory / "data", tokens, 300));
        for (size_t i = 0; i < files.size(); ++i) shards.push_back({files[i], i < 2});
        if (with_hashes) {
            DataManifest manifest;
            manifest.complete = true;
            manifest.tokenizer = "none";
            for (const auto& path : files)
                manifest.shards.push_back(
                    {path.filename().string(), "train", 1, 1, hash_file(path)});
            write_data_manifest(directory / "data", manifest);
        }
        config.data.train = {{directory / "data/train_00000[01].bin", 1, "all"}};
        config.data.val = directory / "data/train_000002.bin";
    }

    void damage(size_t i) const {
        std::string bytes = read(files[i]);
        bytes[static_cast<size_t>(random_int(1024, std::ssize(bytes) - 1))] ^= 1;
        write(files[i], bytes);
    }
    /// Damages a shard without a trace in its size, inode and modification time.
    void damage_secretly(size_t i) const {
        const auto time = fs::last_write_time(files[i]);
        damage(i);
        fs::last_write_time(files[i], time);
    }
    Json kept() const { return read_json(directory / "run/verified.json"); }

    TemporaryDirectory directory;
    std::vector<std::vector<uint32_t>> tokens;
    std::vector<fs::path> files;
    std::vector<WatchedShard> shards;
    Config config;
    World world;
};

/// One start of the run that verifies all shards.
std::optional<ShardWatch::Damage> start(const Run& run, int64_t step,
                                        int64_t* sound_step = nullptr) {
    const RunFolder folder(run.directory / "run");
    folder.describe(run.config);
    ShardWatch watch(folder, run.shards, step, run.world);
    watch.finish([] { return false; });
    const auto damage = watch.settle();
    if (sound_step) *sound_step = watch.sound_step();
    return damage;
}

}  // namespace

TEST_CASE("whole shards are read once, and again only when they have changed") {
    const Run run(true);
    int64_t sound_step = 0;
    CHECK_FALSE(start(run, 7, &sound_step));
    CHECK(sound_step == all_steps);
    CHECK(run.kept()["files"].size() == 3);

    const auto i = static_cast<size_t>(random_int(0, 2));
    run.damage_secretly(i);
    CHECK_FALSE(start(run, 9));
    fs::last_write_time(run.files[i], fs::last_write_time(run.files[i]) + std::chrono::seconds(1));
    CHECK(start(run, 9));
}

TEST_CASE("the thread finds damage by itself, and a later start finds it immediately") {
    const Run run(true);
    const auto i = static_cast<size_t>(random_int(0, 2));
    run.damage(i);
    {
        const RunFolder folder(run.directory / "run");
        folder.describe(run.config);
        ShardWatch watch(folder, run.shards, 5, run.world);
        CHECK(watch.sound_step() == 5);
        while (!watch.found_damage()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const auto damage = watch.settle();
        REQUIRE(damage);
        CHECK(contains(damage->message, run.files[i].string() + " is damaged"));
        CHECK(damage->trained == (i < 2));
        CHECK(watch.sound_step() == 5);
    }
    // Until all shards are whole, steps after the first one that may have used a damaged shard are
    // not sound.
    int64_t sound_step = 0;
    CHECK(start(run, 8, &sound_step));
    CHECK(sound_step == 5);
    CHECK(run.kept()["sound_step"] == 5);
    fs::remove(run.files[i]);
    ShardWriter writer(run.directory / "data", "again", 300, 1 << 20);
    writer.append(run.tokens[i]);
    fs::rename(writer.finish()[0].path, run.files[i]);
    CHECK_FALSE(start(run, 5, &sound_step));
    CHECK(sound_step == all_steps);
    CHECK(run.kept()["sound_step"].is_null());
}

TEST_CASE("a run from an older checkpoint than the sound one has only that to fall back on") {
    const Run run(true);
    const auto i = static_cast<size_t>(random_int(0, 2));
    run.damage(i);
    const int64_t first = random_int(1, 100);
    int64_t sound_step = 0;
    CHECK(start(run, first, &sound_step));
    CHECK(sound_step == first);
    // What was sound at a later start was trained on data that was not verified either.
    CHECK(start(run, first + random_int(1, 100), &sound_step));
    CHECK(sound_step == first);
    const int64_t older = random_int(0, first - 1);
    CHECK(start(run, older, &sound_step));
    CHECK(sound_step == older);
    CHECK(run.kept()["sound_step"] == older);
}

TEST_CASE("a shard that was found damaged is read before all others") {
    const Run run(true);
    run.damage(2);
    CHECK(start(run, 3));
    uint64_t others = 0;
    for (const size_t i : {0, 1}) {  // which must be read again, too
        fs::last_write_time(run.files[i],
                            fs::last_write_time(run.files[i]) + std::chrono::seconds(1));
        others += fs::file_size(run.files[i]);
    }
    const RunFolder folder(run.directory / "run");
    folder.describe(run.config);
    ShardWatch watch(folder, run.shards, 3, run.world);
    watch.finish([] { return false; });
    CHECK(watch.found_damage());
    CHECK(watch.bytes_left() == others);
}

TEST_CASE("shards without a hash get one in the run's manifest, and a swap is noticed later") {
    const Run run(false);
    CHECK_FALSE(start(run, 0));
    const Json manifest = read_json(run.directory / "run/manifest.json");
    for (size_t i = 0; i < 3; ++i)
        CHECK((i < 2 ? manifest["train"][i] : manifest["val"][0])["xxh3"] ==
              hash_file(run.files[i]));
    CHECK_FALSE(start(run, 4));
    CHECK(read_json(run.directory / "run/manifest.json") == manifest);

    const auto i = static_cast<size_t>(random_int(0, 2));
    run.damage(i);
    const auto damage = start(run, 4);
    REQUIRE(damage);
    CHECK(contains(damage->message, run.files[i].string() + " is not the file that this run read"));
    // As the message advises.
    fs::remove(run.directory / "run/manifest.json");
    CHECK_FALSE(start(run, 4));
    CHECK_FALSE(start(run, 4));
}

TEST_CASE("a watch that ends before it is done keeps what it has read and leaves the rest") {
    const Run run(true);
    const uint64_t others = fs::file_size(run.files[1]) + fs::file_size(run.files[2]);
    {
        const RunFolder folder(run.directory / "run");
        folder.describe(run.config);
        ShardWatch watch(folder, run.shards, 3, run.world);
        watch.finish([&] { return watch.bytes_left() < others; });  // in the middle of the second
        CHECK_FALSE(watch.settle());
    }
    const size_t kept = run.kept()["files"].size();
    REQUIRE(kept >= 1);  // more if the thread was faster
    run.damage_secretly(0);
    int64_t sound_step = 0;
    if (kept < 3) {
        run.damage_secretly(2);
        CHECK(start(run, 6, &sound_step)->message ==
              error_of([&] { require_undamaged(recorded_shards({run.files[2]})); }));
        CHECK(sound_step == 3);
        return;
    }
    CHECK_FALSE(start(run, 6, &sound_step));
    CHECK(sound_step == all_steps);
}

TEST_CASE("the thread leaves the processor to the run") {
    // With a hundredth of a core, 256 MB take seconds; with a whole core, less than the 300 ms.
    const TemporaryDirectory directory;
    const fs::path large = directory / "large.bin";
    write(large, "");
    fs::resize_file(large, 256 << 20);
    const RunFolder folder(directory / "run");
    folder.describe({});
    const World world;
    ShardWatch watch(folder, {{large}}, 0, world);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(watch.bytes_left() > 0);
}
