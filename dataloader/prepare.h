// From text files to token shards: what `train_gpt tokenize` does.
#pragma once
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace train_gpt {

struct PrepareOptions {
    std::vector<std::string>
        texts;          // files, folders, patterns, "-" (see find_sources), in this order
    std::string field;  // of JSON Lines, or column of Parquet, that holds the text; empty: "text"
    uint32_t train_vocab = 0;  // train a tokenizer with this many tokens; or
    std::string tokenizer;     // use this one (anything that Tokenizer::load reads)
    // Its special tokens around documents (see Tokenizer::with_document_tokens); empty: as it says.
    std::string begin_token, end_token;
    std::string out;                     // folder; created if missing
    double val_fraction = 0.05;          // 0 to 0.5, or 1
    std::string val_split;               // "documents", "tail", or empty: see prepare()
    int64_t shard_tokens = 100'000'000;  // tokens per shard
    // Leave out, and count, files that are not text, lines and rows that are not valid records, and
    // the rest of compressed files, arrays and Parquet files after damage.
    bool skip_bad = false;
    int threads = 0;             // 0: all of the machine's
    double save_seconds = 5;     // between saves of the progress
    double report_seconds = 10;  // between lines of progress in a log that is not a terminal
};

/// Encodes texts into a folder: tokenizer.json, train_000000.bin …, val_000000.bin …
/// (dataloader/shard.h) and data.json, their manifest.
///
/// Documents: a file of plain text is one document, or several if it has lines that are exactly
/// "<|endoftext|>" (these lines are not part of the text). In JSON Lines each line is one document,
/// in a field of an object; in Parquet each row, in a column of strings. Rows whose text is null
/// are left out and counted. Every document that is not empty begins with the tokenizer's
/// begin-of-text token and ends with its end-of-text token, if it has these. Nothing is normalised,
/// unless the tokenizer says so. In plain text, a byte order mark is dropped, and bytes that are
/// not UTF-8 are kept, reported and counted; input with too much that is not text is refused (see
/// refuse_no_text). Standard input is JSON if `field` is given.
///
/// Validation by "documents": those whose hash is in val_fraction of all hashes (see split_of), so
/// that a text is always in the same split, wherever and however often it occurs. By "tail": the
/// last val_fraction of the bytes of all files in order, cut at the nearest line boundary after (or
/// else before) that place; if lines are too long for that, between two UTF-8 characters. For
/// "tail", all inputs must be plain text files, or all text must be in one input that is compressed
/// or piped and has at most max_document_bytes. A document that is cut has no end-of-text token at
/// the cut. The default is "tail" if that is possible and all text is one document, else
/// "documents". The tokenizer is trained on the training split only.
///
/// The result depends only on the inputs' bytes and the options, not on the number of threads.
/// Memory does not grow with the text (except for the table of distinct words while a tokenizer is
/// trained). `log` (may be null) gets a few lines of progress.
///
/// Everything is made in a hidden folder inside `out` and moved into place at the end. Shards of an
/// earlier run that its data.json lists are replaced. Anything else in the way (shards or a
/// tokenizer.json that no data.json lists) is an error and is left as it is; another process that
/// works in the same folder is also an error. If the process is killed at any moment, the same
/// command continues from the contents of the hidden folder, with the same result; with other
/// options, inputs or tokenizer it starts again from the beginning. If it is killed between the
/// moves, `out` has a data.json marked incomplete, and the same command completes it.
///
/// `interrupted` is called now and then; if it returns true, the work so far is kept and prepare()
/// returns false, else true. Throws Error (what, where, how to fix it) for bad input and failed
/// writes; UsageError for contradictory options.
bool prepare(const PrepareOptions& options, std::FILE* log,
             const std::function<bool()>& interrupted = {});

}  // namespace train_gpt
