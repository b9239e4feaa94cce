// Verification: whether files are still as they were when a manifest recorded their sizes and hashes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/hash.h"

namespace train_gpt {

/// A file and what a manifest says of it.
struct RecordedFile {
    std::filesystem::path path;
    std::filesystem::path manifest;  // empty: none speaks of it
    std::optional<uint64_t> bytes;   // nothing: not recorded
    std::string hash;                // hash_file() of it; empty: not recorded
};

enum class FileState { good, damaged, no_hash, missing };
/// "ok", "damaged", "no hash", "missing"
const char* name_of(FileState state);

/// Reads the whole file where its hash is recorded. Throws Error when it cannot be read.
FileState verify_file(const RecordedFile& file, const Pulse& pulse = {});

/// Token shards, with what the data.json beside each says of it. A damaged data.json is an Error.
std::vector<RecordedFile> recorded_shards(const std::vector<std::filesystem::path>& shards);

/// All that FOLDER/data.json lists, then shards in the folder that it does not list.
std::vector<RecordedFile> recorded_data(const std::filesystem::path& folder);

/// The sentence on a shard that is not as its manifest says, with what to do.
std::string describe_damage(const RecordedFile& shard);

/// Throws Error with describe_damage() of the first of these shards that is damaged.
void require_undamaged(const std::vector<RecordedFile>& shards);

/// A file being read for its hash, piece by piece, past a mapping of it: a file that is cut short
/// while it is read is an Error. What the reading brings into the system's page cache leaves it
/// again; what was there before stays.
class FileReading {
  public:
    /// Throws Error when the file cannot be opened.
    explicit FileReading(std::filesystem::path path);
    ~FileReading();
    FileReading(const FileReading&) = delete;
    FileReading& operator=(const FileReading&) = delete;

    /// Reads a piece; false when there was none left.
    bool read_piece();
    /// Of what has been read.
    std::string digest() const { return hash_.digest(); }
    uint64_t bytes_read() const { return offset_; }

    static constexpr size_t piece_bytes = 1 << 20;

  private:
    bool is_cached(size_t bytes) const;

    std::filesystem::path path_;
    int file_ = -1;
    uint64_t size_ = 0, offset_ = 0;
    void* mapping_ = nullptr;  // only asked what of it is cached
    std::vector<std::byte> piece_;
    Hash hash_;
};

}  // namespace train_gpt
