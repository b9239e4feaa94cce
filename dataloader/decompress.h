// The bytes of an input, unpacked: a file, plain, gzip or zstd, or standard input.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// zlib and libzstd with their versions, or that this build does not have them, a line each.
std::string describe_decompressors();

enum class Compression { none, gzip, zstd };

/// Unpacks one format as a stream. (Implemented by zlib and libzstd.)
class Decoder {
  public:
    virtual ~Decoder() = default;
    /// Takes bytes from the front of `in`, writes at most `size` to `to` and returns how many; 0
    /// when it needs more input. Throws Error with the reason alone for what is no such data,
    /// behind the bytes before it (of zstd, but for the last block).
    virtual size_t decode(std::string_view& in, char* to, size_t size) = 0;
    /// Whether the data may end here: behind a gzip member or a zstd frame.
    virtual bool at_end() const = 0;
};

/// Reads an input once, from front to back.
class ByteStream {
  public:
    /// path "-" is standard input. Throws Error when the file cannot be opened or is no regular
    /// file, and for a compression that this build lacks. While `stop` is set, waiting for standard
    /// input ends with an Error. With `skip_damage`, compressed data end where they are damaged.
    /// `held` are bytes of standard input that were read before and come first.
    ByteStream(std::string path, Compression compression, const std::atomic<bool>& stop,
               bool skip_damage = false, std::shared_ptr<const std::string> held = nullptr);
    ~ByteStream();
    ByteStream(const ByteStream&) = delete;
    ByteStream& operator=(const ByteStream&) = delete;

    /// The next bytes; fewer than `size` only at the end. Members of a gzip file and frames of a
    /// zstd file are one stream. Throws Error for truncated and damaged data, naming file and byte;
    /// when the file has changed its size or time since it was opened; and for a plain input that
    /// begins as gzip, zstd or UTF-16 do.
    size_t read(char* to, size_t size);

    /// What is damaged, and where, when read() has ended there; empty: nothing.
    const std::string& damage() const { return damage_; }

    /// Bytes of the file that have been read so far (compressed ones, where it is).
    int64_t file_bytes() const { return file_bytes_; }
    /// Size and time of last change (ns) of the file as it was opened; 0 for standard input.
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
    bool begins_ = true;               // nothing has been read
};

}  // namespace train_gpt
