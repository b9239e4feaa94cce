// Token shards: files of token ids in llm.c's format, written whole and read through memory maps.
//
//     bytes 0..1023   256 int32: [0] magic, [1] version, [2] number of tokens, the rest 0
//     bytes 1024..    the tokens: uint16 with magic 20240520 and version 1,
//                                 uint32 with magic 20240801 and version 7
//
// Everything is little-endian. The format gives the number of tokens 32 bits; a file may hold more.
// The truth is the size of the file: (size - 1024) / width. Header [2] must equal its low 32 bits
// (so up to 2^31 - 1 tokens the format is exactly llm.c's), and header [3], which llm.c leaves 0,
// must be 0 or its high 32 bits. ShardWriter writes both.
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

/// Whether a file that begins so is a token shard.
bool begins_as_shard(std::string_view bytes);

/// Throws Error unless the file's header is a shard's and promises as many tokens as the file holds.
void require_shard(const std::filesystem::path& path);

/// A shard as ShardWriter wrote it.
struct ShardFile {
    std::filesystem::path path;
    int64_t tokens = 0;
};

/// Writes one stream of tokens as FOLDER/PREFIX_000000.bin, PREFIX_000001.bin, … of `shard_tokens`
/// each (the last has the rest). Each file appears when it is complete (AtomicFile). 16-bit tokens
/// where the vocabulary allows (<= 65536), else 32.
class ShardWriter {
  public:
    /// `written`: shards() of an earlier writer of the same stream when it called sync(); this one
    /// goes on behind them, whatever the earlier one wrote since.
    ShardWriter(std::filesystem::path folder, std::string prefix, uint32_t vocab_size,
                int64_t shard_tokens, std::vector<ShardFile> written = {});
    ~ShardWriter();
    ShardWriter(const ShardWriter&) = delete;
    ShardWriter& operator=(const ShardWriter&) = delete;

    /// Appends tokens. Throws Error for an id >= vocab_size and when the disk refuses.
    void append(std::span<const uint32_t> tokens);

    /// All shards so far, of which the last may be incomplete.
    const std::vector<ShardFile>& shards() const { return shards_; }

    /// Has everything appended so far on disk. An incomplete shard stays from now on (beside its place,
    /// see AtomicFile) when the writer goes.
    void sync();

    /// Completes the last shard and returns all of them in order. Without it, the last shard does
    /// not come into being.
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

/// The tokens of all files that a glob matches, sorted by name, each one shard. The pattern
/// "synthetic" stands for one shard of 2^24 pseudo-random tokens that needs no file: an endless
/// deterministic stream for benchmarks (a file of that name is "./synthetic").
class TokenShards {
  public:
    /// Maps every file and checks its header against its size. Throws Error naming the file, the
    /// byte and what is wrong. Token ids are checked as they are read. 1 <= vocab_size < 2^31.
    TokenShards(const std::string& pattern, uint32_t vocab_size);

    bool synthetic() const { return synthetic_; }
    uint32_t vocab_size() const { return vocab_size_; }
    int64_t total_tokens() const { return total_tokens_; }
    int shard_count() const { return static_cast<int>(shards_.size()); }
    int64_t shard_tokens(int shard) const { return shards_[static_cast<size_t>(shard)].tokens; }
    /// The file of a shard; empty for the synthetic one.
    const std::filesystem::path& shard_path(int shard) const {
        return shards_[static_cast<size_t>(shard)].file.path();
    }

    /// Tells data apart without reading all of it: sizes of all shards, and a hash of each one's first and last pages.
    std::string fingerprint() const;

    /// out[0..n) = tokens [offset, offset + n) of a shard; the range must lie inside it. Safe from
    /// several threads at once. Throws Error for an id >= vocab_size (file and byte offset) and
    /// when the file vanished or changed its size since it was mapped.
    void copy(int shard, int64_t offset, int64_t n, int32_t* out) const;

  private:
    struct Shard {
        MappedFile file;
        int64_t tokens = 0;
        int width = 0;  // bytes per token
    };

    static Shard open_shard(const std::filesystem::path& path);
    friend void require_shard(const std::filesystem::path& path);
    void check_unchanged(const Shard& shard) const;

    uint32_t vocab_size_;
    bool synthetic_ = false;
    int64_t total_tokens_ = 0;
    std::vector<Shard> shards_;
};

}  // namespace train_gpt
