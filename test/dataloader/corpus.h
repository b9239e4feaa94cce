// Corpora for tests of prepare(): random documents, packed and written in every format, and what
// the shards made from them contain.
#pragma once
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <unistd.h>
#ifdef TRAIN_GPT_ZLIB
#include <zlib.h>
#endif
#ifdef TRAIN_GPT_ZSTD
#include <zstd.h>
#endif

#include "dataloader/manifest.h"
#include "dataloader/prepare.h"
#include "test/dataloader/shard_files.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

namespace fs = std::filesystem;

using Strings = std::vector<std::string>;

/// Words of a few letters, and what may stand between them.
inline std::string random_document(size_t bytes) {
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

/// Documents of all sizes; now and then one is repeated.
inline Strings random_documents(int count, size_t most_bytes) {
    Strings documents;
    for (int i = 0; i < count; ++i)
        documents.push_back(!documents.empty() && random_int(0, 7) == 0
                                ? documents[static_cast<size_t>(random_int(0, i - 1))]
                                : random_document(static_cast<size_t>(
                                      random_int(1, static_cast<int64_t>(most_bytes)))));
    return documents;
}

inline std::string as_text(const Strings& documents) {
    std::string text;
    for (const std::string& document : documents) text += document + "\n<|endoftext|>\n";
    return text;
}
inline Strings with_newline(Strings documents) {  // as they are read from as_text()
    for (std::string& document : documents) document += '\n';
    return documents;
}
inline std::string as_jsonl(const Strings& documents, const char* field = "text") {
    std::string lines;
    for (const std::string& document : documents)
        lines += nlohmann::json{{"id", 7}, {field, document}, {"z", {{field, "not this"}}}}.dump(
                     -1, ' ', random_int(0, 1) == 1) +
                 "\n";
    return lines;
}

#ifdef TRAIN_GPT_ZLIB
inline std::string gzip(const std::string& text) {
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
inline std::string zstd(const std::string& text) {
    std::string packed(::ZSTD_compressBound(text.size()), '\0');
    packed.resize(::ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 1));
    return packed;
}
#endif

/// The packers of this build, by extension.
inline std::map<std::string, std::string (*)(const std::string&)> packers() {
    return {
#ifdef TRAIN_GPT_ZLIB
        {".gz", gzip},
#endif
#ifdef TRAIN_GPT_ZSTD
        {".zst", zstd},
#endif
    };
}

/// The documents of a split, decoded from its shards.
inline Strings documents_in(const std::string& out, const std::string& split) {
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

/// All files directly in a folder, with their bytes.
inline std::map<std::string, std::string> files_in(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.is_regular_file()) files[entry.path().filename().string()] = read(entry.path());
    return files;
}
inline std::map<std::string, std::string> shards_in(const std::string& folder) {
    auto files = files_in(folder);
    files.erase("data.json");  // names the inputs
    return files;
}

/// Empty for equal files. Else names the first file that only one has, or that differs, and where.
inline std::string difference(const std::map<std::string, std::string>& a,
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

/// A vocabulary that is made once.
inline const std::string& vocabulary() {
    static const TemporaryDirectory folder;
    static const std::string path = [] {
        const std::string text = random_document(20000);
        const std::vector<std::string_view> texts{text};
        Tokenizer::train(texts, 300).save(folder / "tokenizer.json");
        return folder / "tokenizer.json";
    }();
    return path;
}

inline PrepareOptions options_for(const Strings& texts, const std::string& out) {
    PrepareOptions options;
    options.texts = texts;
    options.tokenizer = vocabulary();
    options.out = out;
    options.val_fraction = 0.3;
    options.val_split = "documents";
    options.shard_tokens = 200'000;
    return options;
}

inline Strings sorted(Strings strings) {
    std::sort(strings.begin(), strings.end());
    return strings;
}

/// Runs `action` with a file as standard input.
template <class Action>
void with_input(const std::string& path, Action&& action) {
    const int before = ::dup(STDIN_FILENO), file = ::open(path.c_str(), O_RDONLY);
    ::dup2(file, STDIN_FILENO);
    ::close(file);
    action();
    ::dup2(before, STDIN_FILENO);
    ::close(before);
}

/// What prepare() prints when its output is not a terminal.
inline std::string said_by(const PrepareOptions& options) {
    const TemporaryDirectory folder;
    {
        const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(
            std::fopen((folder / "log").c_str(), "w"), std::fclose);
        prepare(options, log.get());
    }
    return read(folder / "log");
}

}  // namespace train_gpt
