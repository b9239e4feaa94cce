#include "tokenizer/bpe.h"

#include <map>
#include <set>

#include "test/catch.h"
#include "test/tokenizer/reference.h"

namespace train_gpt {

namespace {

std::vector<uint32_t> bytes_as_ids(std::string_view bytes) {
    std::vector<uint32_t> ids;
    for (const char byte : bytes) ids.push_back(static_cast<uint8_t>(byte));
    return ids;
}

}  // namespace

TEST_CASE("a piece is merged lowest rank first, leftmost first, whatever the ranks") {
    for (int round = 0; round < 200; ++round) {
        // Random rules over few tokens, so that pairs overlap, repeat and feed each other. Merging
        // ends because every result id is larger than both parts.
        std::map<std::pair<uint32_t, uint32_t>, RankedMerge> rules;
        const uint32_t letters = static_cast<uint32_t>(random_int(1, 4));
        std::vector<uint32_t> known;
        for (uint32_t i = 0; i < letters; ++i) known.push_back('a' + i);
        for (uint32_t id = 256; id < 256 + 40; ++id) {
            const auto any = [&] {
                return known[static_cast<size_t>(
                    random_int(0, static_cast<int64_t>(known.size()) - 1))];
            };
            rules[{any(), any()}] = {static_cast<uint32_t>(random_int(0, 30)), id};
            known.push_back(id);
        }
        const auto find = [&](uint32_t left, uint32_t right) {
            const auto found = rules.find({left, right});
            return found == rules.end() ? RankedMerge{} : found->second;
        };
        PieceMerger merger;
        for (int text = 0; text < 5; ++text) {
            const std::string bytes =
                random_letters(static_cast<size_t>(random_int(0, 120)), static_cast<int>(letters));
            const auto merged = merger.merge(
                bytes, [](uint8_t byte) { return uint32_t{byte}; }, find);
            CAPTURE(bytes);
            REQUIRE(std::vector<uint32_t>(merged.begin(), merged.end()) ==
                    naive_merge(bytes_as_ids(bytes), find));
        }
    }
}

TEST_CASE("an encoder knows exactly its merges and finds whole pieces") {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
    std::vector<Merge> merges;
    std::set<std::string> spelt;
    while (merges.size() < 300) {
        const auto any = [&] {
            const bool byte = merges.empty() || random_int(0, 1) == 0;
            return static_cast<uint32_t>(
                byte ? random_int('a', 'd')
                     : random_int(256, static_cast<int64_t>(tokens.size()) - 1));
        };
        const uint32_t left = any(), right = any();
        if (!spelt.insert(tokens[left] + tokens[right]).second) continue;
        merges.push_back({left, right, static_cast<uint32_t>(tokens.size())});
        tokens.push_back(tokens[left] + tokens[right]);
    }
    const BytePairEncoder by_merging(tokens, merges, false), by_piece(tokens, merges, true);
    for (uint32_t rank = 0; rank < merges.size(); ++rank) {
        const RankedMerge found = by_merging.find(merges[rank].left, merges[rank].right);
        CHECK(found.rank == rank);
        CHECK(found.result == merges[rank].result);
    }
    CHECK(by_merging.find('x', 'y').rank == RankedMerge::none);

    PieceMerger merger;
    const auto find = [&](uint32_t left, uint32_t right) { return by_merging.find(left, right); };
    const auto encoded = [&merger](const BytePairEncoder& encoder, std::string_view piece) {
        const auto ids = encoder.encode_piece(piece, merger);
        return std::vector<uint32_t>(ids.begin(), ids.end());
    };
    for (int round = 0; round < 500; ++round) {
        const std::string piece = random_letters(static_cast<size_t>(random_int(1, 120)), 4);
        REQUIRE(encoded(by_merging, piece) == naive_merge(bytes_as_ids(piece), find));
    }
    for (uint32_t id = 0; id < tokens.size(); ++id) {
        CHECK(encoded(by_piece, tokens[id]) == std::vector<uint32_t>{id});
        CHECK(encoded(by_merging, tokens[id]) == naive_merge(bytes_as_ids(tokens[id]), find));
    }
}

}  // namespace train_gpt
