// The inputs of `train_gpt tokenize`: files, folders, patterns and standard input.
#pragma once
#include <cstdint>
#include <functional>
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
    // Its first bytes, unpacked, if they were read in advance. Bytes of standard input cannot be
    // read again.
    std::shared_ptr<const std::string> held;
    std::string column = {};  // Parquet: the one that has the texts; empty: not Parquet

    bool is_parquet() const { return !column.empty(); }
    bool is_plain_file() const {
        return path != "-" && !jsonl && !is_parquet() && compression == Compression::none;
    }
    std::string name() const { return path == "-" ? "standard input" : path; }
};

/// The number of files in folders that are of no known kind, by extension (".png"; may be "").
using Skipped = std::map<std::string, int64_t>;
/// "12 .png, 3 .py, 1 without extension", the most frequent ones first.
std::string describe(const Skipped& skipped);

struct Sources {
    /// Some files, of which the first is named.
    struct Some {
        int64_t count = 0;
        std::string first;
        void add(const std::string& path) {
            if (count++ == 0) first = path;
        }
    };

    std::vector<Source> sources;
    Skipped skipped;
    Some hidden;                        // entries of folders whose names begin with a dot
    Some objects;                       // files named as plain text that begin with a JSON object
    std::vector<std::string> not_text;  // files that were left out because they are not text
};

/// The folder inside the output folder of `tokenize` for what is not complete. Nothing in it is an
/// input.
constexpr const char* staging_folder = ".tokenize.tmp";

/// The files for which the user's inputs stand:
///
///   a file      this file
///   a folder    the files of known kinds in it and its subfolders, sorted by path: .txt .text .md
///               .jsonl .ndjson, each also with .gz or .zst, and .parquet; links are followed, and
///               entries whose names begin with a dot are left out
///   a pattern   the files that match it
///   "-"         standard input
///
/// A file that is named or matches a pattern may also be JSON in .json. A file of unknown kind is
/// JSON if `field` is not empty, else plain text; so is standard input. `field` (empty: "text")
/// also names the column of Parquet files. Throws Error for missing files, links that lead nowhere,
/// a folder without inputs, kinds that cannot be read (archives), JSON that would be read as plain
/// text (see refuse_json), files that are not text (see refuse_no_text), and Parquet files without
/// such a column of strings. With `skip_bad`, files that are not text are left out.
Sources find_sources(const std::vector<std::string>& inputs, const std::string& field,
                     bool skip_bad = false);

/// Throws Error when too much of a sample of an input is not text in UTF-8 (max_share_of_no_text in
/// base/utf8.h).
void refuse_no_text(const std::string& name, std::string_view sample);

/// Finds out whether an input that is read as plain text is JSON Lines or an array of objects.
/// `beginning` is its beginning, or all of it if `complete`; more(beginning) appends the next bytes
/// and returns whether they are the last. Throws Error if the first object has a string in the
/// field ("text" if it is empty) or if the name does not say plain text. Returns whether there is
/// an object.
bool refuse_json(const std::string& path, const std::string& field, std::string& beginning,
                 bool complete, const std::function<bool(std::string&)>& more);

}  // namespace train_gpt
