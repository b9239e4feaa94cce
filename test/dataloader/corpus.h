// Corpora for tests of prepare(): random documents, packed and written in every format, and what
// the shards made from them contain.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "dataloader/manifest.h"
#include "dataloader/prepare.h"
#include "test/dataloader/shard_files.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

namespace fs = std::filesystem;

using Strings = std::vector<std::string>;

/// Words of a few letters, and what may stand between them.
std::string random_document(size_t bytes);

/// Documents of all sizes; now and then one is repeated.
Strings random_documents(int count, size_t most_bytes);

std::string as_text(const Strings& documents);
Strings with_newline(Strings documents);  // as they are read from as_text()
std::string as_jsonl(const Strings& documents, const char* field = "text");

#ifdef TRAIN_GPT_ZLIB
std::string gzip(const std::string& text);
#endif
#ifdef TRAIN_GPT_ZSTD
std::string zstd(const std::string& text);
#endif

/// The packers of this build, by extension.
std::map<std::string, std::string (*)(const std::string&)> packers();

/// The documents of a split, decoded from its shards.
Strings documents_in(const std::string& out, const std::string& split);

/// All files directly in a folder, with their bytes.
std::map<std::string, std::string> files_in(const std::string& folder);
std::map<std::string, std::string> shards_in(const std::string& folder);

/// Empty for equal files. Else names the first file that only one has, or that differs, and where.
std::string difference(const std::map<std::string, std::string>& a,
                       const std::map<std::string, std::string>& b);

/// A vocabulary that is made once.
const std::string& vocabulary();

PrepareOptions options_for(const Strings& texts, const std::string& out);

Strings sorted(Strings strings);

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
std::string said_by(const PrepareOptions& options);

}  // namespace train_gpt
