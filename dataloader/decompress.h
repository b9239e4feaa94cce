// The unpacked bytes of an input: a file (plain, gzip or zstd) or standard input.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// One line each for zlib, libzstd, snappy and liblz4: the version, or that this build does not
/// have it.
std::string describe_decompressors();

enum class Compression { none, gzip, zstd };

/// Unpacks one format as a stream. (Implemented by zlib and libzstd.)
class Decoder {
  public:
    virtual ~Decoder() = default;
    /// Takes bytes from the front of `in` and writes at most `size` bytes to `to`. Returns how many
    /// it has written; 0 if it needs more input. Throws Error, with just the reason, for invalid
    /// data, after it has returned all bytes before them. (zstd does not return the bytes of the
    /// last block before them.)
    virtual size_t decode(std::string_view& in, char* to, size_t size) = 0;
    /// Whether the data may end here: after a gzip member or a zstd frame.
    virtual bool at_end() const = 0;
};

/// Reads an input once, from beginning to end.
class ByteStream {
  public:
    /// path "-" is standard input. Throws Error when the file cannot be opened or is not a regular
    /// file, and for a compression that this build does not support. While `stop` is set, waiting
    /// for standard input ends with an Error. With `skip_damage`, compressed data end where they
    /// are damaged. `held` has the bytes of standard input that were already read; they come first.
    ByteStream(std::string path, Compression compression, const std::atomic<bool>& stop,
               bool skip_damage = false, std::shared_ptr<const std::string> held = nullptr);
    ~ByteStream();
    ByteStream(const ByteStream&) = delete;
    ByteStream& operator=(const ByteStream&) = delete;

    /// Reads the next `size` bytes and returns how many; fewer only at the end. The members of a
    /// gzip file, or the frames of a zstd file, are one stream. Throws Error for truncated and
    /// damaged data, naming file and byte; when the file's size or time of last change is no longer
    /// what it was when opened; and for what begins like gzip, zstd, UTF-16, UTF-32, a Git LFS
    /// pointer, a token shard, or Parquet under another name.
    size_t read(char* to, size_t size);

    /// What is damaged, and where, if read() ended at damage; else empty.
    const std::string& damage() const { return damage_; }

    /// Bytes of the file read so far (compressed bytes if it is compressed).
    int64_t file_bytes() const { return file_bytes_; }
    /// Size and time of last change (ns) of the file when it was opened; 0 for standard input.
    int64_t size() const { return size_; }
    int64_t modified() const { return modified_; }

  private:
    size_t read_file(char* to, size_t size);
    size_t unpack(char* to, size_t size);
    void unpack_more();
    void end_at_damage(std::string what);
    void check_unchanged() const;
    void refuse_what_is_no_text(std::string_view beginning) const;

    std::string path_;
    const std::atomic<bool>& stop_;
    const std::shared_ptr<const std::string> held_;
    int file_ = -1;
    int64_t size_ = 0, modified_ = 0, file_bytes_ = 0;
    std::unique_ptr<Decoder> decoder_;  // null: plain
    const bool skip_damage_;
    std::string damage_;
    std::vector<char> packed_, unpacked_;
    std::string_view unread_, ready_;  // of packed_ and unpacked_
    bool begins_ = true;               // nothing has been read yet
};

}  // namespace train_gpt
