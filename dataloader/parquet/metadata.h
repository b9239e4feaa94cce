// What a Parquet file says about itself: its footer, and the headers of its pages
// (parquet-format/README.md and parquet.thrift).
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dataloader/parquet/codecs.h"
#include "dataloader/parquet/thrift.h"

namespace train_gpt::parquet {

constexpr std::string_view magic = "PAR1";
constexpr std::string_view encrypted_magic = "PARE";

/// Where a column's pages of one row group are.
struct Chunk {
    int64_t begin = 0, size = 0;  // in the file
    int64_t rows = 0;
    Codec codec = Codec::none;
};

/// One column of texts.
struct ColumnLayout {
    bool is_optional = false;  // its pages say which rows are null
    std::vector<Chunk> chunks;
};

/// A file or a column cannot be read, though the file is not damaged: the column is missing, of
/// another type, encrypted, or written in a way that this build does not read; or the system cannot
/// read the file. The message is the whole sentence.
class CannotRead : public Error {
  public:
    using Error::Error;
};

/// Finds a column at the top level in a footer. `bytes` are the file's bytes before the footer. The
/// column must have texts: BYTE_ARRAY with one of the annotations STRING, ENUM and JSON. Throws
/// CannotRead, as a sentence that names the file and the columns that have texts; and Error, with
/// just the reason, for an invalid footer, such as one with pages beyond `bytes`.
ColumnLayout find_column(std::string_view footer, int64_t bytes, const std::string& path,
                         const std::string& column);

struct PageHeader {
    enum Kind : int { data = 0, index = 1, dictionary = 2, data_v2 = 3 };

    int kind = 0;
    size_t unpacked = 0, packed = 0;  // sizes
    std::optional<uint32_t> crc;      // of the page as it is in the file
    // Data pages and dictionaries have these:
    uint32_t values = 0;
    int encoding = 0;
    // Data pages have these:
    int level_encoding = 0;
    uint32_t nulls = 0, rows = 0;  // v2
    size_t level_bytes = 0;        // v2: before the values, not compressed
    bool is_compressed = true;     // v2
};

/// Reads the header of a page. Throws Error, with just the reason, for an invalid one, and
/// EndOfBytes if it is longer than what the reader has.
PageHeader read_page_header(ThriftReader& reader);

}  // namespace train_gpt::parquet
