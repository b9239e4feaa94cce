// scripts/data.sh
#include <cstdlib>
#include <filesystem>
#include <string>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "dataloader/manifest.h"
#include "test/catch.h"
#include "test/data_server.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

std::string random_bytes(size_t n) {
    std::string bytes(n, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_int(0, 255));
    return bytes;
}

}  // namespace

TEST_CASE(
    "a download that breaks off continues, is checked with the server's hash, and is done once",
    "[scripts]") {
    const DataServer server;
    // Served under the published name, but with bytes that do not match the script's hash.
    write(server.served("encoder.json"), "{}");
    const ProgramResult wrong = server.run("fineweb-edu-10b");
    INFO(wrong.output);
    CHECK(wrong.exit_code == 1);
    CHECK(contains(wrong.output, "is not what was published"));
    CHECK(fs::exists(server.data("gpt2/encoder.json.wrong")));
    CHECK_FALSE(fs::exists(server.data("gpt2/encoder.json")));

    // Files that were already checked are not requested again.
    for (const char* name : {"encoder.json", "vocab.bpe"}) {
        write(server.data(std::string("gpt2/") + name), "here already");
        write(server.data(std::string("gpt2/") + name + ".sha256"), "checked");
        fs::last_write_time(server.data(std::string("gpt2/") + name),
                            fs::file_time_type::clock::now() - std::chrono::seconds(10));
    }
    const std::string names[] = {"edu_fineweb_val_000000.bin", "edu_fineweb_train_000001.bin",
                                 "edu_fineweb_train_000002.bin"};
    for (const std::string& name : names)
        write(server.served(name), random_bytes(static_cast<size_t>(random_int(2000, 5000))));
    const auto shard = [&](int i) { return server.data("fineweb-edu-10b/" + names[i]); };
    const ProgramResult broken = server.run("fineweb-edu-10b", {{"BREAK_AFTER", "1500"}});
    CHECK(broken.exit_code == 1);
    CHECK(contains(broken.output, "run the same command again"));
    CHECK(fs::file_size(shard(0) + ".part") == 1500);
    CHECK_FALSE(fs::exists(shard(0)));

    const ProgramResult whole = server.run("fineweb-edu-10b");
    INFO(whole.output);
    CHECK(whole.exit_code == 0);
    for (int i = 0; i < 3; ++i) CHECK(read(shard(i)) == read(server.served(names[i])));
    // It prints what to train on, which is the same as in the presets.
    const auto preset = nlohmann::json::parse(read("configs/gpt2-124m.json"), nullptr, true, true);
    for (const char* split : {"train", "val"}) {
        const std::string glob = preset["data"][split];
        REQUIRE(glob.starts_with("data/"));
        CHECK(contains(whole.output, concat("data.", split, "=", server.data(glob.substr(5)))));
        CHECK(glob_files(server.data(glob.substr(5))).size() == (split[0] == 't' ? 2 : 1));
    }
    const std::string asked = server.log();
    CHECK(server.run("fineweb-edu-10b").exit_code == 0);
    CHECK(server.log() == asked);

    // A partial file with other content is detected, and the next call starts again.
    fs::remove(shard(1));
    fs::remove(shard(1) + ".sha256");
    write(shard(1) + ".part", random_bytes(700));
    CHECK(server.run("fineweb-edu-10b").exit_code == 1);
    CHECK_FALSE(fs::exists(shard(1)));
    CHECK(server.run("fineweb-edu-10b").exit_code == 0);
    CHECK(read(shard(1)) == read(server.served(names[1])));
}

TEST_CASE("downloaded texts become shards, once", "[scripts]") {
    const DataServer server;
    const std::string stories = "One day a cat sat.\n<|endoftext|>\nOne day a dog ran.\n";
    const auto put = [&](const std::string& name, const std::string& content) {
        fs::create_directories(fs::path(server.data(name)).parent_path());
        write(server.data(name), content);
        fs::last_write_time(server.data(name),
                            fs::file_time_type::clock::now() - std::chrono::seconds(10));
        write(server.data(name + ".sha256"), "checked");
    };
    // Tiny Shakespeare, but with other text
    put("tinyshakespeare/input.txt", std::string(200, 'x') + "\nFirst Citizen:\n");
    write(server.served("TinyStoriesV2-GPT4-train.txt"), stories + stories);
    write(server.served("TinyStoriesV2-GPT4-valid.txt"), stories);

    const char* program = std::getenv("TRAIN_GPT");
    const Environment here{{"TRAIN_GPT", program ? program : "build/train_gpt"}};
    for (const std::string name : {"tinyshakespeare", "tinystories"}) {
        const ProgramResult first = server.run(name, here);
        INFO(first.output);
        REQUIRE(first.exit_code == 0);
        const DataManifest train = read_data_manifest(server.data(name));
        CHECK(train.complete);
        if (name == "tinystories") {
            CHECK(train.train_documents == 3);  // no separator between the two copies
            CHECK(train.val_documents == 0);
            const DataManifest valid = read_data_manifest(server.data(name + "/valid"));
            CHECK(valid.train_documents == 0);
            CHECK(valid.val_documents == 2);
            CHECK(valid.tokenizer_hash == train.tokenizer_hash);
        } else {
            CHECK(train.val_split == "tail");
        }
        // The presets for a text expect its shards and its vocabulary there.
        CHECK(contains(first.output, "data.train=" + server.data(name) + "/train_*.bin"));
        CHECK(fs::exists(server.data(name + "/tokenizer.json")));
        const auto made = fs::last_write_time(server.data(name + "/data.json"));
        CHECK(server.run(name, here).exit_code == 0);
        CHECK(fs::last_write_time(server.data(name + "/data.json")) == made);
    }
}

TEST_CASE("help lists the data sets, and starts nothing", "[scripts]") {
    const DataServer server;
    for (const char* flag : {"--help", "-h"}) {
        const ProgramResult help = server.run(flag);
        CHECK(help.exit_code == 0);
        for (const char* name :
             {"gpt2", "tinyshakespeare", "tinystories", "fineweb-edu-text", "SHARDS"})
            CHECK(contains(help.output, name));
    }
    CHECK(server.log().empty());
}

TEST_CASE("without a connection the script says which file to put where", "[scripts]") {
    const DataServer server;
    const ProgramResult offline = server.run("hellaswag", {{"OFFLINE", "1"}});
    CHECK(offline.exit_code == 1);
    CHECK(contains(offline.output, "cannot be reached"));
    CHECK(contains(offline.output, "/hellaswag_val.jsonl"));
    CHECK(contains(offline.output, "by hand"));
    const ProgramResult missing = server.run("hellaswag");
    CHECK(missing.exit_code == 1);
    CHECK(contains(missing.output, "may have moved"));
    const ProgramResult unknown = server.run("helaswag");
    CHECK(unknown.exit_code == 2);
    CHECK(contains(unknown.output, "helaswag"));
    CHECK(contains(unknown.output, "usage: "));
    CHECK(server.run("fineweb-10b", {{"SHARDS", "104"}}).exit_code == 1);
}
