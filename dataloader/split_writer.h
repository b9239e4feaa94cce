// The token shards of one split, and what the manifest says of them.
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

/// Writes the shards of one split and describes them in `shards`, with which it also begins: those
/// that an interrupted run wrote.
class SplitWriter {
  public:
    SplitWriter(const std::filesystem::path& folder, Split split, const Tokenizer& tokenizer,
                int64_t shard_tokens, std::vector<PreparedShard>& shards);

    void append(std::span<const uint32_t> tokens);
    /// Has on disk what was appended.
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
    std::vector<int64_t> lengths_;  // of tokens, by id
    bool finished_ = false;
};

}  // namespace train_gpt
