// What `train_gpt tokenize` records about its shards: data.json, the manifest of a complete result,
// and progress.json, the journal of an unfinished one.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/documents.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

constexpr std::array<Split, 2> splits{Split::train, Split::val};
inline const char* name_of(Split split) { return split == Split::train ? "train" : "val"; }
constexpr size_t index_of(Split split) { return static_cast<size_t>(split); }

/// One shard in a manifest.
struct PreparedShard {
    std::string name;    // in the folder
    std::string split;   // "train" or "val"
    int64_t tokens = 0;  // end-of-text tokens included
    int64_t bytes = 0;   // of text that these tokens represent; end-of-text tokens represent none
    std::string hash;    // hash_file() of the shard
};

/// One input that was read.
struct PreparedSource {
    std::string path;       // "-": standard input
    int64_t bytes = 0;      // unpacked; of Parquet, the texts one after the other
    int64_t documents = 0;  // without empty ones
    std::string hash;       // hash_text() of these bytes
    // Bytes of plain text that are not UTF-8 (see count_not_utf8), and where the first of them is.
    int64_t not_utf8 = 0, first_not_utf8 = 0, first_not_utf8_line = 0;
    int64_t nulls = 0;  // rows of Parquet without a text
};

/// Lines of JSON Lines, elements of arrays, rows of Parquet, whole files, or the rest of damaged
/// files that were left out for one reason.
struct LeftOut {
    std::string reason;  // "is not valid JSON"
    int64_t count = 0;
    std::string path;              // of the first of them
    int64_t line = 0;              // or element or row, of the first of them, from 1; 0: files
    Record record = Record::line;  // what the first of them is
    std::string detail = {};       // what is wrong with the first of them: "it ends too early"
};
// The reasons for leaving out the rest of a file, and a whole file.
constexpr const char* reason_damaged = "is damaged";
constexpr const char* reason_no_text = "is not text";

/// data.json, as prepare() writes it.
struct DataManifest {
    bool complete = false;  // false: the writer was killed while it moved the files into place
    uint32_t vocab_size = 0;
    std::string tokenizer;       // name of the tokenizer's file in the folder
    std::string tokenizer_hash;  // hash_file() of that file
    double val_fraction = 0;
    std::string val_split;  // "documents" or "tail"
    int64_t train_documents = 0, val_documents = 0;
    std::vector<PreparedShard> shards;
    std::vector<PreparedSource> sources;
    std::vector<LeftOut> left_out;
};

constexpr const char* data_manifest = "data.json";

/// Reads FOLDER/data.json; returns nothing if it does not exist or belongs to another program.
/// Throws Error when it is damaged.
std::optional<DataManifest> find_data_manifest(const std::filesystem::path& folder);

/// Reads FOLDER/data.json. Throws Error when it is missing, damaged or not a manifest of prepare().
DataManifest read_data_manifest(const std::filesystem::path& folder);
/// Writes FOLDER/data.json.
void write_data_manifest(const std::filesystem::path& folder, const DataManifest& manifest);

/// Checks the shards that match a glob. Throws Error if they are in a folder that `tokenize` did
/// not finish, or if `tokenize` has made them with other tokens than `tokenizer` has (unless it is
/// null). Shards of other programs, and "synthetic", pass.
void check_prepared(const std::string& glob, const Tokenizer* tokenizer);

/// How far a run has come: everything made up to a position in the inputs.
struct PreparationState {
    Position position;
    std::array<int64_t, 2> documents{}, bytes{};  // by split
    std::array<std::vector<PreparedShard>, 2>
        shards;                           // by split; the last one's hash is empty while it grows
    std::vector<PreparedSource> sources;  // all of them; complete for those before the position
    std::vector<LeftOut> left_out;

    int64_t tokens(Split split) const {
        int64_t tokens = 0;
        for (const PreparedShard& shard : shards[index_of(split)]) tokens += shard.tokens;
        return tokens;
    }
};

/// Reads the journal of a run with that many sources. Throws Error when it is damaged.
PreparationState read_progress(const std::filesystem::path& file, size_t sources);
void write_progress(const std::filesystem::path& file, const PreparationState& state);

}  // namespace train_gpt
