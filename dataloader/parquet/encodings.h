// How Parquet encodes texts and levels in pages (parquet-format/Encodings.md).
//
// All readers here hand out one value at a time, so that the number of values that a page claims
// needs no memory. They throw Error, with just the reason, where the bytes do not hold what is
// asked for, and never read beyond the bytes they were given.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt::parquet {

/// The numbers of Encoding in the specification.
enum class Encoding : int {
    plain = 0,
    plain_dictionary = 2,
    rle = 3,
    bit_packed = 4,
    delta_length_byte_array = 6,
    delta_byte_array = 7,
    rle_dictionary = 8
};

/// Numbers of up to 32 bits, packed from the lowest bit of each byte on.
class BitReader {
  public:
    BitReader() = default;
    explicit BitReader(std::string_view bytes) : bytes_(bytes) {}
    uint32_t next(int width);

  private:
    std::string_view bytes_;
    uint64_t bits_ = 0;
    int held_ = 0;  // bits in bits_
};

/// RLE, the hybrid of runs and packed numbers: levels, and indices into a dictionary.
class HybridReader {
  public:
    HybridReader() = default;
    /// Numbers of `width` bits. With width 0 all are 0 and there may be no bytes.
    HybridReader(std::string_view bytes, int width);
    uint32_t next() {
        if (width_ == 0) return 0;
        while (left_ == 0) begin_run();
        --left_;
        return is_packed_ ? packed_.next(width_) : value_;
    }

  private:
    void begin_run();

    std::string_view bytes_;
    int width_ = 0;
    uint64_t left_ = 0;  // in the run
    bool is_packed_ = false;
    uint32_t value_ = 0;
    BitReader packed_;
};

/// DELTA_BINARY_PACKED, of 32-bit integers.
class DeltaReader {
  public:
    DeltaReader() = default;
    /// Reads the header of the numbers that `bytes` begins with.
    explicit DeltaReader(std::string_view bytes);
    uint64_t count() const { return count_; }
    /// The number of bytes of all numbers together. Takes a time of the order of these bytes, not
    /// of count().
    size_t size() const;
    int32_t next();

  private:
    /// Reads the smallest difference and the widths of a block.
    void begin_block(std::string_view& bytes);
    int width(uint64_t miniblock) const;

    std::string_view bytes_;  // after what was read
    size_t header_ = 0;       // its bytes
    uint64_t count_ = 0, left_ = 0;
    uint64_t miniblocks_ = 0, miniblock_values_ = 0;
    uint32_t value_ = 0, smallest_ = 0;
    std::string_view widths_;
    uint64_t next_miniblock_ = 0, left_in_miniblock_ = 0;
    int width_ = 0;
    BitReader packed_;
    bool is_first_ = true;
};

/// A dictionary of texts.
class Dictionary {
  public:
    /// Takes `count` texts in PLAIN encoding.
    void assign(std::string_view bytes, size_t count);
    std::string_view at(uint32_t index) const;

  private:
    std::string bytes_;
    std::vector<std::string_view> texts_;
};

/// The texts of a page.
class TextReader {
  public:
    /// Begins a page. `dictionary` (null: there is none) must outlive its texts.
    void begin(Encoding encoding, std::string_view bytes, const Dictionary* dictionary);
    /// The next text; it is valid until the next call.
    std::string_view next();

    static bool reads(int encoding);

  private:
    std::string_view bytes_;  // PLAIN: what follows; DELTA_…: the texts that follow
    Encoding encoding_ = Encoding::plain;
    const Dictionary* dictionary_ = nullptr;
    HybridReader indices_;
    DeltaReader lengths_, prefixes_;
    std::string text_;  // the last one of DELTA_BYTE_ARRAY
};

/// The number in the first four bytes, which are removed.
uint32_t take_uint32(std::string_view& bytes);

}  // namespace train_gpt::parquet
