#include "dataloader/parquet/encodings.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace train_gpt::parquet {

static_assert(std::endian::native == std::endian::little, "Parquet is little endian");

namespace {

constexpr int most_bits = 32;

uint64_t take_varint(std::string_view& bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size() && i < 10; ++i) {
        const auto byte = static_cast<uint8_t>(bytes[i]);
        value |= static_cast<uint64_t>(byte & 0x7F) << 7 * i;
        if (byte >= 0x80) continue;
        bytes.remove_prefix(i + 1);
        return value;
    }
    throw Error("a number in a page does not end");
}

/// A signed number, of which 32 bits matter.
uint32_t take_zigzag(std::string_view& bytes) {
    const uint64_t value = take_varint(bytes);
    return static_cast<uint32_t>(value >> 1 ^ (~(value & 1) + 1));
}

std::string_view take(std::string_view& bytes, uint64_t size, const char* what) {
    if (size > bytes.size()) throw Error("a page has ", what, " beyond its end");
    const std::string_view taken = bytes.substr(0, size);
    bytes.remove_prefix(size);
    return taken;
}

}  // namespace

uint32_t take_uint32(std::string_view& bytes) {
    uint32_t value;
    std::memcpy(&value, take(bytes, sizeof value, "a length").data(), sizeof value);
    return value;
}

uint32_t BitReader::next(int width) {
    if (held_ < width) {
        uint32_t more = 0;
        const size_t n = std::min(bytes_.size(), sizeof more);
        if (n > 0) std::memcpy(&more, bytes_.data(), n);
        bytes_.remove_prefix(n);
        bits_ |= static_cast<uint64_t>(more) << held_;
        held_ += static_cast<int>(8 * n);
        if (held_ < width) throw Error("a page has packed numbers beyond its end");
    }
    const auto value = static_cast<uint32_t>(bits_ & ((uint64_t{1} << width) - 1));
    bits_ >>= width;
    held_ -= width;
    return value;
}

// ---- RLE ----------------------------------------------------------------------------------------

HybridReader::HybridReader(std::string_view bytes, int width) : bytes_(bytes), width_(width) {
    if (width < 0 || width > most_bits) throw Error("a page has numbers of ", width, " bits");
}

void HybridReader::begin_run() {
    if (bytes_.empty()) throw Error("a page has fewer levels or indices than values");
    const uint64_t header = take_varint(bytes_);
    is_packed_ = header & 1;
    const uint64_t length = header >> 1;
    if (length > UINT32_MAX) throw Error("a page has a run that is too long");
    const auto width = static_cast<uint64_t>(width_);
    if (is_packed_) {
        // Some writers leave out the end of the last group, so only what is asked for is missed.
        const uint64_t size = std::min<uint64_t>(length * width, bytes_.size());
        packed_ = BitReader(take(bytes_, size, "a run"));
        left_ = 8 * length;
    } else {
        const std::string_view value = take(bytes_, (width + 7) / 8, "a run");
        value_ = 0;
        std::memcpy(&value_, value.data(), value.size());
        left_ = length;
    }
}

// ---- DELTA_BINARY_PACKED ------------------------------------------------------------------------

DeltaReader::DeltaReader(std::string_view bytes) : bytes_(bytes) {
    const uint64_t block = take_varint(bytes_);
    miniblocks_ = take_varint(bytes_);
    count_ = left_ = take_varint(bytes_);
    value_ = take_zigzag(bytes_);
    header_ = bytes.size() - bytes_.size();
    if (miniblocks_ == 0 || block % miniblocks_ != 0 || block == 0 ||
        block / miniblocks_ % 32 != 0 || block > INT32_MAX || count_ > INT32_MAX)
        throw Error("a page has deltas in blocks of a wrong size");
    miniblock_values_ = block / miniblocks_;
}

int DeltaReader::width(uint64_t miniblock) const {
    const int width = static_cast<uint8_t>(widths_[miniblock]);
    if (width > most_bits) throw Error("a page has numbers of ", width, " bits");
    return width;
}

void DeltaReader::begin_block(std::string_view& bytes) {
    smallest_ = take_zigzag(bytes);
    widths_ = take(bytes, miniblocks_, "the widths of deltas");
}

size_t DeltaReader::size() const {
    DeltaReader other = *this;
    std::string_view bytes = bytes_;
    for (uint64_t left = count_ > 0 ? count_ - 1 : 0; left > 0;) {
        other.begin_block(bytes);
        for (uint64_t i = 0; i < miniblocks_ && left > 0; ++i) {
            const auto bits = static_cast<uint64_t>(other.width(i));
            take(bytes, miniblock_values_ / 8 * bits, "deltas");
            left -= std::min(left, miniblock_values_);
        }
    }
    return header_ + (bytes_.size() - bytes.size());
}

int32_t DeltaReader::next() {
    if (left_ == 0) throw Error("a page has fewer lengths than values");
    --left_;
    if (std::exchange(is_first_, false)) return static_cast<int32_t>(value_);
    if (left_in_miniblock_ == 0) {
        if (next_miniblock_ == widths_.size()) {
            begin_block(bytes_);
            next_miniblock_ = 0;
        }
        width_ = width(next_miniblock_++);
        packed_ = BitReader(
            take(bytes_, miniblock_values_ / 8 * static_cast<uint64_t>(width_), "deltas"));
        left_in_miniblock_ = miniblock_values_;
    }
    --left_in_miniblock_;
    value_ += smallest_ + packed_.next(width_);  // modulo 2^32, as the specification wants
    return static_cast<int32_t>(value_);
}

// ---- Texts --------------------------------------------------------------------------------------

void Dictionary::assign(std::string_view bytes, size_t count) {
    if (count > bytes.size() / sizeof(uint32_t))
        throw Error("its dictionary has more texts than bytes");
    bytes_ = bytes;
    texts_.clear();
    texts_.reserve(count);
    std::string_view rest = bytes_;
    for (size_t i = 0; i < count; ++i) texts_.push_back(take(rest, take_uint32(rest), "a text"));
}

std::string_view Dictionary::at(uint32_t index) const {
    if (index >= texts_.size())
        throw Error("a page refers to text ", index, " of a dictionary of ", texts_.size());
    return texts_[index];
}

bool TextReader::reads(int encoding) {
    switch (static_cast<Encoding>(encoding)) {
        case Encoding::plain:
        case Encoding::plain_dictionary:
        case Encoding::rle_dictionary:
        case Encoding::delta_length_byte_array:
        case Encoding::delta_byte_array:
            return true;
        default:
            return false;
    }
}

void TextReader::begin(Encoding encoding, std::string_view bytes, const Dictionary* dictionary) {
    encoding_ = encoding;
    bytes_ = bytes;
    dictionary_ = dictionary;
    text_.clear();
    // A page whose rows are all null may have no bytes.
    if (bytes.empty()) encoding_ = Encoding::plain;
    if (encoding_ == Encoding::plain) return;
    if (encoding == Encoding::delta_length_byte_array || encoding == Encoding::delta_byte_array) {
        if (encoding == Encoding::delta_byte_array) {
            prefixes_ = DeltaReader(bytes_);
            bytes_.remove_prefix(prefixes_.size());
        }
        lengths_ = DeltaReader(bytes_);
        bytes_.remove_prefix(lengths_.size());
        return;
    }
    if (!dictionary) throw Error("a page refers to a dictionary, but there is none");
    const int width = static_cast<uint8_t>(bytes.front());
    indices_ = HybridReader(bytes.substr(1), width);
    encoding_ = Encoding::rle_dictionary;
}

std::string_view TextReader::next() {
    if (encoding_ == Encoding::rle_dictionary) return dictionary_->at(indices_.next());
    if (encoding_ == Encoding::plain) return take(bytes_, take_uint32(bytes_), "a text");
    const int32_t length = lengths_.next();
    if (length < 0) throw Error("a page has a text of ", length, " bytes");
    const std::string_view text = take(bytes_, static_cast<uint64_t>(length), "a text");
    if (encoding_ == Encoding::delta_length_byte_array) return text;
    const int32_t prefix = prefixes_.next();
    if (prefix < 0 || static_cast<size_t>(prefix) > text_.size())
        throw Error("a page repeats ", prefix, " bytes of a text that has ", text_.size());
    text_.resize(static_cast<size_t>(prefix));
    text_ += text;
    return text_;
}

}  // namespace train_gpt::parquet
