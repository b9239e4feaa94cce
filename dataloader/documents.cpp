#include "dataloader/documents.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include <xxhash.h>

#include "kernels/error.h"
#include "kernels/file.h"
#include "tokenizer/pretokenize.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kSeparator = "<|endoftext|>";
constexpr size_t kBatchBytes = 1 << 20;
constexpr int64_t kQueueBytes = 16 << 20;  // read ahead of each source
// Behind a place where an unfinished document is cut, so much of it is known to follow.
constexpr size_t kLookahead = 32;
constexpr std::string_view kWhiteSpace = " \t\r\n";

// ---- Sources ------------------------------------------------------------------------------------

struct Kind {
    bool jsonl = false;
    Compression compression = Compression::none;
    bool is_text = false;  // certainly: a folder's files that may be anything are left out
};

/// The last extension of a name, without which the name is left.
std::string take_extension(std::string& name) {
    const size_t dot = name.rfind('.');
    if (dot == std::string::npos || dot == 0) return "";
    std::string extension = name.substr(dot);
    name.resize(dot);
    for (char& c : extension) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return extension;
}

/// What a file is by its name.
Kind kind_of(const fs::path& path, bool has_field) {
    std::string name = path.filename().string();
    Kind kind;
    std::string extension = take_extension(name);
    if (extension == ".gz") kind.compression = Compression::gzip;
    if (extension == ".zst") kind.compression = Compression::zstd;
    if (kind.compression != Compression::none) extension = take_extension(name);
    const bool plain = extension == ".txt" || extension == ".text" || extension == ".md";
    const bool jsonl = extension == ".jsonl" || extension == ".ndjson";
    kind.is_text = plain || jsonl;
    kind.jsonl = jsonl || extension == ".json" || (has_field && !plain);
    return kind;
}

/// Refuses files that are known not to be text.
void refuse_unreadable_kinds(const std::string& path) {
    std::string name = fs::path(path).filename().string();
    std::string extension = take_extension(name);
    if (extension == ".parquet")
        throw Error(path,
                    " is a Parquet file, which train_gpt does not read; turn it into JSON "
                    "Lines first, for example with DuckDB: duckdb -c \"COPY (SELECT text "
                    "FROM '",
                    path, "') TO 'text.jsonl'\"");
    if (extension == ".gz" || extension == ".zst") extension = take_extension(name);
    for (const char* archive : {".tar", ".tgz", ".zip", ".7z", ".xz", ".bz2", ".lz4"})
        if (extension == archive)
            throw Error(path,
                        " is packed in a way that train_gpt does not read (it reads plain, .gz "
                        "and .zst files); unpack it first, or pipe its text in and say -");
}

Source make_source(const std::string& path, Kind kind) {
    const std::atomic<bool> never{false};
    const ByteStream opened(path, kind.compression,
                            never);  // to be told now that it cannot be read
    return {path, kind.jsonl, kind.compression, opened.size(), opened.modified()};
}

/// The texts in a folder and below, and how many other files there are. `above` are the folders on the way to it, to
/// which links in it may lead back.
void list_texts(const fs::path& folder, std::vector<fs::path>& above,
                std::vector<std::string>& files, int64_t& skipped) {
    const fs::path real = fs::canonical(folder);
    if (std::ranges::find(above, real) != above.end()) return;
    above.push_back(real);
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
        if (entry.is_directory()) {
            if (entry.path().filename() != kStagingFolder)
                list_texts(entry.path(), above, files, skipped);
        } else if (entry.is_regular_file() && kind_of(entry.path(), false).is_text) {
            files.push_back(entry.path().string());
        } else {
            ++skipped;
        }
    }
    above.pop_back();
}

void add_folder(const std::string& folder, Sources& found) {
    std::vector<fs::path> above;
    std::vector<std::string> files;
    int64_t skipped = 0;
    try {
        list_texts(folder, above, files, skipped);
    } catch (const fs::filesystem_error& error) {
        throw Error("cannot list ", error.path1().string(), ": ", error.code().message(),
                    "; check the permissions");
    }
    if (files.empty())
        throw Error("the folder ", folder, " holds no text",
                    skipped > 0 ? " that is known by its name (" : "",
                    skipped > 0 ? concat(skipped, " other files)") : "",
                    "; inputs end in .txt, .text, .md, .jsonl or .ndjson, or one of these with .gz "
                    "or .zst behind it");
    std::sort(files.begin(), files.end());
    for (const std::string& file : files)
        found.sources.push_back(make_source(file, kind_of(file, false)));
    found.skipped += skipped;
}

}  // namespace

Sources find_sources(const std::vector<std::string>& inputs, bool has_field) {
    Sources found;
    for (const std::string& input : inputs) {
        if (input == "-") {
            if (std::count(inputs.begin(), inputs.end(), "-") > 1)
                throw UsageError("- was given twice, but standard input can be read once");
            found.sources.push_back({"-", has_field, Compression::none, 0, 0});
            continue;
        }
        if (fs::is_directory(input)) {
            add_folder(input, found);
            continue;
        }
        std::vector<std::string> files{input};
        if (!fs::exists(input) && input.find_first_of("*?[") != std::string::npos) {
            files.clear();
            for (const fs::path& path : glob_files(input)) files.push_back(path.string());
        }
        for (const std::string& file : files) {
            refuse_unreadable_kinds(file);
            found.sources.push_back(make_source(file, kind_of(file, has_field)));
        }
    }
    if (has_field && std::ranges::none_of(found.sources, &Source::jsonl))
        throw UsageError("--field names a field of JSON Lines, but ", found.sources.front().name(),
                         " is plain text by its name; give it a name that ends in .jsonl, or leave "
                         "--field out");
    return found;
}

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
    for (size_t at = from;; at += kSeparator.size()) {
        at = text.find(kSeparator, at);
        if (at == std::string_view::npos) break;
        if (at > 0 ? text[at - 1] != '\n' : !at_line_start) continue;
        size_t after = at + kSeparator.size();
        if (after < text.size() && text[after] == '\r') ++after;
        if (after == text.size() && !complete) break;  // seen when more is there
        if (after < text.size() && text[after] != '\n') continue;
        return {at, std::min(after + 1, text.size())};
    }
    return {std::string_view::npos, std::string_view::npos};
}

namespace {

/// Whether a character that is no white space in any sense begins at text[at]: ASCII, or
/// well-formed UTF-8 outside the blocks that hold Unicode's spaces.
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
    // U+0085 and U+00A0 have lead C2; U+1680 E1; U+2000 to U+205F E2 80 and E2 81; U+3000 E3 80 80.
    if (lead == 0xE1 || (lead == 0xE2 && byte(at + 1) <= 0x81)) return false;
    return !(lead == 0xE3 && byte(at + 1) == 0x80 && byte(at + 2) == 0x80);
}

/// Whether the character that ends before text[at] is one of begins_word().
bool ends_word(std::string_view text, size_t at) {
    for (size_t length = 1; length <= 4 && length <= at; ++length)
        if ((text[at - length] & 0xC0) != 0x80) return begins_word(text.substr(0, at), at - length);
    return false;
}

}  // namespace

bool is_encodable_cut(std::string_view text, size_t at) {
    if (at == 0 || at >= text.size()) return false;
    // Between two words behind a single line break: the patterns let one follow punctuation and join
    // other white space, but no piece goes on behind it with a word. ('/' is left out for patterns that
    // let line breaks and slashes follow punctuation together, as o200k does.)
    if (text[at - 1] == '\n')
        return ends_word(text, at - 1) && begins_word(text, at) && text[at] != '/';
    // Before white space behind a letter or number: only punctuation is joined with what follows.
    return kWhiteSpace.find(text[at]) != kWhiteSpace.npos &&
           ends_in_letter_or_number(text.substr(0, at));
}

size_t encodable_piece(std::string_view text, size_t wanted) {
    for (size_t at = wanted; (at = text.find_first_of(kWhiteSpace, at)) != text.npos; ++at)
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
          bytes_(source_.path, source_.compression, stream.stop_, rules_.skip_damage) {
        if (bytes_.size() != source_.size || bytes_.modified() != source_.modified)
            throw Error(source_.path,
                        " changed after this command had begun; run it again when "
                        "nothing writes to it");
        ::XXH3_64bits_reset(hash_.get());
        position_.source = index;
        if (index == stream.start_.source) drop(stream.start_);
    }

    void read() {
        if (source_.jsonl)
            read_lines();
        else
            read_text();
        Batch last;
        last.last = true;
        last.damage = bytes_.damage();
        last.end = position_;
        push(std::move(last));
    }

  private:
    /// Goes to where an interrupted run was: by reading, which works for all inputs and shows whether
    /// they are the same.
    void drop(const Position& start) {
        std::string dropped(kBatchBytes, '\0');
        while (position_.offset < start.offset && !stream_.stop_) {
            const size_t n = bytes_.read(
                dropped.data(),
                std::min(dropped.size(), static_cast<size_t>(start.offset - position_.offset)));
            if (n == 0) break;
            last_byte_ = dropped[n - 1];
            advance(std::string_view(dropped).substr(0, n));
        }
        if (start.offset > 0 && (position_.offset != start.offset || position_.hash != start.hash))
            throw Error(source_.name(),
                        " is not what it was when this command was interrupted (up to "
                        "byte ",
                        start.offset, "); give it the same again, or remove the folder ",
                        kStagingFolder, " to begin anew");
        position_.line = start.line;
        position_.in_document = start.in_document;
    }

    void advance(std::string_view bytes) {
        ::XXH3_64bits_update(hash_.get(), bytes.data(), bytes.size());
        position_.hash = ::XXH3_64bits_digest(hash_.get());
        position_.offset += static_cast<int64_t>(bytes.size());
    }

    /// Reads on until the buffer has `more` bytes more; false at the end of the source.
    bool fill(size_t more) {
        const size_t before = buffer_.size();
        buffer_.resize(before + more);
        buffer_.resize(before + bytes_.read(buffer_.data() + before, more));
        return buffer_.size() == before + more;
    }

    /// The buffer, in which what lies behind `end` is left.
    std::shared_ptr<const std::string> take(size_t end) {
        std::string rest = buffer_.substr(end);
        auto taken = std::make_shared<std::string>(std::move(buffer_));
        buffer_ = std::move(rest);
        if (taken->size() < kBatchBytes / 2) taken->shrink_to_fit();  // a small file
        return taken;
    }

    /// Of a document, or the rest of one, that must be held whole and begins at buffer_[begin].
    void check_length(size_t begin, size_t end) const {
        if (static_cast<int64_t>(end - begin) <= kMaxDocumentBytes) return;
        throw Error(
            source_.name(), " has a document of more than ", kMaxDocumentBytes >> 20,
            " MiB at byte ", position_.offset + static_cast<int64_t>(begin),
            flows_ ? ", in which no letter or number has white space behind it, where it could "
                     "be cut; put lines <|endoftext|> between documents"
                   : ", which must be seen whole to tell its split; put lines <|endoftext|> "
                     "between documents, or say --val-fraction 0 or, for plain files, "
                     "--val-split tail");
    }

    void push(Batch batch) {
        batch.source = position_.source;
        batch.file_bytes = bytes_.file_bytes();
        stream_.push(std::move(batch));
    }

    // ---- Plain text

    void read_text() {
        bool at_line_start = position_.offset == 0 || last_byte_ == '\n';
        size_t searched = 0, more = kBatchBytes;
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
                std::string_view known(buffer_.data(), buffer_.size() - kLookahead);
                while (known.size() > kBatchBytes / 2) {
                    const size_t length = encodable_piece(known, kBatchBytes / 2);
                    if (length == known.size()) break;
                    add(begin, begin + length, false);
                    position_.in_document = true;
                    begin += length;
                    known.remove_prefix(length);
                }
            }
            if (begin == 0 && parts_.empty()) {
                check_length(0, buffer_.size());
                searched = buffer_.size() - std::min(buffer_.size(), kSeparator.size() + 2);
                more = std::max(buffer_.size() / 2, kBatchBytes);
                continue;
            }
            if (begin > 0) at_line_start = buffer_[begin - 1] == '\n';
            more = kBatchBytes;
            searched = 0;
            release(begin);
        }
    }

    /// Takes buffer_[begin, end) as a document, or the rest or a part of one.
    void add(size_t begin, size_t end, bool ends) {
        if (begin == end && !position_.in_document) return;
        if (!flows_) check_length(begin, end);
        if (!rules_.cut) {
            parts_.push_back({begin, end, ends, only_split(rules_.val_fraction)});
            return;
        }
        const int64_t cut = *rules_.cut - stream_.begins_[position_.source] - position_.offset;
        const size_t here = static_cast<size_t>(
            std::clamp<int64_t>(cut, static_cast<int64_t>(begin), static_cast<int64_t>(end)));
        if (here > begin || (begin == end && cut >= static_cast<int64_t>(end)))
            parts_.push_back({begin, here, ends && here == end, Split::train});
        if (here < end) parts_.push_back({here, end, ends, Split::val});
    }

    /// Hands out what lies before buffer_[end] in batches of about kBatchBytes.
    void release(size_t end) {
        const auto storage = take(end);
        const std::string_view text = std::string_view(*storage).substr(0, end);

        Batch batch;
        size_t batch_begin = 0, sent = 0;
        const auto flush = [&](size_t to, bool can_restart) {
            advance(text.substr(sent, to - sent));
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
            const bool long_one = rest_of_part.size() > 2 * kBatchBytes && rules_.cuttable;
            if (long_one && !split) split = split_of(rest_of_part, rules_.val_fraction);
            do {
                const size_t length =
                    long_one ? encodable_piece(rest_of_part, kBatchBytes) : rest_of_part.size();
                const bool last = length == rest_of_part.size();
                batch.parts.push_back(
                    {rest_of_part.substr(0, length), stretch.ends && last, split});
                rest_of_part.remove_prefix(length);
                const size_t to = stretch.end - rest_of_part.size();
                if (to - batch_begin >= kBatchBytes) {
                    position_.in_document = !(stretch.ends && last);
                    flush(to, last);
                }
            } while (!rest_of_part.empty());
        }
        position_.in_document = in_document;
        if (sent < end || !batch.parts.empty()) flush(end, true);
    }

    // ---- JSON Lines

    void read_lines() {
        size_t more = kBatchBytes;
        for (bool complete = false; !complete;) {
            complete = !fill(more);
            const size_t end =
                complete && bytes_.damage().empty() ? buffer_.size() : buffer_.rfind('\n') + 1;
            if (end == 0 && !complete) {
                if (static_cast<int64_t>(buffer_.size()) > kMaxDocumentBytes) {
                    skip_line();
                    more = kBatchBytes;
                } else {
                    more = std::max(buffer_.size() / 2, kBatchBytes);
                }
                continue;
            }
            more = kBatchBytes;
            if (end > 0) release_lines(end);
        }
        // A line that damage cuts is left out with it; one that is too long is so wherever reading began.
        if (static_cast<int64_t>(buffer_.size()) > kMaxDocumentBytes) skip_line();
    }

    void release_lines(size_t end) {
        Batch batch;
        batch.storage = take(end);
        batch.lines = std::string_view(*batch.storage).substr(0, end);
        batch.line = position_.line;
        advance(batch.lines);
        position_.line += std::count(batch.lines.begin(), batch.lines.end(), '\n');
        batch.end = position_;
        batch.can_restart = true;
        push(std::move(batch));
    }

    /// Leaves out the line that the buffer holds the beginning of.
    void skip_line() {
        Batch batch;
        batch.line = position_.line;
        batch.line_too_long = true;
        for (;;) {
            const size_t newline = buffer_.find('\n');
            const size_t end = newline == std::string::npos ? buffer_.size() : newline + 1;
            advance(std::string_view(buffer_).substr(0, end));
            buffer_.erase(0, end);
            if (newline != std::string::npos || !(fill(kBatchBytes) || !buffer_.empty())) break;
        }
        ++position_.line;
        batch.end = position_;
        batch.can_restart = true;
        push(std::move(batch));
    }

    struct Stretch {
        size_t begin, end;  // in buffer_
        bool ends;
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
    // Where a document needs not be seen whole, its pieces go as they come.
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
      most_held_(kQueueBytes * std::max(1, readers)) {
    begins_.push_back(0);
    for (const Source& source : sources) begins_.push_back(begins_.back() + source.size);
    const size_t left = sources.size() - std::min(sources.size(), start.source);
    try {
        while (threads_.size() < std::min<size_t>(left, static_cast<size_t>(std::max(1, readers))))
            threads_.emplace_back([this] { read_sources(); });
    } catch (const std::system_error&) {
        if (threads_.empty()) throw;  // fewer do the same work
    }
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

int64_t held_by(const Batch& batch) { return batch.bytes() + static_cast<int64_t>(sizeof(Batch)); }

}  // namespace

void DocumentStream::push(Batch batch) {
    std::unique_lock lock(mutex_);
    Queue& queue = queues_[batch.source];
    // The source that is handed out waits for no other's batches.
    changed_.wait(lock, [&] {
        return stop_ || ((queue.batches.empty() || queue.bytes < kQueueBytes) &&
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
