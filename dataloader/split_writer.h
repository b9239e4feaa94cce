// The token shards of one split, and their entries in the manifest.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "dataloader/documents.h"
#include "dataloader/manifest.h"
#include "dataloader/shard.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

/// Writes the shards of one split and describes them in `shards`, which initially lists those that
/// an interrupted run wrote.
class SplitWriter {
  public:
    SplitWriter(const std::filesystem::path& folder, Split split, const Tokenizer& tokenizer,
                int64_t shard_tokens, std::vector<PreparedShard>& shards);

    void append(std::span<const uint32_t> tokens);
    /// Flushes everything appended so far to disk.
    void sync() { writer_.sync(); }
    void finish();

  private:
    std::vector<ShardFile> written() const;
    void hash_complete();

    const std::filesystem::path folder_;
    const Split split_;
    const int64_t shard_tokens_;
    std::vector<PreparedShard>& shards_;
    ShardWriter writer_;
    std::vector<int64_t> lengths_;  // of tokens in bytes, by id
    bool finished_ = false;
};

}  // namespace train_gpt
