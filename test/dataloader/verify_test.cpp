// Files checked against the sizes and hashes that manifests recorded.
#include "dataloader/verify.h"

#include "base/file.h"
#include "dataloader/manifest.h"
#include "dataloader/shard.h"
#include "test/dataloader/shard_files.h"

using namespace train_gpt;

namespace {

std::string random_bytes(int64_t n) {
    std::string bytes;
    for (; n > 0; --n) bytes += static_cast<char>(random_int(0, 255));
    return bytes;
}

}  // namespace

TEST_CASE(
    "a file read in pieces has the hash of the whole, and one truncated meanwhile is an error") {
    const TemporaryDirectory directory;
    constexpr auto piece = static_cast<int64_t>(FileReading::piece_bytes);
    for (const int64_t size :
         {int64_t{0}, random_int(1, 1000), piece, piece + 1, 3 * piece + random_int(-5, 5)}) {
        const std::string path = directory / "file", bytes = random_bytes(size);
        write(path, bytes);
        FileReading reading(path);
        while (reading.read_piece()) {
        }
        CHECK(reading.bytes_read() == static_cast<uint64_t>(size));
        CHECK(reading.digest() == hash_text(bytes));
        CHECK(hash_file(path) == hash_text(bytes));
    }
    write(directory / "file", random_bytes(2 * piece));
    FileReading reading(directory / "file");
    REQUIRE(reading.read_piece());
    std::filesystem::resize_file(directory / "file", 10);
    CHECK(contains(error_of([&] { reading.read_piece(); }), "it was cut short"));
    CHECK(contains(error_of([&] { FileReading(directory / "none"); }), "No such file"));
}

TEST_CASE("one changed byte anywhere is damage, and files without a record are reported as such") {
    const TemporaryDirectory directory;
    const std::string glob =
        write_shards(directory.path(), {random_tokens(500, 300), random_tokens(400, 300)}, 300);
    const auto files = glob_files(glob);
    for (const RecordedFile& file : recorded_shards(files)) {
        CHECK(file.hash.empty());
        CHECK(verify_file(file) == FileState::no_hash);
    }

    write(directory / "tokenizer.json", "{}");
    DataManifest manifest;
    manifest.complete = true;
    manifest.tokenizer = "tokenizer.json";
    manifest.tokenizer_hash = hash_text("{}");
    for (const auto& path : files)
        manifest.shards.push_back({path.filename().string(), "train", 1, 1, hash_file(path)});
    write_data_manifest(directory.path(), manifest);
    std::vector<RecordedFile> recorded = recorded_shards(files);
    require_undamaged(recorded);

    std::string bytes = read(files[1]);
    bytes[static_cast<size_t>(random_int(0, std::ssize(bytes) - 1))] ^=
        static_cast<char>(1 << random_int(0, 7));
    write(files[1], bytes);
    CHECK(verify_file(recorded[0]) == FileState::good);
    CHECK(verify_file(recorded[1]) == FileState::damaged);
    CHECK(contains(error_of([&] { require_undamaged(recorded); }),
                   files[1].string() + " is damaged"));

    std::filesystem::remove(files[0]);
    write(directory / "extra.bin", "");
    std::vector<FileState> states;
    for (const RecordedFile& file : recorded_data(directory.path()))
        states.push_back(verify_file(file));
    CHECK(states ==
          std::vector{FileState::good, FileState::missing, FileState::damaged, FileState::no_hash});
}
