#include "dataloader/tail_split.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/file.h"
#include "base/utf8.h"

namespace train_gpt {

namespace {

/// The files as one text: byte p of it is in the file i with begin(i) <= p < begin(i + 1).
class Corpus {
  public:
    explicit Corpus(const std::vector<Source>& sources) {
        for (const Source& source : sources) {
            if (!source.held) files_.emplace_back(source.path);
            texts_.push_back(source.held ? std::string_view(*source.held) : files_.back().text());
            begins_.push_back(begins_.back() + static_cast<int64_t>(texts_.back().size()));
        }
    }
    int files() const { return static_cast<int>(texts_.size()); }
    int64_t bytes() const { return begins_.back(); }
    int64_t begin(int file) const { return begins_[static_cast<size_t>(file)]; }
    std::string_view text(int file) const { return texts_[static_cast<size_t>(file)]; }

    /// The first place in [from, to] where a line or a file begins; -1 when there is none.
    int64_t line_after(int64_t from, int64_t to) const {
        for (int i = 0; i < files(); ++i) {
            if (begin(i + 1) < from) continue;
            if (begin(i) >= from) return begin(i) <= to ? begin(i) : -1;
            const size_t newline = text(i).find('\n', static_cast<size_t>(from - 1 - begin(i)));
            if (newline == std::string_view::npos) continue;
            const int64_t line = begin(i) + static_cast<int64_t>(newline) + 1;
            return line <= to ? line : -1;
        }
        return -1;
    }

    /// The last place in [from, to] where a line or a file begins; -1 when there is none.
    int64_t line_before(int64_t from, int64_t to) const {
        for (int i = files() - 1; i >= 0; --i) {
            if (begin(i) > to) continue;
            const int64_t last = std::min(to, begin(i + 1)) - 1 - begin(i);
            const size_t newline =
                last < 0 ? std::string_view::npos : text(i).rfind('\n', static_cast<size_t>(last));
            const int64_t line = newline == std::string_view::npos
                                     ? begin(i)
                                     : begin(i) + static_cast<int64_t>(newline) + 1;
            return line >= from ? line : -1;
        }
        return -1;
    }

    /// The first place at or after `from` that is not inside a UTF-8 character.
    int64_t character_after(int64_t from) const {
        for (int i = 0; i < files(); ++i) {
            if (begin(i + 1) <= from) continue;
            const std::string_view here = text(i);
            size_t p = static_cast<size_t>(from - begin(i));
            // A character has at most three continuation bytes; more of them are not UTF-8, and any
            // place is as good.
            for (int n = 0; n < 3 && p > 0 && p < here.size() && (here[p] & 0xC0) == 0x80; ++n) ++p;
            return begin(i) + static_cast<int64_t>(p);
        }
        return bytes();
    }

  private:
    std::vector<MappedFile> files_;
    std::vector<std::string_view> texts_;
    std::vector<int64_t> begins_{0};
};

bool is_one_document(std::string_view text) {
    text = without_byte_order_mark(text);
    int documents = 0;
    for (size_t begin = 0; begin < text.size() && documents < 2;) {
        Separator next = find_separator(text, begin, true, true);
        if (next.begin == std::string_view::npos) next = {text.size(), text.size()};
        if (next.begin > begin) ++documents;
        begin = next.end;
    }
    return documents < 2;
}

}  // namespace

int64_t tail_begin(const std::vector<Source>& sources, double fraction) {
    const Corpus corpus(sources);
    const int64_t total = corpus.bytes();
    const int64_t wanted = std::llround(fraction * static_cast<double>(total));
    if (wanted == 0) return total;
    const int64_t cut = total - wanted;
    if (cut == 0) return cut;
    // A line boundary moves the cut by at most half of the validation text, in either direction.
    const int64_t slack = wanted / 2;
    if (const int64_t line = corpus.line_after(cut, cut + slack); line > 0 && line < total)
        return line;
    if (const int64_t line = corpus.line_before(cut - slack, cut); line > 0) return line;
    return corpus.character_after(cut);
}

bool is_single_document(const std::vector<Source>& sources) {
    const Source* only = nullptr;
    for (const Source& source : sources) {
        if (!source.is_plain_file()) return false;
        if (source.size == 0) continue;
        if (only) return false;
        only = &source;
    }
    if (!only) return true;
    return is_one_document(MappedFile(only->path).text());
}

Source* find_single_text(std::vector<Source>& sources) {
    Source* only = nullptr;
    for (Source& source : sources) {
        if (source.is_plain_file() && source.size == 0) continue;
        if (only || source.jsonl || source.is_parquet() || source.is_plain_file()) return nullptr;
        only = &source;
    }
    return only;
}

bool hold_text(Source& source, bool only_document, bool skip_damage,
               const std::atomic<bool>& stop) {
    ByteStream bytes(source.path, source.compression, stop, skip_damage);
    auto text = std::make_shared<std::string>();
    source.held = text;
    for (size_t size = 1 << 20;; size *= 2) {
        const size_t before = text->size();
        text->resize(size);
        text->resize(before + bytes.read(text->data() + before, size - before));
        if (only_document && !is_one_document(*text)) return false;
        if (text->size() < size) return true;
        if (static_cast<int64_t>(size) >= max_document_bytes) return false;
    }
}

}  // namespace train_gpt
