#include "dataloader/parquet/text_column.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32.h"
#include "base/file.h"
#include "base/hub_files.h"
#include "base/path.h"

namespace train_gpt::parquet {

namespace {

constexpr size_t read_bytes = 1 << 20;           // at a time
constexpr size_t likely_header_bytes = 1 << 12;  // of a page
constexpr size_t most_header_bytes = 1 << 24;    // with the smallest and the largest text in it
constexpr int64_t most_footer_bytes = 1 << 26;
constexpr int64_t tail_bytes = 8;  // the footer's size and the magic

}  // namespace

bool begins_as_parquet(std::string_view beginning) {
    // After the magic, a page or the footer begins with a field of 32 bits.
    return beginning.starts_with("PAR1\x15");
}

// ---- The file -----------------------------------------------------------------------------------

RandomFile::RandomFile(std::string path) : path_(std::move(path)) {
    file_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (const std::string link = file_ < 0 ? describe_broken_link(path_) : ""; !link.empty())
        throw Error(link, "; restore it or remove the link");
    if (file_ < 0)
        throw Error("cannot read ", path_, ": ", std::strerror(errno),
                    errno == EACCES ? "; check the permissions" : "; check the path");
    struct stat status {};
    if (::fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) {
        ::close(std::exchange(file_, -1));
        throw Error(path_, " is not a regular file; Parquet can only be read from one");
    }
    size_ = status.st_size;
    modified_ = nanoseconds(status.st_mtim);
}

RandomFile::~RandomFile() {
    if (file_ >= 0) ::close(file_);
}

void RandomFile::read(int64_t begin, char* to, size_t size) const {
    while (size > 0) {
        const ssize_t n = ::pread(file_, to, size, begin);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            throw CannotRead("cannot read ", path_, " at byte ", begin, ": ", std::strerror(errno),
                             "; check the disk and try again");
        if (n == 0) check_unchanged();
        if (n == 0) throw CannotRead(path_, " ends at byte ", begin, " all of a sudden; try again");
        to += n;
        begin += n;
        size -= static_cast<size_t>(n);
    }
}

void RandomFile::check_unchanged() const {
    struct stat status {};
    if (::fstat(file_, &status) == 0 && status.st_size == size_ &&
        nanoseconds(status.st_mtim) == modified_)
        return;
    throw CannotRead(path_, " changed while it was being read (it had ", size_,
                     " bytes); run the same command again when nothing writes to it");
}

// ---- The column ---------------------------------------------------------------------------------

TextColumn::TextColumn(const std::string& path, const std::string& column) : file_(path) {
    const int64_t whole = file_.size();
    std::string beginning(static_cast<size_t>(std::min<int64_t>(whole, 256)), '\0');
    file_.read(0, beginning.data(), beginning.size());
    refuse_lfs_pointer(path, beginning);
    std::string ends(magic.size() + tail_bytes, '\0');
    if (whole < std::ssize(magic) + tail_bytes)
        throw DamagedFile(concat(path, " is too short for a Parquet file: it has ", whole,
                                 whole == 1 ? " byte" : " bytes"));
    file_.read(0, ends.data(), magic.size());
    file_.read(whole - tail_bytes, ends.data() + magic.size(), tail_bytes);
    if (ends.starts_with(encrypted_magic) || ends.ends_with(encrypted_magic))
        throw CannotRead(path, " is encrypted; write the file again without encryption");
    if (!ends.starts_with(magic))
        throw Error(path,
                    " is not a Parquet file, though its name says so: it does not begin with ",
                    magic, "; give it another name, or download it again");
    if (!ends.ends_with(magic))
        throw DamagedFile(
            concat(path, " is truncated: it ends without the footer of a Parquet file"));
    std::string_view size_bytes = std::string_view(ends).substr(magic.size());
    const int64_t size = take_uint32(size_bytes);
    const int64_t before = whole - tail_bytes - size;
    if (before < std::ssize(magic))
        throw DamagedFile(concat(path, " is damaged: its footer says that it has ", size,
                                 " bytes, of ", whole, " of the file"));
    if (size > most_footer_bytes)
        throw DamagedFile(concat(path, " is damaged: its footer says that it has ", size,
                                 " bytes, more than ", most_footer_bytes >> 20, " MiB"));
    std::string footer(static_cast<size_t>(size), '\0');
    file_.read(before, footer.data(), footer.size());
    try {
        layout_ = find_column(footer, before, path, column);
    } catch (const CannotRead&) {
        throw;
    } catch (const Error& error) {
        throw DamagedFile(concat(path, " is damaged (", error.what(), ")"));
    }
}

void TextColumn::fail(const std::string& reason) const {
    file_.check_unchanged();
    const std::string page = page_ > 0 ? concat(", page ", page_) : "";
    throw DamagedFile(concat(file_.path(), " is damaged in row group ", group_, " of ",
                             layout_.chunks.size(), page, " (", reason, ")"));
}

TextColumn::Row TextColumn::next(std::string_view& text) {
    try {
        return next_value(text);
    } catch (const DamagedFile&) {
        throw;
    } catch (const CannotRead&) {
        throw;
    } catch (const Error& error) {
        fail(error.what());
    }
}

TextColumn::Row TextColumn::next_value(std::string_view& text) {
    while (values_left_ == 0) {
        if (rows_left_ > 0 || has_bytes_left()) {
            next_page();
        } else if (group_ < layout_.chunks.size()) {
            begin_chunk();
        } else {
            file_.check_unchanged();
            file_bytes_ = file_.size();
            return Row::end;
        }
    }
    --values_left_;
    if (has_levels_) {
        const bool is_null = levels_.next() == 0;
        if (nulls_left_ >= 0) {
            nulls_left_ -= is_null;
            if (nulls_left_ != (values_left_ > 0 ? std::max<int64_t>(nulls_left_, 0) : 0))
                throw Error("a page has another number of nulls than its header says");
        }
        if (is_null) return Row::null;
    }
    text = texts_.next();
    return Row::text;
}

void TextColumn::begin_chunk() {
    const Chunk& chunk = layout_.chunks[group_++];
    page_ = 0;
    rows_left_ = chunk.rows;
    next_byte_ = chunk.begin;
    last_byte_ = chunk.begin + chunk.size;
    window_begin_ = window_end_ = 0;
    has_dictionary_ = false;
    file_bytes_ = std::max(file_bytes_, next_byte_);
}

/// Whether there is another page in the row group, of rows or of something else.
bool TextColumn::has_bytes_left() const {
    return window_begin_ < window_end_ || next_byte_ < last_byte_;
}

/// The next bytes of the row group, `size` of them, or fewer if there are no more. They stay until
/// the next call.
std::string_view TextColumn::available(size_t size) {
    const size_t held = window_end_ - window_begin_;
    const auto left = static_cast<size_t>(last_byte_ - next_byte_);
    if (held < size && left > 0) {
        if (held > 0) std::memmove(window_.data(), window_.data() + window_begin_, held);
        window_begin_ = 0;
        window_end_ = held;
        const size_t more = std::min(left, std::max(size - held, read_bytes));
        if (window_.size() < held + more) window_.resize(held + more);
        file_.read(next_byte_, window_.data() + held, more);
        next_byte_ += static_cast<int64_t>(more);
        window_end_ += more;
    }
    return {window_.data() + window_begin_, std::min(size, window_end_ - window_begin_)};
}

PageHeader TextColumn::next_header() {
    for (size_t size = likely_header_bytes;; size *= 4) {
        const std::string_view bytes = available(size);
        if (bytes.empty())
            throw Error("its pages end ", rows_left_, " rows before those of the row group");
        ThriftReader reader(bytes);
        try {
            const PageHeader header = read_page_header(reader);
            window_begin_ += reader.position();
            return header;
        } catch (const EndOfBytes&) {
            if (bytes.size() < size) throw Error("the header of a page is cut off");
            if (size >= most_header_bytes) throw Error("the header of a page has no end");
        }
    }
}

void TextColumn::next_page() {
    ++page_;
    const PageHeader header = next_header();
    const std::string_view page = available(header.packed);
    if (page.size() < header.packed)
        throw Error("the page has ", header.packed, " bytes, but only ", page.size(),
                    " are left of the row group");
    window_begin_ += header.packed;
    file_bytes_ =
        std::max(file_bytes_, next_byte_ - static_cast<int64_t>(window_end_ - window_begin_));
    if (header.crc && crc32(page) != *header.crc) throw Error("its checksum is wrong");
    const Codec codec = layout_.chunks[group_ - 1].codec;
    switch (header.kind) {
        case PageHeader::dictionary: {
            if (page_ > 1) throw Error("a dictionary comes after other pages");
            if (header.encoding != static_cast<int>(Encoding::plain) &&
                header.encoding != static_cast<int>(Encoding::plain_dictionary))
                throw Error("its dictionary has the encoding ", header.encoding);
            const std::string_view texts =
                unpacker_.unpack(codec, page, header.unpacked, unpacked_);
            dictionary_.assign(texts, header.values);
            has_dictionary_ = true;
            break;
        }
        case PageHeader::data:
        case PageHeader::data_v2:
            begin_data(header, page);
            break;
        default:  // an index, or what a later version of the format adds
            break;
    }
}

void TextColumn::begin_data(const PageHeader& header, std::string_view page) {
    if (header.values > rows_left_) throw Error("its pages have more rows than the row group");
    const bool is_v2 = header.kind == PageHeader::data_v2;
    if (!TextReader::reads(header.encoding))
        throw CannotRead(file_.path(), ", row group ", group_, ", page ", page_,
                         ": its texts have the encoding ", header.encoding,
                         " of Parquet, which train_gpt does not read; write the file again with "
                         "PLAIN or a dictionary");
    const Codec codec = layout_.chunks[group_ - 1].codec;
    std::string_view levels, values;
    if (is_v2) {
        levels = page.substr(0, header.level_bytes);
        values = unpacker_.unpack(header.is_compressed ? codec : Codec::none,
                                  page.substr(header.level_bytes),
                                  header.unpacked - header.level_bytes, unpacked_);
    } else {
        values = unpacker_.unpack(codec, page, header.unpacked, unpacked_);
        if (layout_.is_optional) {
            if (header.level_encoding != static_cast<int>(Encoding::rle))
                throw CannotRead(file_.path(), ", row group ", group_, ", page ", page_,
                                 ": its levels have the encoding ", header.level_encoding,
                                 " of Parquet, which is deprecated and train_gpt does not read; "
                                 "write the file again with a newer program");
            const size_t size = take_uint32(values);
            if (size > values.size()) throw Error("a page has levels beyond its end");
            levels = values.substr(0, size);
            values.remove_prefix(size);
        }
    }
    has_levels_ = layout_.is_optional && !(is_v2 && header.nulls == 0);
    if (has_levels_) levels_ = HybridReader(levels, 1);
    texts_.begin(static_cast<Encoding>(header.encoding), values,
                 has_dictionary_ ? &dictionary_ : nullptr);
    values_left_ = header.values;
    nulls_left_ = is_v2 ? static_cast<int64_t>(header.nulls) : -1;
    rows_left_ -= header.values;
}

}  // namespace train_gpt::parquet
