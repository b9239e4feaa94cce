// Verification: whether files are unchanged since a manifest recorded their sizes and hashes.
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

/// A file and what a manifest records about it.
struct RecordedFile {
    std::filesystem::path path;
    std::filesystem::path manifest;  // empty: no manifest lists the file
    std::optional<uint64_t> bytes;   // nothing: not recorded
    std::string hash;                // hash_file() of it; empty: not recorded
};

enum class FileState { good, damaged, no_hash, missing };
/// "ok", "damaged", "no hash", "missing"
const char* name_of(FileState state);

/// Compares a file with its record; reads the whole file if a hash is recorded. Throws Error when
/// it cannot be read.
FileState verify_file(const RecordedFile& file, const Pulse& pulse = {});

/// Token shards, each with what the data.json in its folder records. A damaged data.json is an
/// Error.
std::vector<RecordedFile> recorded_shards(const std::vector<std::filesystem::path>& shards);

/// All files that FOLDER/data.json lists, then the shards in the folder that it does not list.
/// Throws Error when data.json is missing, damaged or marked incomplete.
std::vector<RecordedFile> recorded_data(const std::filesystem::path& folder);

/// The message for a shard that differs from its hash in the manifest, with what to do.
std::string describe_damage(const RecordedFile& shard);

/// Throws Error with describe_damage() for the first of these shards that is damaged.
void require_undamaged(const std::vector<RecordedFile>& shards);

/// Reads a file piece by piece for its hash. It reads with pread() and not through a mapping, so
/// that a file truncated meanwhile is an Error. Pages that it brings into the page cache are
/// dropped again; pages that were there before stay.
class FileReading {
  public:
    /// Throws Error when the file cannot be opened.
    explicit FileReading(std::filesystem::path path);
    ~FileReading();
    FileReading(const FileReading&) = delete;
    FileReading& operator=(const FileReading&) = delete;

    /// Reads a piece; false if none was left.
    bool read_piece();
    /// The hash of what has been read.
    std::string digest() const { return hash_.digest(); }
    uint64_t bytes_read() const { return offset_; }

    static constexpr size_t piece_bytes = 1 << 20;

  private:
    bool is_cached(size_t bytes) const;

    std::filesystem::path path_;
    int file_ = -1;
    uint64_t size_ = 0, offset_ = 0;
    void* mapping_ = nullptr;  // only used to find out which pages are cached
    std::vector<std::byte> piece_;
    Hash hash_;
};

}  // namespace train_gpt
