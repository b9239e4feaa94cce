#include "test/dataloader/corpus.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string_view>

#include <nlohmann/json.hpp>
#ifdef TRAIN_GPT_ZLIB
#include <zlib.h>
#endif
#ifdef TRAIN_GPT_ZSTD
#include <zstd.h>
#endif

#include "base/error.h"
#include "dataloader/shard.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

std::string random_document(size_t bytes) {
    static const Strings parts{"ab",
                               "cab",
                               "ba",
                               "\xC3\xA9t",
                               "7",
                               " ",
                               " ",
                               " ",
                               "\n",
                               "\n\n",
                               ". ",
                               " <|endoftext|> ",
                               "\xF0\x9F\x98\x80",
                               "\"\\",
                               "\t"};
    std::string text = "d";
    while (text.size() < bytes)
        text += parts[static_cast<size_t>(random_int(0, static_cast<int64_t>(parts.size()) - 1))];
    return text;
}

Strings random_documents(int count, size_t most_bytes) {
    Strings documents;
    for (int i = 0; i < count; ++i)
        documents.push_back(!documents.empty() && random_int(0, 7) == 0
                                ? documents[static_cast<size_t>(random_int(0, i - 1))]
                                : random_document(static_cast<size_t>(
                                      random_int(1, static_cast<int64_t>(most_bytes)))));
    return documents;
}

std::string as_text(const Strings& documents) {
    std::string text;
    for (const std::string& document : documents) text += document + "\n<|endoftext|>\n";
    return text;
}

Strings with_newline(Strings documents) {
    for (std::string& document : documents) document += '\n';
    return documents;
}

std::string as_jsonl(const Strings& documents, const char* field) {
    std::string lines;
    for (const std::string& document : documents)
        lines += nlohmann::json{{"id", 7}, {field, document}, {"z", {{field, "not this"}}}}.dump(
                     -1, ' ', random_int(0, 1) == 1) +
                 "\n";
    return lines;
}

#ifdef TRAIN_GPT_ZLIB
std::string gzip(const std::string& text) {
    z_stream state{};
    REQUIRE(::deflateInit2(&state, 1, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    std::string packed(::deflateBound(&state, text.size()) + 64, '\0');
    state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    state.avail_in = static_cast<uInt>(text.size());
    state.next_out = reinterpret_cast<Bytef*>(packed.data());
    state.avail_out = static_cast<uInt>(packed.size());
    REQUIRE(::deflate(&state, Z_FINISH) == Z_STREAM_END);
    packed.resize(state.total_out);
    ::deflateEnd(&state);
    return packed;
}
#endif
#ifdef TRAIN_GPT_ZSTD
std::string zstd(const std::string& text) {
    std::string packed(::ZSTD_compressBound(text.size()), '\0');
    packed.resize(::ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 1));
    return packed;
}
#endif

std::map<std::string, std::string (*)(const std::string&)> packers() {
    return {
#ifdef TRAIN_GPT_ZLIB
        {".gz", gzip},
#endif
#ifdef TRAIN_GPT_ZSTD
        {".zst", zstd},
#endif
    };
}

Strings documents_in(const std::string& out, const std::string& split) {
    const Tokenizer tokenizer = Tokenizer::load(out);
    Strings documents;
    std::vector<uint32_t> tokens;
    for (int number = 0;; ++number) {
        const std::string path = out + "/" + split + "_00000" + std::to_string(number) + ".bin";
        if (number > 9 || !fs::exists(path)) break;
        const TokenShards shard(path, tokenizer.vocab_size());
        std::vector<int32_t> part(static_cast<size_t>(shard.total_tokens()));
        shard.copy(0, 0, shard.total_tokens(), part.data());
        for (const int32_t token : part) {
            if (static_cast<uint32_t>(token) == tokenizer.end_of_text()) {
                documents.push_back(tokenizer.decode(tokens));
                tokens.clear();
            } else {
                tokens.push_back(static_cast<uint32_t>(token));
            }
        }
    }
    CHECK(tokens.empty());
    return documents;
}

std::map<std::string, std::string> files_in(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.is_regular_file()) files[entry.path().filename().string()] = read(entry.path());
    return files;
}

std::map<std::string, std::string> shards_in(const std::string& folder) {
    auto files = files_in(folder);
    files.erase("data.json");  // names the inputs
    return files;
}

std::string difference(const std::map<std::string, std::string>& a,
                       const std::map<std::string, std::string>& b) {
    for (const auto* files : {&a, &b})
        for (const auto& [name, bytes] : *files)
            if (!a.contains(name) || !b.contains(name)) return "only one has " + name;
    for (const auto& [name, bytes] : a) {
        const std::string& others = b.at(name);
        if (bytes == others) continue;
        const auto at = std::ranges::mismatch(bytes, others).in1 - bytes.begin();
        return concat(name, " differs at byte ", at, " (", bytes.size(), " and ", others.size(),
                      " bytes)");
    }
    return "";
}

const std::string& vocabulary() {
    static const TemporaryDirectory folder;
    static const std::string path = [] {
        const std::string text = random_document(20000);
        const std::vector<std::string_view> texts{text};
        Tokenizer::train(texts, 300).save(folder / "tokenizer.json");
        return folder / "tokenizer.json";
    }();
    return path;
}

PrepareOptions options_for(const Strings& texts, const std::string& out) {
    PrepareOptions options;
    options.texts = texts;
    options.tokenizer = vocabulary();
    options.out = out;
    options.val_fraction = 0.3;
    options.val_split = "documents";
    options.shard_tokens = 200'000;
    return options;
}

Strings sorted(Strings strings) {
    std::sort(strings.begin(), strings.end());
    return strings;
}

std::string said_by(const PrepareOptions& options) {
    const TemporaryDirectory folder;
    {
        const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(
            std::fopen((folder / "log").c_str(), "w"), std::fclose);
        prepare(options, log.get());
    }
    return read(folder / "log");
}

}  // namespace train_gpt
