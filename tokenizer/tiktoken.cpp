// tiktoken rank files. Each line has a token: its bytes in base64, a space, and its rank, which is
// also its id.
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/formats.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// Standard base64 (RFC 4648, section 4), padded; nullopt when it is malformed.
std::optional<std::string> decode_base64(std::string_view text) {
    constexpr std::string_view digits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static const std::array<int, 256> values = [&] {
        std::array<int, 256> table;
        table.fill(-1);
        for (size_t i = 0; i < digits.size(); ++i)
            table[static_cast<uint8_t>(digits[i])] = static_cast<int>(i);
        return table;
    }();
    if (text.empty() || text.size() % 4 != 0) return std::nullopt;
    const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
    text.remove_suffix(padding);

    std::string bytes;
    uint32_t bits = 0;
    int held = 0;
    for (const char digit : text) {
        const int value = values[static_cast<uint8_t>(digit)];
        if (value < 0) return std::nullopt;
        bits = bits << 6 | static_cast<uint32_t>(value);
        held += 6;
        if (held >= 8) {
            held -= 8;
            bytes += static_cast<char>(bits >> held & 0xFF);
        }
    }
    if ((bits & ((1u << held) - 1)) != 0) return std::nullopt;  // leftover bits must be zero
    return bytes;
}

/// tiktoken merges any two adjacent tokens whose joined bytes are a token, lowest rank of the
/// joined token first. Still, each token comes from only one pair: the merges within its bytes are
/// always those that the bytes would undergo alone, because bytes outside cannot change the order
/// inside. So merging a token's bytes until just before it appears gives its pair, and the list of
/// these pairs by rank encodes every text as the ranks do. A token that merging never reaches has
/// no pair; it is found only as a whole piece.
std::vector<Merge> merges_from_ranks(const std::vector<std::string>& tokens) {
    std::unordered_map<std::string_view, uint32_t> rank_of;
    std::array<uint32_t, 256> byte_ids{};
    for (uint32_t id = 0; id < tokens.size(); ++id) {
        if (tokens[id].empty()) continue;
        rank_of.emplace(tokens[id], id);
        if (tokens[id].size() == 1) byte_ids[static_cast<uint8_t>(tokens[id][0])] = id;
    }
    size_t longest = 0;
    for (const std::string& token : tokens) longest = std::max(longest, token.size());

    std::vector<Merge> merges;
    PieceMerger merger;
    std::string joined;
    for (uint32_t id = 0; id < tokens.size(); ++id) {
        if (tokens[id].size() < 2) continue;
        const auto parts = merger.merge(
            tokens[id], [&](uint8_t byte) { return byte_ids[byte]; },
            [&](uint32_t left, uint32_t right) -> RankedMerge {
                joined.assign(tokens[left]).append(tokens[right]);
                const auto found = rank_of.find(joined);
                if (found == rank_of.end() || found->second == id) return {};
                return {found->second, found->second};
            });
        if (parts.size() == 2) merges.push_back({parts[0], parts[1], id});
    }
    return merges;
}

/// The pattern and special tokens that tiktoken publishes with a rank file.
void add_what_the_name_implies(TokenizerDefinition& definition, const fs::path& file) {
    const std::string name = file.filename().string();
    const auto is = [&](std::string_view prefix) { return name.starts_with(prefix); };
    const uint32_t n = static_cast<uint32_t>(definition.tokens.size());
    if (is("o200k")) {
        definition.patterns = {std::string(o200k_regex)};
    } else if (is("cl100k")) {
        definition.patterns = {regex_of(Pattern::cl100k)};
    } else if (is("r50k") || is("p50k") || is("gpt2")) {
        definition.patterns = {regex_of(Pattern::gpt2)};
    } else {
        throw Error(file.string(),
                    ": a rank file does not say how text is cut before merging, and this name is "
                    "none of o200k*, cl100k*, "
                    "r50k*, p50k*, gpt2*; rename the file after the one whose pattern it uses");
    }

    if (is("cl100k") && n == 100256) {
        definition.added = {{100257, "<|endoftext|>"},
                            {100258, "<|fim_prefix|>"},
                            {100259, "<|fim_middle|>"},
                            {100260, "<|fim_suffix|>"},
                            {100276, "<|endofprompt|>"}};
        return;
    }
    if (is("o200k") && n == 199998) {
        definition.added = {{199999, "<|endoftext|>"}, {200018, "<|endofprompt|>"}};
        return;
    }
    // The first unused id, as in r50k_base and p50k_base (which leaves a gap for it).
    uint32_t free_id = 0;
    while (free_id < n && !definition.tokens[free_id].empty()) ++free_id;
    definition.added = {{free_id, "<|endoftext|>"}};
}

}  // namespace

TokenizerDefinition read_tiktoken(const fs::path& file) {
    const MappedFile mapped = map_vocabulary(file);
    TokenizerDefinition definition;
    definition.whole_pieces = true;
    std::string_view rest = mapped.text();
    for (size_t number = 1; !rest.empty(); ++number) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (line.empty()) continue;

        const auto fail = [&](const std::string& what) -> Error {
            return Error(file.string(), " line ", number, ": ", what, "; download the file again");
        };
        const size_t space = line.find(' ');
        if (space == std::string_view::npos) throw fail("not a token and its rank");
        auto bytes = decode_base64(line.substr(0, space));
        if (!bytes) throw fail("the token is not valid base64");
        const std::string_view digits = line.substr(space + 1);
        uint32_t rank = 0;
        const auto [end, code] =
            std::from_chars(digits.data(), digits.data() + digits.size(), rank);
        if (code != std::errc() || end != digits.data() + digits.size() || rank >= max_vocab_size)
            throw fail(concat("the rank is not a whole number below ", max_vocab_size));
        if (rank >= definition.tokens.size()) definition.tokens.resize(rank + 1);
        if (!definition.tokens[rank].empty())
            throw fail(concat("rank ", rank, " occurs a second time"));
        definition.tokens[rank] = std::move(*bytes);
    }
    if (definition.tokens.empty()) throw Error(file.string(), " is empty; download the file again");
    check_tokens(definition, file);
    definition.merges = merges_from_ranks(definition.tokens);
    add_what_the_name_implies(definition, file);
    return definition;
}

}  // namespace train_gpt
