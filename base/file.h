// Files as the project uses them: read-only maps, whole reads, and writes that appear only when
// complete.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// A whole file mapped read-only. Throws Error when it is missing, unreadable or a directory.
/// An empty file gives an empty span.
class MappedFile {
  public:
    MappedFile() = default;
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) noexcept;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }
    std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
    const std::filesystem::path& path() const { return path_; }

  private:
    std::filesystem::path path_;
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

/// A file that comes into being whole: bytes go to `path` + ".tmp" beside it; commit() flushes,
/// fsyncs and renames. Destroyed without commit(), it removes the temporary file and leaves what
/// was at `path` alone. Every failed call (disk full, read-only folder) throws Error with the path
/// and the system's reason.
class AtomicFile {
  public:
    explicit AtomicFile(std::filesystem::path path);
    /// Goes on behind the first `size` bytes of a file whose writer has synced that many and is gone,
    /// whether it had come to commit() or not. Throws Error when there are fewer.
    AtomicFile(std::filesystem::path path, uint64_t size);
    ~AtomicFile();
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;

    /// Has at most about a gigabyte in the system's memory and not on disk, so that no call takes long.
    void write(std::span<const std::byte> bytes);
    void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
    /// Overwrites bytes written earlier (a header whose counts are known at the end).
    void write_at(uint64_t offset, std::span<const std::byte> bytes);
    uint64_t size() const { return size_; }
    /// Has everything written so far on disk, and from now on leaves the temporary file when it is
    /// destroyed without commit(): for another to go on with.
    void sync();
    void commit();

  private:
    void flush();

    std::filesystem::path path_, temporary_;
    std::FILE* file_ = nullptr;
    uint64_t size_ = 0, flushed_ = 0;
    bool stays_ = false;
};

/// Writes a whole file atomically (see AtomicFile).
void write_file(const std::filesystem::path& path, std::string_view text);

/// Flushes a folder's entries to disk, so that a rename in it survives a power loss.
void sync_directory(const std::filesystem::path& directory);

/// The existing regular files that a shell glob ("data/train_*.bin") matches, sorted by name.
/// A pattern without wildcards must exist. Throws Error when nothing matches, or a match is a
/// directory.
std::vector<std::filesystem::path> glob_files(const std::string& pattern);

/// Called now and then by what takes long, for others to see that it goes on.
using Pulse = std::function<void()>;

/// 64-bit xxHash (XXH3) of bytes, and of a file's, as 16 hex digits.
std::string hash_text(std::string_view bytes);
std::string hash_file(const std::filesystem::path& path, const Pulse& pulse = {});

/// Makes a folder and its parents; throws Error with the reason when that is not possible.
void make_directory(const std::filesystem::path& directory);

}  // namespace train_gpt
