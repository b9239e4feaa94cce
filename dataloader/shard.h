// Token shards: files of token ids in llm.c's format, written atomically.
//
//     bytes 0..1023   256 int32: [0] magic, [1] version, [2] number of tokens, the rest 0
//     bytes 1024..    the tokens: uint16 with magic 20240520 and version 1,
//                                 uint32 with magic 20240801 and version 7
//
// Everything is little-endian. The format has 32 bits for the number of tokens; a file may have
// more tokens than that. The number is therefore taken from the size of the file: (size - 1024) /
// width. Header [2] must equal its low 32 bits (so up to 2^31 - 1 tokens the format is exactly
// llm.c's), and header [3], which llm.c leaves 0, must be 0 or its high 32 bits. ShardWriter writes
// both.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace train_gpt {

/// Whether a file that begins with these bytes is a token shard.
bool begins_as_shard(std::string_view bytes);

/// Throws Error unless the file has a shard's header and as many tokens as the header says.
void require_shard(const std::filesystem::path& path);

/// A shard as ShardWriter wrote it.
struct ShardFile {
    std::filesystem::path path;
    int64_t tokens = 0;
};

/// Writes one stream of tokens as FOLDER/PREFIX_000000.bin, PREFIX_000001.bin, … with
/// `shard_tokens` tokens each (the last has the rest). Each file appears when it is complete
/// (AtomicFile). Tokens have 16 bits if the vocabulary allows it (<= 65536), else 32.
class ShardWriter {
  public:
    /// `written`: shards() of an earlier writer of the same stream at the time of a sync(). This
    /// writer continues after them; whatever the earlier one wrote later is discarded.
    ShardWriter(std::filesystem::path folder, std::string prefix, uint32_t vocab_size,
                int64_t shard_tokens, std::vector<ShardFile> written = {});
    ~ShardWriter();
    ShardWriter(const ShardWriter&) = delete;
    ShardWriter& operator=(const ShardWriter&) = delete;

    /// Appends tokens. Throws Error for an id >= vocab_size and for a failed write.
    void append(std::span<const uint32_t> tokens);

    /// All shards so far; the last may be incomplete.
    const std::vector<ShardFile>& shards() const { return shards_; }

    /// Flushes everything appended so far to disk. From now on, an incomplete shard is kept when
    /// the writer is destroyed (under its temporary name, see AtomicFile).
    void sync();

    /// Completes the last shard and returns all shards in order. Without this call, the last shard
    /// does not appear under its name.
    std::vector<ShardFile> finish();

  private:
    void close_shard();

    std::filesystem::path folder_;
    std::string prefix_;
    uint32_t vocab_size_;
    int64_t shard_tokens_;
    std::unique_ptr<AtomicFile> file_;
    std::vector<ShardFile> shards_;  // the last one is being written while file_ is set
    std::vector<std::byte> buffer_;
};

/// The tokens of all files that match a glob, sorted by name; each file is one shard. The pattern
/// "synthetic" stands for one shard of 2^24 pseudo-random tokens that needs no file: an endless
/// deterministic stream for benchmarks (for a file of that name, write "./synthetic").
class TokenShards {
  public:
    /// Checks the header of every file against its size. Throws Error with the file, the byte and
    /// what is wrong. Token ids are checked when they are read. 1 <= vocab_size < 2^31.
    TokenShards(const std::string& pattern, uint32_t vocab_size);

    bool synthetic() const { return synthetic_; }
    uint32_t vocab_size() const { return vocab_size_; }
    int64_t total_tokens() const { return total_tokens_; }
    int shard_count() const { return static_cast<int>(shards_.size()); }
    int64_t shard_tokens(int shard) const { return shards_[static_cast<size_t>(shard)].tokens; }
    /// The file of a shard; empty for the synthetic one.
    const std::filesystem::path& shard_path(int shard) const {
        return shards_[static_cast<size_t>(shard)].path;
    }

    /// Distinguishes data sets without reading them completely: the number of shards and tokens,
    /// and a hash of the size and the first and last page of every shard.
    std::string fingerprint() const;

    /// out[0..n) = tokens [offset, offset + n) of a shard; the range must lie inside it. May be
    /// called from several threads at the same time. Throws Error for an id >= vocab_size (with
    /// file and byte offset) and when the file was removed or its size changed since the start.
    void copy(int shard, int64_t offset, int64_t n, int32_t* out) const;

  private:
    struct Shard {
        std::filesystem::path path;
        int64_t bytes = 0;  // of the file
        int64_t tokens = 0;
        int width = 0;  // bytes per token
    };

    static Shard open_shard(const std::filesystem::path& path);
    friend void require_shard(const std::filesystem::path& path);

    uint32_t vocab_size_;
    bool synthetic_ = false;
    int64_t total_tokens_ = 0;
    std::vector<Shard> shards_;
};

}  // namespace train_gpt
