#include "dataloader/documents.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <system_error>
#include <utility>

#include <xxhash.h>

#include "base/error.h"
#include "base/utf8.h"
#include "dataloader/json_array.h"
#include "dataloader/jsonl.h"
#include "dataloader/row_batches.h"
#include "tokenizer/pretokenize.h"

namespace train_gpt {

namespace {

constexpr std::string_view separator = "<|endoftext|>";
constexpr size_t batch_bytes = 1 << 20;
constexpr size_t beginning_bytes = 1 << 16;  // enough to find out what an input is
constexpr int64_t queue_bytes = 16 << 20;    // read ahead of each source
// When an unfinished document is cut, at least this many bytes after the cut have been read.
constexpr size_t lookahead = 32;
constexpr std::string_view white_space = " \t\r\n";

}  // namespace

// ---- Documents ----------------------------------------------------------------------------------

std::optional<Split> only_split(double val_fraction) {
    if (val_fraction <= 0) return Split::train;
    if (val_fraction >= 1) return Split::val;
    return {};
}

Split split_of(std::string_view document, double val_fraction) {
    if (const auto only = only_split(val_fraction)) return *only;
    const uint64_t bound = static_cast<uint64_t>(std::ldexp(val_fraction, 64));
    return XXH3_64bits(document.data(), document.size()) < bound ? Split::val : Split::train;
}

Separator find_separator(std::string_view text, size_t from, bool at_line_start, bool complete) {
    for (size_t at = from;; at += separator.size()) {
        at = text.find(separator, at);
        if (at == std::string_view::npos) break;
        if (at > 0 ? text[at - 1] != '\n' : !at_line_start) continue;
        size_t after = at + separator.size();
        if (after < text.size() && text[after] == '\r') ++after;
        if (after == text.size() && !complete) break;  // decided when more is read
        if (after < text.size() && text[after] != '\n') continue;
        return {at, std::min(after + 1, text.size())};
    }
    return {std::string_view::npos, std::string_view::npos};
}

namespace {

/// Whether a character that is certainly not white space begins at text[at]: ASCII, or well-formed
/// UTF-8 outside the blocks that contain Unicode's spaces.
bool begins_word(std::string_view text, size_t at) {
    const auto byte = [&](size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
    };
    const unsigned lead = byte(at);
    if (lead < 0x80) return lead > 0x20 && lead != 0x7F;
    const int length = lead >= 0xF0 && lead <= 0xF4 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC3 ? 2 : 0;
    if (length == 0 || lead > 0xF4) return false;
    for (int i = 1; i < length; ++i)
        if ((byte(at + static_cast<size_t>(i)) & 0xC0) != 0x80) return false;
    // White space begins with C2 (U+0085, U+00A0), E1 (U+1680), E2 80 and E2 81 (U+2000 to U+205F)
    // and E3 80 80 (U+3000).
    if (lead == 0xE1 || (lead == 0xE2 && byte(at + 1) <= 0x81)) return false;
    return !(lead == 0xE3 && byte(at + 1) == 0x80 && byte(at + 2) == 0x80);
}

/// Whether the character that ends just before text[at] satisfies begins_word().
bool ends_word(std::string_view text, size_t at) {
    for (size_t length = 1; length <= 4 && length <= at; ++length)
        if ((text[at - length] & 0xC0) != 0x80) return begins_word(text.substr(0, at), at - length);
    return false;
}

}  // namespace

bool is_encodable_cut(std::string_view text, size_t at) {
    if (at == 0 || at >= text.size()) return false;
    // Between two words, after a single line break: the patterns let a line break follow
    // punctuation or join other white space, but no piece continues after it with a word. ('/' is
    // excluded for patterns that let line breaks and slashes follow punctuation together, as o200k
    // does.)
    if (text[at - 1] == '\n')
        return ends_word(text, at - 1) && begins_word(text, at) && text[at] != '/';
    // Before white space that follows a letter or number: the patterns join only punctuation with
    // white space after it.
    return white_space.find(text[at]) != white_space.npos &&
           ends_in_letter_or_number(text.substr(0, at));
}

size_t encodable_piece(std::string_view text, size_t wanted) {
    for (size_t at = wanted; (at = text.find_first_of(white_space, at)) != text.npos; ++at)
        for (const size_t cut : {at, at + 1})
            if (is_encodable_cut(text, cut)) return cut;
    return text.size();
}

// ---- Reading ------------------------------------------------------------------------------------

/// Reads one source and pushes its batches.
class DocumentStream::Reader {
  public:
    Reader(DocumentStream& stream, size_t index)
        : stream_(stream),
          rules_(stream.rules_),
          source_(stream.sources_[index]),
          bytes_(source_.path, source_.compression, stream.stop_, rules_.skip_damage,
                 source_.held) {
        if (bytes_.size() != source_.size || bytes_.modified() != source_.modified)
            throw Error(source_.path,
                        " changed after this command had begun; run it again when "
                        "nothing writes to it");
        ::XXH3_64bits_reset(hash_.get());
        position_.source = index;
        if (index == stream.start_.source) drop(stream.start_);
    }

    void read() {
        if (position_.offset == 0) begin();
        if (is_array_)
            read_array();
        else if (source_.jsonl)
            read_lines();
        else
            read_text();
        Batch last;
        last.last = true;
        last.damage = bytes_.damage().empty() ? damage_ : bytes_.damage();
        last.end = position_;
        push(std::move(last));
    }

  private:
    /// Skips to where an interrupted run stopped, by reading: this works for all inputs and shows
    /// whether they are unchanged.
    void drop(const Position& start) {
        if (start.offset == 0) return;
        fill(beginning_bytes);
        see_beginning();
        while (position_.offset < start.offset && !stream_.stop_) {
            if (buffer_.empty() && !fill(batch_bytes) && buffer_.empty()) break;
            const size_t n =
                std::min(buffer_.size(), static_cast<size_t>(start.offset - position_.offset));
            last_byte_ = buffer_[n - 1];
            drop_front(n);
        }
        if (position_.offset != start.offset || position_.hash != start.hash)
            throw Error(source_.name(),
                        " is not what it was when this command was interrupted (up to "
                        "byte ",
                        start.offset, "); give it the same again, or remove the folder ",
                        staging_folder, " to start again");
        position_.line = start.line;
        position_.in_document = start.in_document;
    }

    /// Drops what is not text from the beginning of the source.
    void begin() {
        const bool complete = !fill(beginning_bytes);
        see_beginning();
        if (source_.path == "-" && !source_.jsonl) {
            refuse_no_text(source_.name(), buffer_);
            const auto more = [&](std::string& text) { return !fill(text.size()); };
            refuse_json(source_.path, "", buffer_, complete, more);
        }
        drop_front(buffer_.size() - without_byte_order_mark(buffer_).size());
        if (is_array_) drop_front(buffer_.find('[') + 1);
    }
    /// The buffer has the beginning of the source.
    void see_beginning() {
        const std::string_view bytes = std::string_view(buffer_).substr(0, beginning_bytes);
        is_array_ = source_.jsonl && begins_array(without_byte_order_mark(bytes));
    }
    void drop_front(size_t size) {
        advance(std::string_view(buffer_).substr(0, size));
        buffer_.erase(0, size);
    }

    void advance(std::string_view bytes) {
        ::XXH3_64bits_update(hash_.get(), bytes.data(), bytes.size());
        position_.hash = ::XXH3_64bits_digest(hash_.get());
        position_.offset += static_cast<int64_t>(bytes.size());
    }
    void count_lines(std::string_view bytes) {
        // Counts in blocks whose count fits into a byte: compilers turn this into fast code.
        constexpr size_t block = 255;
        for (size_t at = 0; at < bytes.size(); at += block) {
            uint8_t count = 0;
            for (const char c : bytes.substr(at, block)) count += c == '\n';
            position_.line += count;
        }
    }

    /// Appends the next `more` bytes to the buffer; false if the source ends before that.
    bool fill(size_t more) {
        const size_t before = buffer_.size();
        buffer_.resize(before + more);
        buffer_.resize(before + bytes_.read(buffer_.data() + before, more));
        return buffer_.size() == before + more;
    }

    /// Returns the buffer; what follows `end` becomes the new buffer.
    std::shared_ptr<std::string> take(size_t end) {
        std::string rest = buffer_.substr(end);
        auto taken = std::make_shared<std::string>(std::move(buffer_));
        buffer_ = std::move(rest);
        if (taken->size() < batch_bytes / 2) taken->shrink_to_fit();  // a small file
        return taken;
    }

    /// Throws Error if buffer_[begin, end), a document or the rest of one that must be held whole,
    /// is too long.
    void check_length(size_t begin, size_t end) const {
        if (static_cast<int64_t>(end - begin) <= max_document_bytes) return;
        throw Error(
            source_.name(), " has a document of more than ", max_document_bytes >> 20,
            " MiB at byte ", position_.offset + static_cast<int64_t>(begin),
            flows_
                ? ", and cannot cut it, since white space follows no letter or number in it; put "
                  "lines <|endoftext|> between documents"
                : ", but a document must be read whole to decide its split; put lines "
                  "<|endoftext|> between documents, or use --val-fraction 0 or, for plain "
                  "files, --val-split tail");
    }

    void push(Batch batch) {
        batch.source = position_.source;
        batch.file_bytes = bytes_.file_bytes();
        stream_.push(std::move(batch));
    }

    // ---- Plain text

    void read_text() {
        bool at_line_start = position_.offset == 0 || last_byte_ == '\n';
        size_t searched = 0, more = batch_bytes;
        for (bool complete = false; !complete;) {
            complete = !fill(more);
            parts_.clear();
            size_t begin = 0;
            for (;;) {
                const Separator found =
                    find_separator(buffer_, std::max(begin, searched), at_line_start, complete);
                if (found.begin == std::string::npos) break;
                add(begin, found.begin, true);
                position_.in_document = false;
                begin = found.end;
            }
            if (complete) {
                add(begin, buffer_.size(), true);
                position_.in_document = false;
                begin = buffer_.size();
            } else if (begin == 0 && flows_) {
                std::string_view known(buffer_.data(), buffer_.size() - lookahead);
                while (known.size() > batch_bytes / 2) {
                    const size_t length = encodable_piece(known, batch_bytes / 2);
                    if (length == known.size()) break;
                    add(begin, begin + length, false);
                    position_.in_document = true;
                    begin += length;
                    known.remove_prefix(length);
                }
            }
            if (begin == 0 && parts_.empty()) {
                check_length(0, buffer_.size());
                searched = buffer_.size() - std::min(buffer_.size(), separator.size() + 2);
                more = std::max(buffer_.size() / 2, batch_bytes);
                continue;
            }
            if (begin > 0) at_line_start = buffer_[begin - 1] == '\n';
            more = batch_bytes;
            searched = 0;
            release(begin);
        }
    }

    /// Adds buffer_[begin, end), a document or the rest or a part of one, to parts_.
    void add(size_t begin, size_t end, bool ends) {
        const bool begins = !position_.in_document;
        if (begin == end && begins) return;
        if (!flows_) check_length(begin, end);
        if (!rules_.cut) {
            parts_.push_back({begin, end, begins, ends, only_split(rules_.val_fraction)});
            return;
        }
        const int64_t cut = *rules_.cut - stream_.begins_[position_.source] - position_.offset;
        const size_t here = static_cast<size_t>(
            std::clamp<int64_t>(cut, static_cast<int64_t>(begin), static_cast<int64_t>(end)));
        if (here > begin || (begin == end && cut >= static_cast<int64_t>(end)))
            parts_.push_back({begin, here, begins, ends && here == end, Split::train});
        if (here < end) parts_.push_back({here, end, begins && here == begin, ends, Split::val});
    }

    /// Hands out the bytes before buffer_[end] in batches of about batch_bytes.
    void release(size_t end) {
        const auto storage = take(end);
        const std::string_view text = std::string_view(*storage).substr(0, end);

        const int64_t begin = position_.offset, line = position_.line;
        Batch batch;
        size_t batch_begin = 0, sent = 0;
        const auto flush = [&](size_t to, bool can_restart) {
            batch.begin = begin;
            batch.line = line;
            advance(text.substr(sent, to - sent));
            count_lines(text.substr(sent, to - sent));
            sent = batch_begin = to;
            batch.storage = storage;
            batch.end = position_;
            batch.can_restart = can_restart;
            push(std::exchange(batch, {}));
        };
        const bool in_document = position_.in_document;
        for (const Stretch& stretch : parts_) {
            std::string_view rest_of_part = text.substr(stretch.begin, stretch.end - stretch.begin);
            std::optional<Split> split = stretch.split;
            const bool long_one = rest_of_part.size() > 2 * batch_bytes && rules_.cuttable;
            if (long_one && !split) split = split_of(rest_of_part, rules_.val_fraction);
            bool begins = stretch.begins;
            do {
                const size_t length =
                    long_one ? encodable_piece(rest_of_part, batch_bytes) : rest_of_part.size();
                const bool last = length == rest_of_part.size();
                batch.parts.push_back(
                    {rest_of_part.substr(0, length), begins, stretch.ends && last, split});
                begins = false;
                rest_of_part.remove_prefix(length);
                const size_t to = stretch.end - rest_of_part.size();
                if (to - batch_begin >= batch_bytes) {
                    position_.in_document = !(stretch.ends && last);
                    flush(to, last);
                }
            } while (!rest_of_part.empty());
        }
        position_.in_document = in_document;
        if (sent < end || !batch.parts.empty()) flush(end, true);
    }

    // ---- JSON Lines, and arrays converted to JSON Lines

    void read_lines() {
        size_t more = batch_bytes;
        for (bool complete = false; !complete;) {
            complete = !fill(more);
            const size_t end =
                complete && bytes_.damage().empty() ? buffer_.size() : buffer_.rfind('\n') + 1;
            if (end == 0 && !complete) {
                if (static_cast<int64_t>(buffer_.size()) > max_document_bytes) {
                    skip_line();
                    more = batch_bytes;
                } else {
                    more = std::max(buffer_.size() / 2, batch_bytes);
                }
                continue;
            }
            more = batch_bytes;
            if (end > 0) release_lines(end);
        }
        // A line that is cut off by damage is left out. If it is already too long, it counts as
        // such, so that the result does not depend on where reading began.
        if (static_cast<int64_t>(buffer_.size()) > max_document_bytes) skip_line();
    }

    void release_lines(size_t end, bool can_restart = true) {
        const auto storage = take(end);
        Batch batch;
        batch.storage = storage;
        batch.lines = std::string_view(*storage).substr(0, end);
        batch.record = is_array_ ? Record::element : Record::line;
        batch.begin = position_.offset;
        batch.line = position_.line;
        advance(batch.lines);
        if (is_array_) array_to_lines(*storage, end);
        count_lines(batch.lines);
        batch.end = position_;
        batch.can_restart = can_restart;
        push(std::move(batch));
    }

    /// Starts before an element or before the closing bracket of the array.
    void read_array() {
        ArrayScanner scanner;
        size_t scanned = 0, end = 0, more = batch_bytes;
        bool ended = false;
        for (bool complete = false; !complete && !ended;) {
            complete = !fill(more);
            while (scanned < buffer_.size() && !ended) {
                const ArrayScanner::Byte byte = scanner.next(buffer_[scanned++]);
                ended = byte == ArrayScanner::Byte::end;
                if (byte != ArrayScanner::Byte::of_element) end = scanned;
            }
            more = end > 0 ? batch_bytes : std::max(buffer_.size() / 2, batch_bytes);
            if (end == 0 && static_cast<int64_t>(buffer_.size()) > max_document_bytes) {
                end_at_damage(concat("has an element without an end within ",
                                     max_document_bytes >> 20, " MiB in its array"));
                return;
            }
            if (end == 0) continue;
            // No restart after the array's end: a Position does not record that it was reached.
            release_lines(end, !ended);
            scanned -= std::exchange(end, 0);
        }
        if (!ended && bytes_.damage().empty())
            end_at_damage("is truncated: it ends within its array");
        while (ended) {
            if (!is_blank(buffer_)) end_at_damage("has text after its array");
            drop_front(buffer_.size());
            if (!damage_.empty() || (!fill(batch_bytes) && buffer_.empty())) break;
        }
    }

    /// Records that the source itself is damaged at buffer_[0]; throws Error unless damage is to be
    /// skipped.
    void end_at_damage(const std::string& what) {
        damage_ = concat(source_.name(), " ", what, ", after byte ", position_.offset);
        if (!rules_.skip_damage)
            throw Error(damage_, "; fix it, or use --skip-bad to leave out the rest");
    }

    /// Leaves out the line whose beginning is in the buffer.
    void skip_line() {
        Batch batch;
        batch.begin = position_.offset;
        batch.line = position_.line;
        batch.line_too_long = true;
        for (;;) {
            const size_t newline = buffer_.find('\n');
            const size_t end = newline == std::string::npos ? buffer_.size() : newline + 1;
            advance(std::string_view(buffer_).substr(0, end));
            buffer_.erase(0, end);
            if (newline != std::string::npos || !(fill(batch_bytes) || !buffer_.empty())) break;
        }
        ++position_.line;
        batch.end = position_;
        batch.can_restart = true;
        push(std::move(batch));
    }

    struct Stretch {
        size_t begin, end;  // in buffer_
        bool begins, ends;
        std::optional<Split> split;
    };

    DocumentStream& stream_;
    const DocumentRules& rules_;
    const Source& source_;
    ByteStream bytes_;
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_{
        ::XXH3_createState(), ::XXH3_freeState};
    Position position_;  // of buffer_[0]
    char last_byte_ = '\n';
    bool is_array_ = false;
    std::string damage_;  // of an array
    // Whether pieces of a document are handed out as they are read: they may be encoded separately,
    // and the split does not depend on the whole document.
    const bool flows_ = rules_.cuttable && (only_split(rules_.val_fraction) || rules_.cut);
    std::string buffer_;
    std::vector<Stretch> parts_;
};

DocumentStream::DocumentStream(const std::vector<Source>& sources, const DocumentRules& rules,
                               Position start, int readers)
    : sources_(sources),
      rules_(rules),
      start_(start),
      queues_(sources.size()),
      next_to_read_(start.source),
      next_out_(start.source),
      most_held_(queue_bytes * std::max(1, readers)) {
    begins_.push_back(0);
    for (const Source& source : sources) begins_.push_back(begins_.back() + source.size);
    const size_t left = sources.size() - std::min(sources.size(), start.source);
    try {
        while (threads_.size() < std::min<size_t>(left, static_cast<size_t>(std::max(1, readers))))
            threads_.emplace_back([this] { read_sources(); });
    } catch (const std::system_error&) {
        if (threads_.empty()) throw;  // fewer threads do the same work
    }
}

void DocumentStream::read_rows(size_t index) {
    const bool continues = index == start_.source;
    const Position begin{index, 0, 0, false, 0};
    RowBatches rows(sources_[index], continues ? start_ : begin, rules_);
    while (std::optional<Batch> batch = rows.next()) push(std::move(*batch));
}

void DocumentStream::stop() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
}

DocumentStream::~DocumentStream() {
    stop();
    for (std::thread& thread : threads_) thread.join();
}

void DocumentStream::read_sources() {
    for (;;) {
        size_t index;
        {
            const std::lock_guard lock(mutex_);
            if (stop_ || next_to_read_ == sources_.size()) return;
            index = next_to_read_++;
        }
        std::exception_ptr failure;
        try {
            if (sources_[index].is_parquet())
                read_rows(index);
            else
                Reader(*this, index).read();
        } catch (...) {
            failure = std::current_exception();
        }
        {
            const std::lock_guard lock(mutex_);
            queues_[index].failure = failure;
            queues_[index].done = true;
        }
        changed_.notify_all();
    }
}

int64_t Batch::bytes() const {
    size_t bytes = lines.size();
    for (const Part& part : parts) bytes += part.text.size();
    return static_cast<int64_t>(bytes);
}

namespace {

int64_t held_by(const Batch& batch) {
    return batch.bytes() + static_cast<int64_t>(sizeof(Batch) + batch.parts.size() * sizeof(Part));
}

}  // namespace

void DocumentStream::push(Batch batch) {
    std::unique_lock lock(mutex_);
    Queue& queue = queues_[batch.source];
    // The source that is being handed out does not wait for batches of other sources.
    changed_.wait(lock, [&] {
        return stop_ || ((queue.batches.empty() || queue.bytes < queue_bytes) &&
                         (batch.source == next_out_ || held_bytes_ < most_held_));
    });
    if (stop_) throw Error("stopped");
    queue.bytes += held_by(batch);
    held_bytes_ += held_by(batch);
    queue.batches.push_back(std::move(batch));
    lock.unlock();
    changed_.notify_all();
}

std::optional<Batch> DocumentStream::next() {
    std::unique_lock lock(mutex_);
    while (next_out_ < sources_.size()) {
        Queue& queue = queues_[next_out_];
        changed_.wait(lock, [&] { return stop_ || queue.done || !queue.batches.empty(); });
        if (stop_) throw Error("stopped");
        if (!queue.batches.empty()) {
            Batch batch = std::move(queue.batches.front());
            queue.batches.pop_front();
            queue.bytes -= held_by(batch);
            held_bytes_ -= held_by(batch);
            lock.unlock();
            changed_.notify_all();
            return batch;
        }
        if (queue.failure) std::rethrow_exception(queue.failure);
        ++next_out_;
        changed_.notify_all();
    }
    return {};
}

}  // namespace train_gpt
