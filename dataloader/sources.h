// The inputs of `train_gpt tokenize`: files, folders, patterns and standard input.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dataloader/decompress.h"

namespace train_gpt {

/// One input to read.
struct Source {
    std::string path;    // "-": standard input
    bool jsonl = false;  // JSON Lines or one JSON array; else plain text
    Compression compression = Compression::none;
    int64_t size = 0, modified = 0;  // of the file: bytes, and ns since 1970; 0 for standard input
    // Its bytes from the beginning on, unpacked, where they were read ahead; of standard input,
    // they come from nowhere else any more.
    std::shared_ptr<const std::string> held;

    bool is_plain_file() const { return path != "-" && !jsonl && compression == Compression::none; }
    std::string name() const { return path == "-" ? "standard input" : path; }
};

/// Files in folders that are none of the known kinds: how many of each extension (".png"; may be
/// "").
using Skipped = std::map<std::string, int64_t>;
/// "12 .png, 3 .py, 1 without extension", the most frequent ones first.
std::string describe(const Skipped& skipped);

struct Sources {
    std::vector<Source> sources;
    Skipped skipped;
    std::vector<std::string> not_text;  // files that were left out because they are no text
};

/// In the folder that `tokenize` writes to, holds what is not complete; nothing in it is an input.
constexpr const char* kStagingFolder = ".tokenize.tmp";

/// What the user named, as files: a file as itself, a folder as the files of known kinds in it and
/// below (.txt .text .md .jsonl .ndjson, each also .gz or .zst; sorted by path; links are
/// followed), a pattern as what it matches, "-" as standard input. Files named one by one may also
/// be JSON in .json; these, where their names say nothing known, and standard input are JSON if
/// `has_field`, plain text if not. Throws Error for what is missing, a folder without inputs, kinds
/// that cannot be read (Parquet, archives), and files that are no text (see refuse_no_text); with
/// `skip_bad`, leaves these out.
Sources find_sources(const std::vector<std::string>& inputs, bool has_field, bool skip_bad = false);

/// Throws Error when a part of an input is mostly not text in UTF-8 (see dataloader/utf8.h).
void refuse_no_text(const std::string& name, std::string_view sample);

}  // namespace train_gpt
