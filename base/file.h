// File access for the whole project: read-only maps, and writes that appear only when complete.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
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

/// A file that appears only when complete: bytes go to `path` + ".tmp" in the same folder; commit()
/// flushes, fsyncs and renames. Destroyed without commit(), it removes the temporary file and
/// leaves what was at `path` alone. Every failed call (disk full, read-only folder) throws Error
/// with the path and the system's reason.
class AtomicFile {
  public:
    explicit AtomicFile(std::filesystem::path path);
    /// Continues after the first `size` bytes of a file whose previous writer had synced at least
    /// that many before it ended, with or without commit(). Throws Error when the file is shorter.
    AtomicFile(std::filesystem::path path, uint64_t size);
    ~AtomicFile();
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;

    /// Appends bytes. Flushes to disk after each gigabyte, so that no single flush takes long.
    void write(std::span<const std::byte> bytes);
    void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
    /// Overwrites bytes written earlier (a header whose counts are known at the end).
    void write_at(uint64_t offset, std::span<const std::byte> bytes);
    uint64_t size() const { return size_; }
    /// Flushes everything written so far to disk. From then on, destruction without commit() keeps
    /// the temporary file, so that a later writer can continue it.
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

/// Flushes what was written to a file to disk, as far as the disk can say so. Does nothing if there
/// is no such file.
void sync_file(const std::filesystem::path& path);
/// Flushes a folder's entries to disk, so that a rename in it survives a power loss.
void sync_directory(const std::filesystem::path& directory);

/// The existing regular files that a shell glob ("data/train_*.bin") matches, sorted by name.
/// A pattern without wildcards must name an existing file. Throws Error when nothing matches, or
/// when a match is not a regular file.
std::vector<std::filesystem::path> glob_files(const std::string& pattern);

/// Called from time to time during long work, to show that it is still making progress.
using Pulse = std::function<void()>;

/// 64-bit xxHash (XXH3) of bytes or of a file's contents, as 16 hex digits.
std::string hash_text(std::string_view bytes);
std::string hash_file(const std::filesystem::path& path, const Pulse& pulse = {});

/// Makes a folder and its parents; throws Error with the reason when that is not possible.
void make_directory(const std::filesystem::path& directory);

/// A time, as a file's status has it, in ns.
inline int64_t nanoseconds(const timespec& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace train_gpt
