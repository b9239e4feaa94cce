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
        texts;                   // files, folders, patterns, "-" (see find_sources), in this order
    std::string field;           // of JSON Lines that holds the text; empty: "text"
    uint32_t train_vocab = 0;    // train a tokenizer of this many tokens; or
    std::string tokenizer;       // take this one (whatever Tokenizer::load reads)
    std::string out;             // folder; made when missing
    double val_fraction = 0.05;  // 0 to 0.5, or 1
    std::string val_split;       // "documents", "tail", or empty: see prepare()
    int64_t shard_tokens = 100'000'000;  // tokens in a shard
    // Leave out files that are no text, lines that are no records, and what follows where
    // compressed files and arrays show damage; count these.
    bool skip_bad = false;
    int threads = 0;             // 0: all of the machine's
    double save_seconds = 5;     // how often it is kept how far the work is
    double report_seconds = 10;  // and how often the log says so, where it is no terminal
};

/// Encodes texts into a folder: tokenizer.json, train_000000.bin …, val_000000.bin …
/// (dataloader/shard.h) and data.json, the manifest of them.
///
/// Documents: a file of plain text is one, or several where a line is exactly "<|endoftext|>" (that
/// line is not part of the text); in JSON Lines each line is one, in a field of an object. Every
/// document that is not empty is ended by the tokenizer's end-of-text token when it has one.
/// Nothing is normalised: of plain text, a byte order mark is dropped, and bytes that are no UTF-8
/// are kept, named and counted; what is mostly no text is refused. Standard input is JSON if
/// `field` is given.
///
/// Validation by "documents": those whose hash is in val_fraction of all hashes (see split_of), so
/// that a text is always on the same side, however often and wherever it comes. By "tail": the last
/// val_fraction of the bytes of all files in their order, cut at the line border nearest behind (or
/// else before) that place; where lines are too long for that, between two UTF-8 characters. All of
/// them must be files of plain text, or all text in one that is packed, or piped, and has at most
/// kMaxDocumentBytes. A document that is cut has no end-of-text token at the cut. By default "tail"
/// where that holds and all text is one document, else "documents". The tokenizer is trained on the
/// training split only.
///
/// The result is a function of the inputs' bytes and the options alone, not of the number of
/// threads. Memory does not grow with the text (but for the table of different words while a
/// tokenizer is trained). `log` (may be null) gets a few lines of progress.
///
/// Everything is made in a hidden folder inside `out` and moved in place at the end. Shards of an
/// earlier run that its data.json lists are replaced; anything else in the way (shards or a
/// tokenizer.json that no data.json lists) is an error and stays as it is, as is another process at
/// work in the same folder. Killed at any moment, the same command goes on with what the hidden
/// folder holds, and the result is the same; with other options, inputs or tokenizer it begins
/// anew. Killed between the moves, `out` holds a data.json marked incomplete, and the same command
/// mends it.
///
/// `interrupted` is asked now and then whether to end; if so, the work so far is kept and prepare()
/// returns false, else true. Throws Error (what, where, how to mend) for bad input and failed
/// writes; UsageError for contradicting options.
bool prepare(const PrepareOptions& options, std::FILE* log,
             const std::function<bool()>& interrupted = {});

}  // namespace train_gpt
