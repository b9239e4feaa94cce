#include "dataloader/split_writer.h"

#include "base/file.h"

namespace train_gpt {

SplitWriter::SplitWriter(const std::filesystem::path& folder, Split split,
                         const Tokenizer& tokenizer, int64_t shard_tokens,
                         std::vector<PreparedShard>& shards)
    : folder_(folder),
      split_(split),
      shard_tokens_(shard_tokens),
      shards_(shards),
      writer_(folder, name_of(split), tokenizer.vocab_size(), shard_tokens, written()) {
    for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id)
        lengths_.push_back(id == tokenizer.end_of_text() || id == tokenizer.begin_of_text()
                               ? 0
                               : static_cast<int64_t>(tokenizer.token_bytes(id).size()));
}

void SplitWriter::append(std::span<const uint32_t> tokens) {
    writer_.append(tokens);
    for (const uint32_t token : tokens) {
        if (shards_.empty() || shards_.back().tokens == shard_tokens_)
            shards_.push_back({writer_.shards()[shards_.size()].path.filename().string(),
                               name_of(split_), 0, 0, ""});
        ++shards_.back().tokens;
        shards_.back().bytes += lengths_[token];
    }
    hash_complete();
}

void SplitWriter::finish() {
    writer_.finish();
    finished_ = true;
    hash_complete();
}

std::vector<ShardFile> SplitWriter::written() const {
    std::vector<ShardFile> files;
    for (const PreparedShard& shard : shards_)
        files.push_back({folder_ / shard.name, shard.tokens});
    return files;
}

void SplitWriter::hash_complete() {
    for (size_t i = shards_.size(); i-- > 0 && shards_[i].hash.empty();)
        if (finished_ || shards_[i].tokens == shard_tokens_)
            shards_[i].hash = hash_file(folder_ / shards_[i].name);
}

}  // namespace train_gpt
