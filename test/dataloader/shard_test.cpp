#include "dataloader/shard.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/dataloader/shard_files.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

std::string words(const std::vector<uint32_t>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

std::vector<uint32_t> read_all(const TokenShards& shards) {
    std::vector<uint32_t> tokens;
    for (int i = 0; i < shards.shard_count(); ++i) {
        std::vector<int32_t> part(static_cast<size_t>(shards.shard_tokens(i)));
        shards.copy(i, 0, shards.shard_tokens(i), part.data());
        tokens.insert(tokens.end(), part.begin(), part.end());
    }
    return tokens;
}

/// A minimal valid shard of 16-bit tokens, made by hand from the description of the format.
std::string shard_bytes(const std::vector<uint16_t>& tokens) {
    std::vector<uint32_t> header(256);
    header[0] = 20240520;
    header[1] = 1;
    header[2] = static_cast<uint32_t>(tokens.size());
    return words(header) +
           std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
}

}  // namespace

TEST_CASE("a lack of descriptors is waited out, and named for what it is") {
    const TemporaryDirectory folder;
    const std::string path = folder / "x_000000.bin";
    write(path, shard_bytes({1, 2, 3}));
    std::fflush(nullptr);
    for (const bool is_freed : {true, false}) {
        const pid_t child = ::fork();
        if (child == 0) {
            const TokenShards shards(path, 300);
            const rlimit limit{64, 64};
            ::setrlimit(RLIMIT_NOFILE, &limit);
            std::vector<int> held;
            for (int fd; (fd = ::dup(0)) >= 0;) held.push_back(fd);
            std::thread other([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
                if (is_freed) ::close(held.back());
            });
            int32_t token = 0;
            const std::string error = error_of([&] { shards.copy(0, 1, 1, &token); });
            other.join();
            const bool is_named =
                contains(error, "cannot read " + path) &&
                contains(error, "has as many files and connections open as it may") &&
                !contains(error, "stay in place");
            ::_exit(is_freed ? (error.empty() && token == 2 ? 7 : 1) : is_named ? 7 : 2);
        }
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(status == 7 << 8);
    }
}

TEST_CASE("shards are byte for byte llm.c's, 16-bit up to 65536 ids and 32-bit above") {
    const TemporaryDirectory folder;
    for (const uint32_t vocab_size : {300u, 65536u, 65537u, 128256u}) {
        CAPTURE(vocab_size);
        auto tokens = random_tokens(random_int(1, 2000), vocab_size);
        tokens.back() = vocab_size - 1;
        ShardWriter writer(folder.path(), "x", vocab_size, 1 << 20);
        writer.append(tokens);
        const auto files = writer.finish();
        REQUIRE(files.size() == 1);
        CHECK(files[0].path == folder / "x_000000.bin");
        CHECK(files[0].tokens == static_cast<int64_t>(tokens.size()));

        std::vector<uint32_t> header(256);
        const bool wide = vocab_size > 65536;
        header[0] = wide ? 20240801 : 20240520;
        header[1] = wide ? 7 : 1;
        header[2] = static_cast<uint32_t>(tokens.size());
        std::string expected = words(header);
        for (const uint32_t token : tokens)
            expected.append(reinterpret_cast<const char*>(&token), wide ? 4 : 2);
        CHECK(read(files[0].path) == expected);
        CHECK(read_all(TokenShards(files[0].path, vocab_size)) == tokens);
    }
}

TEST_CASE("a stream written in random pieces reads back whole from shards of the wanted size") {
    const TemporaryDirectory folder;
    const uint32_t vocab_size = random_int(0, 1) ? 1000 : 100000;
    const auto tokens = random_tokens(random_int(5000, 700000), vocab_size);
    const int64_t shard_tokens = random_int(3000, 300000);
    CAPTURE(tokens.size(), shard_tokens);
    ShardWriter writer(folder.path(), "train", vocab_size, shard_tokens);
    for (size_t at = 0; at < tokens.size();) {
        const size_t n =
            std::min<size_t>(tokens.size() - at, static_cast<size_t>(random_int(0, 9000)));
        writer.append({tokens.data() + at, n});
        at += n;
    }
    const auto files = writer.finish();
    const TokenShards shards(folder / "train_*.bin", vocab_size);
    REQUIRE(shards.shard_count() == static_cast<int>(files.size()));
    CHECK(shards.total_tokens() == static_cast<int64_t>(tokens.size()));
    for (int i = 0; i < shards.shard_count(); ++i) {
        CHECK(shards.shard_tokens(i) == files[static_cast<size_t>(i)].tokens);
        CHECK(shards.shard_path(i) == files[static_cast<size_t>(i)].path);
        if (i + 1 < shards.shard_count()) CHECK(shards.shard_tokens(i) == shard_tokens);
    }
    CHECK(read_all(shards) == tokens);

    std::vector<int32_t> some(50);
    const int64_t offset = random_int(0, shards.shard_tokens(0) - 50);
    shards.copy(0, offset, 50, some.data());
    CHECK(std::equal(some.begin(), some.end(), tokens.begin() + offset));
}

TEST_CASE(
    "the fingerprint of shards is that of their sizes, beginnings and ends, wherever they are") {
    const TemporaryDirectory folder;
    std::vector<std::vector<uint32_t>> shards;
    for (int i = 0; i < 3; ++i) shards.push_back(random_tokens(random_int(2, 9000), 300));
    const auto fingerprint = [&](const char* name) {
        const fs::path at = folder / name;
        fs::remove_all(at);
        fs::create_directory(at);
        return TokenShards(write_shards(at.string(), shards, 300), 300).fingerprint();
    };
    const std::string before = fingerprint("a");
    CHECK(fingerprint("b") == before);
    for (auto& shard : shards) {
        CAPTURE(shard.size());
        for (uint32_t* token : {&shard.front(), &shard.back()}) {
            const uint32_t kept = *token;
            *token = kept == 7 ? 8 : 7;
            CHECK(fingerprint("b") != before);
            *token = kept;
        }
        shard.push_back(7);
        CHECK(fingerprint("b") != before);
        shard.pop_back();
    }
    CHECK(fingerprint("b") == before);
    std::swap(shards[0], shards[1]);
    if (shards[0] != shards[1]) CHECK(fingerprint("b") != before);
}

TEST_CASE("a writer that does not finish leaves no file, and refuses ids outside the vocabulary") {
    const TemporaryDirectory folder;
    {
        ShardWriter writer(folder.path(), "train", 100, 1000);
        writer.append(random_tokens(500, 100));
        const std::string message = error_of([&] {
            writer.append(std::vector<uint32_t>{99, 100});
        });
        CHECK(contains(message, "token id 100"));
        CHECK(contains(message, "train_000000.bin"));
    }
    CHECK(fs::is_empty(folder.path()));
    CHECK_THROWS_AS(ShardWriter(folder.path(), "train", 100, 1), Error);
}

TEST_CASE("a faulty header or size is refused with the file and the byte") {
    const TemporaryDirectory folder;
    const std::string path = folder / "bad.bin";
    const std::string good = shard_bytes({1, 2, 3, 4, 5});
    const auto with = [&](size_t index, uint32_t value) {
        std::string bytes = good;
        std::memcpy(bytes.data() + index * 4, &value, 4);
        return bytes;
    };
    struct Case {
        std::string bytes, says;
    };
    const std::vector<Case> cases{
        {"", "0 bytes"},
        {good.substr(0, 1023), "1023 bytes"},
        {with(0, 20240522), "at byte 0 it has 20240522"},
        {with(1, 7), "version 7 at byte 4"},
        {with(2, 6), "says 6 tokens (byte 8)"},
        {with(2, 4), "says 4 tokens (byte 8)"},
        {with(3, 1), "tokens (byte 8)"},
        {good.substr(0, good.size() - 2), "hold 4"},
        {good.substr(0, good.size() - 1), "hold 4 and part of another"},
        {good + "xx", "hold 6"},
        {with(0, 20240801), "version 1 at byte 4"},
    };
    for (const Case& bad : cases) {
        write(path, bad.bytes);
        const std::string message = error_of([&] { TokenShards(path, 100); });
        CAPTURE(message, bad.says);
        CHECK(contains(message, path));
        CHECK(contains(message, bad.says));
    }
    write(path, good);
    CHECK(read_all(TokenShards(path, 6)) == std::vector<uint32_t>{1, 2, 3, 4, 5});
    CHECK(contains(error_of([&] { TokenShards(folder / "none_*.bin", 6); }), "none_*.bin"));
    CHECK(contains(error_of([&] { TokenShards(folder.path(), 6); }), folder.path()));
    CHECK_THROWS_AS(TokenShards(path, 0), Error);
    CHECK_THROWS_AS(TokenShards(path, uint32_t{1} << 31), Error);
}

TEST_CASE("a token id outside the vocabulary is found with file, byte and id") {
    const TemporaryDirectory folder;
    for (const uint32_t stored_vocab : {60000u, 200000u}) {
        const int width = stored_vocab > 65536 ? 4 : 2;
        const uint32_t vocab_size = 500;
        auto tokens = random_tokens(random_int(100, 5000), vocab_size);
        const auto n = static_cast<int64_t>(tokens.size());
        const int64_t where = random_int(10, n - 1);
        const uint32_t bad = static_cast<uint32_t>(random_int(vocab_size, stored_vocab - 1));
        tokens[static_cast<size_t>(where)] = bad;
        fs::remove(folder / "train_000000.bin");
        const TokenShards shards(write_shards(folder.path(), {tokens}, stored_vocab), vocab_size);
        std::vector<int32_t> out(tokens.size());
        shards.copy(0, 0, where, out.data());
        const std::string message = error_of([&] { shards.copy(0, 5, n - 5, out.data()); });
        CAPTURE(message);
        CHECK(contains(message, folder / "train_000000.bin"));
        CHECK(contains(message, concat("token id ", bad, " ")));
        CHECK(contains(message, concat("byte ", 1024 + where * width, ",")));
    }
}

TEST_CASE("a shard that vanishes or changes its size in mid-run is an error, not a crash") {
    const TemporaryDirectory folder;
    const auto tokens = random_tokens(5000, 100);
    const TokenShards shards(write_shards(folder.path(), {tokens}, 100), 100);
    const fs::path path = shards.shard_path(0);
    std::vector<int32_t> out(tokens.size());
    fs::resize_file(path, 2000);
    CHECK(contains(error_of([&] { shards.copy(0, 4000, 100, out.data()); }), path.string()));
    fs::remove(path);
    CHECK(contains(error_of([&] { shards.copy(0, 0, 100, out.data()); }), path.string()));
}

TEST_CASE("a shard of more than 2^31 and of more than 2^32 tokens is read to its last token") {
    const TemporaryDirectory folder;
    for (const int64_t tokens :
         {(int64_t{1} << 31) + random_int(0, 100000), (int64_t{1} << 32) + random_int(1, 100000)}) {
        for (const bool high_word : {false, true}) {
            CAPTURE(tokens, high_word);
            // A sparse file: it takes no space on the disk.
            const std::string path = folder / "large.bin";
            std::vector<uint32_t> header(256);
            header[0] = 20240520;
            header[1] = 1;
            header[2] = static_cast<uint32_t>(tokens);
            header[3] = high_word ? static_cast<uint32_t>(tokens >> 32) : 0;
            write(path, words(header));
            fs::resize_file(path, static_cast<uintmax_t>(1024 + tokens * 2));
            const std::vector<uint16_t> last{11, 22, 33};
            {
                std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
                file.seekp(1024 + (tokens - 3) * 2);
                file.write(reinterpret_cast<const char*>(last.data()), 6);
            }
            const TokenShards shards(path, 50);
            CHECK(shards.total_tokens() == tokens);
            std::vector<int32_t> out(4, -7);
            shards.copy(0, tokens - 4, 4, out.data());
            CHECK(out == std::vector<int32_t>{0, 11, 22, 33});
            fs::remove(path);
        }
    }
}

TEST_CASE(
    "synthetic tokens need no file, stay in the vocabulary, cover it and are always the same") {
    const uint32_t vocab_size = static_cast<uint32_t>(random_int(1, 3000));
    CAPTURE(vocab_size);
    const TokenShards shards("synthetic", vocab_size), again("synthetic", vocab_size);
    CHECK(shards.synthetic());
    CHECK(shards.shard_count() == 1);
    CHECK(shards.total_tokens() == 1 << 24);
    std::vector<int32_t> out(100000), same(out.size());
    const int64_t offset = random_int(0, (1 << 24) - 100000);
    shards.copy(0, offset, 100000, out.data());
    again.copy(0, offset, 100000, same.data());
    CHECK(out == same);
    std::vector<bool> seen(vocab_size);
    for (const int32_t token : out) {
        REQUIRE(token >= 0);
        REQUIRE(static_cast<uint32_t>(token) < vocab_size);
        seen[static_cast<size_t>(token)] = true;
    }
    CHECK(std::count(seen.begin(), seen.end(), true) >= static_cast<int64_t>(vocab_size) * 9 / 10);
}
