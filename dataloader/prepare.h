// From text files to token shards: what `train_gpt tokenize` does.
#pragma once
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

struct PrepareOptions {
    std::vector<std::string> texts;      // files, in this order
    uint32_t train_vocab = 0;            // train a tokenizer of this many tokens; or
    std::string tokenizer;               // take this one (whatever Tokenizer::load reads)
    std::string out;                     // folder; made when missing
    double val_fraction = 0.05;          // of the bytes, 0 to 0.5
    int64_t shard_tokens = 100'000'000;  // tokens in a shard
};

/// Encodes texts into a folder: tokenizer.json, train_000000.bin …, val_000000.bin …
/// (dataloader/shard.h) and data.json, the manifest of them.
///
/// Documents: each file is one, or several where a line is exactly "<|endoftext|>" (that line is
/// not part of the text). Every document is ended by the tokenizer's end-of-text token when it has
/// one. Any bytes are text; nothing is normalised.
///
/// Validation: the last val_fraction of the bytes of all files in their order, cut at the line
/// border nearest behind (or else before) that place; where lines are too long for that, between
/// two UTF-8 characters. A document that is cut has no end-of-text token at the cut. The tokenizer
/// is trained on what comes before the cut only.
///
/// The result is a function of the input alone, not of the number of threads. `log` (may be null)
/// gets a few lines of progress.
///
/// Everything is made in a hidden folder inside `out` and moved in place at the end. Shards of an
/// earlier run that its data.json lists are replaced; anything else in the way (shards or a
/// tokenizer.json that no data.json lists) is an error and stays as it is, as is another process at
/// work in the same folder. Killed between the moves, `out` holds a data.json marked incomplete,
/// and the same command mends it.
///
/// Throws Error (what, where, how to mend) for bad input and failed writes; UsageError for
/// contradicting options.
void prepare(const PrepareOptions& options, std::FILE* log);

/// Length of the first piece of a document, about `wanted` bytes or a little more, such that
/// encoding that piece and the rest apart gives the tokens of the whole, with any of the patterns
/// of tokenizer/pretokenize.h; all of `text` when there is no such place.
size_t encodable_piece(std::string_view text, size_t wanted);

/// One shard in a manifest.
struct PreparedShard {
    std::string name;    // in the folder
    std::string split;   // "train" or "val"
    int64_t tokens = 0;  // end-of-text tokens included
    int64_t bytes = 0;   // of text that these tokens stand for; end-of-text tokens stand for none
    std::string hash;    // hash_file() of the shard
};

/// One text file that went in.
struct PreparedSource {
    std::string path;  // as it was given
    int64_t bytes = 0;
    std::string hash;
};

/// data.json, as prepare() writes it.
struct DataManifest {
    bool complete = false;  // false: the writer was killed while it put the files in place
    uint32_t vocab_size = 0;
    std::string tokenizer;       // name of the tokenizer's file in the folder
    std::string tokenizer_hash;  // hash_file() of it
    double val_fraction = 0;
    std::vector<PreparedShard> shards;
    std::vector<PreparedSource> sources;
};

/// Reads FOLDER/data.json. Throws Error when it is missing, damaged or not a manifest of prepare().
DataManifest read_data_manifest(const std::filesystem::path& folder);

}  // namespace train_gpt
