// Writes Parquet files of one column of texts, among others, in every shape that readers must take.
// It shares nothing with the program's reader: written after the specification (parquet-format).
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace train_gpt {

using Rows = std::vector<std::optional<std::string>>;  // null rows have no text

/// Numbers as the specification has them.
namespace parquet_numbers {
constexpr int plain = 0, plain_dictionary = 2, delta_length = 6, delta_bytes = 7,
              rle_dictionary = 8;
constexpr int uncompressed = 0, snappy = 1, gzip = 2, zstd = 6, lz4_raw = 7;
constexpr int utf8 = 0, list = 3, enumeration = 4, decimal = 5, date = 6, json = 19;
constexpr int int32 = 1, int64 = 2, real = 5, byte_array = 6, fixed = 7;
}  // namespace parquet_numbers

struct ParquetShape {
    std::string column = "text";
    int encoding = parquet_numbers::plain;
    int codec = parquet_numbers::uncompressed;
    int page_version = 1;
    bool is_optional = true;
    bool has_checksums = false;
    bool has_others = false;  // columns before and after this one, some of them nested
    size_t group_rows = 1000, page_rows = 1000;
    // How the column is annotated: a converted type, a logical type, or both (-1: not).
    int converted = parquet_numbers::utf8, logical = -1;
    int type = parquet_numbers::byte_array;
    int repetition = 1;  // if it is optional; else 0

    // What a damaged file says: numbers that are added to what is right.
    int64_t more_rows = 0;       // of the row groups
    int64_t more_file_rows = 0;  // of the file
    int64_t more_unpacked = 0;   // bytes of each data page
    int64_t more_packed = 0;     // bytes of each data page
    int64_t more_nulls = 0;      // of each page of version 2
    int64_t more_words = 0;      // of the dictionary
    int64_t longer = 0;          // bytes of the chunks
    int64_t later = 0;           // bytes by which the chunks begin later
    int level_encoding = 3;
    int footer_codec = -1;  // instead of the right one
    int page_encoding = -1;
};

/// Any shape of a valid file that this build can read.
ParquetShape random_shape();
/// The codecs of this build.
std::vector<int> parquet_codecs();

struct WrittenPage {
    size_t group = 0, number = 0;          // from 1
    size_t header = 0, body = 0, end = 0;  // bytes in the file
    size_t first_row = 0;                  // in the file; of a dictionary, the one after it
};
struct WrittenParquet {
    std::string bytes;
    std::vector<WrittenPage> pages;  // of the column
    size_t groups = 0, footer = 0;
};
WrittenParquet write_parquet(const Rows& rows, const ParquetShape& shape);

}  // namespace train_gpt
