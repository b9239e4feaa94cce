#include "tokenizer/formats.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "base/hub_files.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// The first of these files that exists in the folder, or an empty path.
fs::path first_existing(const fs::path& folder, std::initializer_list<const char*> names) {
    std::error_code ignored;
    for (const char* name : names)
        if (fs::exists(folder / name, ignored)) return folder / name;
    return {};
}

/// The only rank file of a folder, or an empty path.
fs::path rank_file_in(const fs::path& folder) {
    std::error_code code;
    fs::path found;
    fs::directory_iterator entries(folder, code);
    if (code) throw Error("cannot read the folder ", folder.string(), ": ", code.message());
    for (const fs::directory_entry& entry : entries) {
        if (entry.path().extension() != ".tiktoken") continue;
        if (!found.empty())
            throw Error("the folder ", folder.string(),
                        " holds several *.tiktoken files; name one of them");
        found = entry.path();
    }
    return found;
}

constexpr std::initializer_list<const char*> vocab_names{"vocab.json", "encoder.json"},
    merges_names{"merges.txt", "vocab.bpe"};

TokenizerDefinition read_folder(const fs::path& folder) {
    if (const fs::path json = first_existing(folder, {"tokenizer.json"}); !json.empty())
        return read_tokenizer_json(json);
    const fs::path vocab = first_existing(folder, vocab_names);
    const fs::path merges = first_existing(folder, merges_names);
    if (!vocab.empty() && !merges.empty()) return read_vocab_and_merges(vocab, merges);
    if (const fs::path ranks = rank_file_in(folder); !ranks.empty()) return read_tiktoken(ranks);
    if (!vocab.empty())
        throw Error(vocab.string(),
                    " needs merges.txt or vocab.bpe next to it; add that file to the folder");
    if (!merges.empty())
        throw Error(merges.string(),
                    " needs vocab.json or encoder.json next to it; add that file to the folder");
    throw Error("the folder ", folder.string(),
                " holds no tokenizer: give one with tokenizer.json, with vocab.json (or "
                "encoder.json) and merges.txt "
                "(or vocab.bpe), or with a *.tiktoken file");
}

}  // namespace

std::optional<uint32_t> find_added(const TokenizerDefinition& definition, std::string_view text) {
    for (const AddedToken& token : definition.added)
        if (token.text == text) return token.id;
    return {};
}

std::optional<uint32_t> usual_end(const TokenizerDefinition& definition) {
    const auto end = find_added(definition, "<|endoftext|>");
    return end ? end : find_added(definition, "<|end_of_text|>");
}

MappedFile map_vocabulary(const fs::path& file) {
    std::error_code code;  // if there is no size, MappedFile reports why
    if (const uintmax_t size = fs::file_size(file, code); !code && size > max_vocabulary_bytes)
        throw Error(file.string(), " has ", size >> 20,
                    " MiB and is not a vocabulary; these have at most ", max_vocabulary_bytes >> 20,
                    " MiB: give a tokenizer.json, a *.tiktoken file, or a folder with one");
    return MappedFile(file);
}

void check_tokens(const TokenizerDefinition& definition, const fs::path& file) {
    std::unordered_map<std::string_view, uint32_t> id_of;
    for (uint32_t id = 0; id < definition.tokens.size(); ++id) {
        if (definition.tokens[id].empty()) continue;
        const auto [found, is_new] = id_of.try_emplace(definition.tokens[id], id);
        if (!is_new)
            throw Error(file.string(), ": the tokens ", found->second, " and ", id,
                        " have the same bytes; download the file again");
    }
    for (int byte = 0; byte < 256; ++byte)
        if (!id_of.contains(std::string(1, static_cast<char>(byte))))
            throw Error(file.string(), ": no token for the single byte ", byte,
                        ", so that not every text could be encoded; use a byte-level BPE "
                        "vocabulary with all 256");
}

namespace {

TokenizerDefinition read_vocabulary(const fs::path& path) {
    std::error_code code;
    if (fs::is_directory(path, code)) {
        refuse_cache_root(path);
        return read_folder(path);
    }
    if (path.extension() == ".tiktoken") return read_tiktoken(path);
    // Naming either file of a pair selects both.
    const auto is_one_of = [&](const auto& names) {
        return std::ranges::find(names, path.filename()) != names.end();
    };
    const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
    if (is_one_of(vocab_names))
        if (const fs::path merges = first_existing(folder, merges_names); !merges.empty())
            return read_vocab_and_merges(path, merges);
    if (is_one_of(merges_names))
        if (const fs::path vocab = first_existing(folder, vocab_names); !vocab.empty())
            return read_vocab_and_merges(vocab, path);
    return read_tokenizer_json(path);
}

}  // namespace

bool has_tokenizer(const fs::path& path) {
    std::error_code ignored;
    if (!fs::is_directory(path, ignored)) return fs::exists(path, ignored);
    const auto has = [&](std::initializer_list<const char*> names) {
        return !first_existing(path, names).empty();
    };
    return has({"tokenizer.json"}) || (has(vocab_names) && has(merges_names)) ||
           !rank_file_in(path).empty();
}

TokenizerDefinition read_tokenizer(const fs::path& path) {
    TokenizerDefinition definition = read_vocabulary(path);
    std::error_code code;
    const fs::path config =
        (fs::is_directory(path, code) ? path : path.parent_path()) / "tokenizer_config.json";
    if (fs::exists(config, code)) read_tokenizer_config(config, definition);
    return definition;
}

}  // namespace train_gpt
