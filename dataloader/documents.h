// Documents from inputs, read ahead by several threads and handed out in batches, in order, in
// bounded memory.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "dataloader/decompress.h"
#include "dataloader/sources.h"

namespace train_gpt {

/// Which split a text belongs to.
enum class Split { train, val };

/// A document of plain text or a part of one.
struct Part {
    std::string_view text;
    bool begins, ends;           // at the beginning and the end of the document
    std::optional<Split> split;  // none: decided by the hash of `text`, the whole document
};

/// What an input consists of: lines of JSON or of plain text, elements of an array of JSON, or rows
/// of a Parquet file.
enum class Record { line, element, row };
inline const char* name_of(Record record) {
    return record == Record::row ? "row" : record == Record::element ? "element" : "line";
}

/// A position in the inputs, from which reading may resume (see Batch::can_restart).
struct Position {
    size_t source = 0;
    int64_t offset = 0;        // in the unpacked bytes of the source; in Parquet, of its texts
    int64_t line = 0;          // lines before it; in an array, elements; in Parquet, rows
    bool in_document = false;  // the document before it has not ended
    uint64_t hash = 0;         // XXH3 of the source's bytes before it
};

/// Documents that are processed together.
struct Batch {
    size_t source = 0;
    std::shared_ptr<const std::string> storage;  // what the views below refer to
    int64_t begin = 0, line = 0;                 // bytes and lines of the source before `storage`
    std::vector<Part> parts;                     // plain text, or rows (null ones are empty), or
    std::string_view lines;                      // whole lines of JSON
    Record record = Record::line;                // what the lines or rows are
    bool line_too_long = false;  // the first line or row was left out: it is too long
    int64_t nulls = 0;           // rows without a text
    bool last = false;           // nothing of this source follows
    std::string damage;          // in the last batch: what is damaged, if anything
    Position end;                // after the batch
    bool can_restart = false;    // reading can resume at `end`
    int64_t file_bytes = 0;      // read from the source's file for this batch and those before

    int64_t bytes() const;  // of text
};

/// How documents are separated, cut and split.
struct DocumentRules {
    double val_fraction = 0;
    // Validation begins at this byte of all plain files, counted in order; none: split by hash.
    std::optional<int64_t> cut;
    bool cuttable = true;  // long documents may be encoded in pieces (see encodable_piece)
    // Compressed sources, arrays and Parquet files end where they are damaged: plain text at the
    // damage, others after the last whole line, element or row before it.
    bool skip_damage = false;
};

/// The longest document that can be held in memory, if it must be; the longest line of JSON Lines,
/// and the longest row.
constexpr int64_t max_document_bytes = int64_t{1} << 28;

/// The split of every document if there is only one split (val_fraction is 0 or 1).
std::optional<Split> only_split(double val_fraction);

/// Which split a document belongs to: validation if XXH3 of its bytes, as a fraction of 2^64, is
/// below `val_fraction` (0 to 0.5, or 1).
Split split_of(std::string_view document, double val_fraction);

/// Reads ahead in several sources at a time and hands out their documents in order.
class DocumentStream {
  public:
    /// Begins at `start`. An error in a source is not thrown here, but by next() when its turn
    /// comes. `sources` must outlive the stream.
    DocumentStream(const std::vector<Source>& sources, const DocumentRules& rules, Position start,
                   int readers);
    ~DocumentStream();
    DocumentStream(const DocumentStream&) = delete;
    DocumentStream& operator=(const DocumentStream&) = delete;

    /// The next batch, none at the end. Call it from one thread at a time. Throws Error for what
    /// cannot be read, for documents and array elements that are too long, and when the bytes
    /// before `start` do not match its hash.
    std::optional<Batch> next();

    /// Ends reading immediately: next() throws.
    void stop();

  private:
    class Reader;
    struct Queue {
        std::list<Batch> batches;
        int64_t bytes = 0;
        std::exception_ptr failure;
        bool done = false;
    };
    void read_sources();
    void read_rows(size_t index);
    void push(Batch batch);

    const std::vector<Source>& sources_;
    const DocumentRules rules_;
    const Position start_;
    std::vector<int64_t> begins_;  // offset of each source in the bytes of all files
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Queue> queues_;  // by source
    size_t next_to_read_, next_out_;
    int64_t held_bytes_ = 0;
    const int64_t most_held_;  // limit for all sources together: they may be many and small
    std::vector<std::thread> threads_;
};

/// Length of the first piece of a document, `wanted` bytes or a little more, such that encoding
/// that piece and the rest separately gives the tokens of the whole, with any of the patterns of
/// tokenizer/pretokenize.h; text.size() if there is no such cut.
size_t encodable_piece(std::string_view text, size_t wanted);

/// Whether there is such a cut between text[at - 1] and text[at].
bool is_encodable_cut(std::string_view text, size_t at);

/// The first line at or after `from` that is exactly "<|endoftext|>": where it begins, and where
/// the text after it begins; both npos if there is none. Text before `from` has been searched
/// already. A line begins at text[0] if `at_line_start`; the end of `text` ends a line if
/// `complete`.
struct Separator {
    size_t begin, end;
};
Separator find_separator(std::string_view text, size_t from, bool at_line_start, bool complete);

}  // namespace train_gpt
