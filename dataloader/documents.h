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
    bool ends;                   // with the end of the document
    std::optional<Split> split;  // none: what the hash of `text`, which is the whole document, says
};

/// A place in the inputs at which reading can go on.
struct Position {
    size_t source = 0;
    int64_t offset = 0;        // in the unpacked bytes of the source
    int64_t line = 0;          // lines before it; of an array, elements
    bool in_document = false;  // the document before it has not ended
    uint64_t hash = 0;         // XXH3 of the source's bytes before it
};

/// Documents that are worked on together.
struct Batch {
    size_t source = 0;
    std::shared_ptr<const std::string> storage;  // what the views below look at
    int64_t begin = 0, line = 0;                 // of the source, before `storage`
    std::vector<Part> parts;                     // of plain text, or else
    std::string_view lines;                      // whole lines of JSON,
    bool is_array = false;                       // which are the elements of an array
    bool line_too_long = false;                  // a line was left out, which is the first
    bool last = false;                           // nothing of this source follows
    std::string damage;                          // why not, where the source is damaged
    Position end;                                // behind the batch
    bool can_restart = false;                    // at `end`
    int64_t file_bytes = 0;  // of the source's file, read for this batch and before

    int64_t bytes() const;  // of text
};

/// How documents are told apart, cut and split.
struct DocumentRules {
    double val_fraction = 0;
    std::optional<int64_t> cut;  // validation begins at this byte of all plain files; none: by hash
    bool cuttable = true;        // long documents may be encoded in pieces (see encodable_piece)
    // Compressed sources and arrays end where they are damaged: plain documents there, JSON with
    // the line or element before.
    bool skip_damage = false;
};

/// Longest document that is held in memory, where it must be; longest line of JSON Lines.
constexpr int64_t kMaxDocumentBytes = int64_t{1} << 28;

/// The split of every document, where there is only one: val_fraction is 0 or 1.
std::optional<Split> only_split(double val_fraction);

/// Which split a document belongs to: validation when XXH3 of its bytes, as a fraction of 2^64, is
/// below `val_fraction` (0 to 0.5, or 1).
Split split_of(std::string_view document, double val_fraction);

/// Reads sources, several ahead at a time, and hands out their documents in order.
class DocumentStream {
  public:
    /// Begins at `start`. Throws nothing by itself: what is wrong with a source is thrown by next()
    /// in its turn. `sources` must outlive the stream.
    DocumentStream(const std::vector<Source>& sources, const DocumentRules& rules, Position start,
                   int readers);
    ~DocumentStream();
    DocumentStream(const DocumentStream&) = delete;
    DocumentStream& operator=(const DocumentStream&) = delete;

    /// The next batch, none at the end. From one thread at a time. Throws Error for what cannot be
    /// read; for documents and lines that are too long; and when the bytes before `start` are not
    /// those of its hash.
    std::optional<Batch> next();

    /// Ends the reading, wherever it is: next() throws.
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
    void push(Batch batch);

    const std::vector<Source>& sources_;
    const DocumentRules rules_;
    const Position start_;
    std::vector<int64_t> begins_;  // of each source in all bytes of plain files
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Queue> queues_;  // by source
    size_t next_to_read_, next_out_;
    int64_t held_bytes_ = 0;
    const int64_t most_held_;  // of all sources, which may be many and small
    std::vector<std::thread> threads_;
};

/// Length of the first piece of a document, about `wanted` bytes or a little more, such that
/// encoding that piece and the rest apart gives the tokens of the whole, with any of the patterns
/// of tokenizer/pretokenize.h; all of `text` when there is no such place.
size_t encodable_piece(std::string_view text, size_t wanted);

/// Whether text[at - 1] and text[at] lie on two sides of such a place.
bool is_encodable_cut(std::string_view text, size_t at);

/// Where a line of a plain text that is exactly "<|endoftext|>" begins and what follows it begins,
/// from `from` on; both npos when there is none. Text before `from` counts as looked through. A
/// line begins at text[0] if `at_line_start`; the end of `text` ends a line if `complete`.
struct Separator {
    size_t begin, end;
};
Separator find_separator(std::string_view text, size_t from, bool at_line_start, bool complete);

}  // namespace train_gpt
