// A column of texts in a Parquet file, row by row.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"
#include "dataloader/parquet/encodings.h"
#include "dataloader/parquet/metadata.h"

namespace train_gpt::parquet {

/// Whether a file that begins with these bytes is a Parquet file.
bool begins_as_parquet(std::string_view beginning);

/// A Parquet file is damaged. The message says where and what to do about it.
class DamagedFile : public Error {
  public:
    explicit DamagedFile(const std::string& damage)
        : Error(damage, "; download it again, or use --skip-bad to leave out the rest"),
          damage_(damage) {}
    /// What is damaged, and where.
    const std::string& damage() const { return damage_; }

  private:
    std::string damage_;
};

/// A file of which pieces are read.
class RandomFile {
  public:
    /// Throws Error when the file cannot be opened or is not a regular file.
    explicit RandomFile(std::string path);
    ~RandomFile();
    RandomFile(const RandomFile&) = delete;
    RandomFile& operator=(const RandomFile&) = delete;

    const std::string& path() const { return path_; }
    /// Size and time of last change (ns) when it was opened.
    int64_t size() const { return size_; }
    int64_t modified() const { return modified_; }

    /// Reads the bytes [begin, begin + size), which must be in the file. Throws CannotRead.
    void read(int64_t begin, char* to, size_t size) const;
    /// Throws CannotRead if the file has changed since it was opened.
    void check_unchanged() const;

  private:
    const std::string path_;
    int file_ = -1;
    int64_t size_ = 0, modified_ = 0;
};

/// Reads a column from beginning to end. Memory: the footer, the dictionary of a row group, and a
/// page as it is in the file and unpacked.
///
/// Read are: the encodings PLAIN, RLE_DICTIONARY, PLAIN_DICTIONARY, DELTA_LENGTH_BYTE_ARRAY and
/// DELTA_BYTE_ARRAY; data pages of both versions; the codecs of dataloader/parquet/codecs.h. Page
/// checksums are checked where there are any. Columns inside lists, maps and structures are not
/// read.
///
/// Nothing in the file is believed: sizes, counts and offsets that contradict each other or the
/// file's size are damage. Throws DamagedFile, naming row group and page, both counted from 1.
class TextColumn {
  public:
    /// Reads the footer. Throws CannotRead if the column is missing or cannot be read (see
    /// find_column), DamagedFile, and Error for what is not a Parquet file.
    TextColumn(const std::string& path, const std::string& column);

    enum class Row { text, null, end };
    /// The next row. `text` is valid until the next call.
    Row next(std::string_view& text);

    const RandomFile& file() const { return file_; }
    /// Bytes of the file before what is read next, for a report of progress.
    int64_t file_bytes() const { return file_bytes_; }

  private:
    bool has_bytes_left() const;
    std::string_view available(size_t size);
    void begin_chunk();
    PageHeader next_header();
    void next_page();
    void begin_data(const PageHeader& header, std::string_view page);
    Row next_value(std::string_view& text);
    [[noreturn]] void fail(const std::string& reason) const;

    const RandomFile file_;
    ColumnLayout layout_;
    size_t group_ = 0;  // the next one to begin; those before it have begun
    int64_t page_ = 0;  // in the row group, from 1
    int64_t file_bytes_ = 0;

    // The row group:
    int64_t rows_left_ = 0;                  // in pages that have not begun
    int64_t next_byte_ = 0, last_byte_ = 0;  // in the file: what is not yet in window_
    std::string window_;                     // bytes that were read ahead
    size_t window_begin_ = 0, window_end_ = 0;
    bool has_dictionary_ = false;
    Dictionary dictionary_;

    // The page:
    int64_t values_left_ = 0;
    int64_t nulls_left_ = 0;  // that its header counts; -1: it does not count them
    bool has_levels_ = false;
    HybridReader levels_;
    TextReader texts_;
    Unpacker unpacker_;
    std::string unpacked_;
};

}  // namespace train_gpt::parquet
