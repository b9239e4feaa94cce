#include "test/tokenizer/reference.h"

#include <cstddef>

#include "base/file.h"
#include "test/random.h"

namespace train_gpt {

std::string fixture_path(const std::string& name) { return "test/fixtures/tokenizer/" + name; }

nlohmann::json read_fixture(const std::string& name) {
    const MappedFile file(fixture_path(name));
    return nlohmann::json::parse(file.text().begin(), file.text().end());
}

std::string random_bytes(size_t about) {
    static const std::vector<std::string> fragments = {
        " ",    "\n", "\r\n", "\t", "'s", "'LL", "1", "42",     "a",     "the",
        " and", ".",  "--",   "é",  "е",  "世",  "👍", "\u00a0", "\u2028"};
    std::string text;
    while (text.size() < about) {
        if (random_int(0, 2) == 0)
            text += static_cast<char>(random_int(0, 255));
        else
            text += fragments[static_cast<size_t>(
                random_int(0, static_cast<int64_t>(fragments.size()) - 1))];
    }
    return text;
}

std::string random_letters(size_t length, int letters) {
    std::string text;
    for (size_t i = 0; i < length; ++i) text += static_cast<char>('a' + random_int(0, letters - 1));
    return text;
}

std::vector<uint32_t> naive_merge(std::vector<uint32_t> ids,
                                  const std::function<RankedMerge(uint32_t, uint32_t)>& find) {
    for (;;) {
        RankedMerge best;
        size_t at = 0;
        for (size_t i = 0; i + 1 < ids.size(); ++i) {
            const RankedMerge merge = find(ids[i], ids[i + 1]);
            if (merge.rank >= best.rank) continue;
            best = merge;
            at = i;
        }
        if (best.rank == RankedMerge::none) return ids;
        ids[at] = best.result;
        ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
}

std::vector<std::string_view> pieces_of(Pattern pattern, std::string_view text) {
    std::vector<std::string_view> pieces;
    while (!text.empty()) {
        pieces.push_back(text.substr(0, first_piece(pattern, text)));
        text.remove_prefix(pieces.back().size());
    }
    return pieces;
}

}  // namespace train_gpt
