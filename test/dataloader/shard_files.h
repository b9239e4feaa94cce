// Shards with random tokens, as the loader's tests need them.
#pragma once
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "dataloader/shard.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

namespace train_gpt {

inline std::vector<uint32_t> random_tokens(int64_t n, uint32_t vocab_size) {
    std::vector<uint32_t> tokens(static_cast<size_t>(n));
    for (uint32_t& token : tokens)
        token = static_cast<uint32_t>(random_int(0, int64_t{vocab_size} - 1));
    return tokens;
}

/// Writes each vector as one shard FOLDER/train_NNNNNN.bin and returns the glob of all.
inline std::string write_shards(const std::string& folder,
                                const std::vector<std::vector<uint32_t>>& shards,
                                uint32_t vocab_size) {
    for (size_t i = 0; i < shards.size(); ++i) {
        ShardWriter writer(folder, "part", vocab_size,
                           std::max<int64_t>(static_cast<int64_t>(shards[i].size()), 2));
        writer.append(shards[i]);
        const auto files = writer.finish();
        REQUIRE(files.size() == 1);
        char name[32];
        std::snprintf(name, sizeof name, "train_%06zu.bin", i);
        std::filesystem::rename(files[0].path, std::filesystem::path(folder) / name);
    }
    return folder + "/train_*.bin";
}

}  // namespace train_gpt
