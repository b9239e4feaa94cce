#include "test/dataloader/parquet_writer.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#ifdef TRAIN_GPT_LZ4
#include <lz4.h>
#endif
#ifdef TRAIN_GPT_SNAPPY
#include <snappy-c.h>
#endif
#ifdef TRAIN_GPT_ZLIB
#include <zlib.h>
#endif

#include "test/dataloader/corpus.h"

namespace train_gpt {

using namespace parquet_numbers;

namespace {

bool chance(int64_t in) { return random_int(1, in) == 1; }

std::string varint(uint64_t value) {
    std::string bytes;
    for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
    return bytes + static_cast<char>(value);
}
std::string zigzag(int64_t value) {
    return varint(static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63));
}
std::string little_endian(uint32_t value) {
    std::string bytes;
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> 8 * i);
    return bytes;
}

/// CRC-32, bit by bit.
uint32_t checksum(const std::string& bytes) {
    uint32_t crc = ~0u;
    for (const char byte : bytes) {
        crc ^= static_cast<uint8_t>(byte);
        for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) * 0xEDB88320u);
    }
    return ~crc;
}

/// A struct of Thrift's compact protocol.
class Struct {
  public:
    Struct& i32(int id, int64_t value) { return put(id, 5, zigzag(value)); }
    Struct& i64(int id, int64_t value) { return put(id, 6, zigzag(value)); }
    Struct& text(int id, const std::string& value) {
        return put(id, 8, varint(value.size()) + value);
    }
    Struct& boolean(int id, bool value) { return put(id, value ? 1 : 2, ""); }
    Struct& inner(int id, const Struct& value) { return put(id, 12, value.bytes()); }
    Struct& list(int id, int type, const std::vector<std::string>& elements) {
        std::string all;
        if (elements.size() < 15)
            all += static_cast<char>(elements.size() << 4 | static_cast<size_t>(type));
        else
            all += static_cast<char>(0xF0 | type) + varint(elements.size());
        for (const std::string& element : elements) all += element;
        return put(id, 9, all);
    }
    /// Fields that no reader knows, of every type.
    Struct& unknown() {
        const int id = 100 + static_cast<int>(random_int(0, 20000));
        put(id, 3, "x");
        put(id + 1, 7, "eightbyt");
        put(id + 2, 11, varint(1) + "\x86" + varint(1) + "k" + zigzag(-5));
        put(id + 3, 11, varint(0));
        list(id + 4, 2, {"\x01", "\x02"});
        return inner(id + 5, Struct().i64(3, -7));
    }
    std::string bytes() const { return bytes_ + '\0'; }

  private:
    Struct& put(int id, int type, const std::string& value) {
        const int step = id - last_;
        // All writers begin a struct with the short form, by which files are known.
        if (step >= 1 && step <= 15 && (bytes_.empty() || !chance(8)))
            bytes_ += static_cast<char>(step << 4 | type);
        else
            bytes_ += static_cast<char>(type) + zigzag(id);
        last_ = id;
        bytes_ += value;
        return *this;
    }
    std::string bytes_;
    int last_ = 0;
};

/// Packs numbers of some bits each.
std::string packed(const std::vector<uint32_t>& values, int width) {
    std::string bytes((values.size() * static_cast<size_t>(width) + 7) / 8, '\0');
    size_t bit = 0;
    for (const uint32_t value : values)
        for (int i = 0; i < width; ++i, ++bit)
            if (value >> i & 1) bytes[bit / 8] = static_cast<char>(bytes[bit / 8] | 1 << bit % 8);
    return bytes;
}

/// RLE: runs of equal values and packed groups of eight, as they come.
std::string hybrid(const std::vector<uint32_t>& values, int width) {
    std::string bytes;
    for (size_t at = 0; at < values.size();) {
        size_t equal = 1;
        while (at + equal < values.size() && values[at + equal] == values[at]) ++equal;
        if (equal >= 8 || chance(4)) {
            const size_t length = static_cast<size_t>(random_int(1, static_cast<int64_t>(equal)));
            bytes += varint(length << 1);
            const std::string value = little_endian(values[at]);
            bytes += value.substr(0, static_cast<size_t>(width + 7) / 8);
            at += length;
            continue;
        }
        const size_t left = values.size() - at;
        const size_t groups =
            static_cast<size_t>(random_int(1, static_cast<int64_t>(left + 7) / 8));
        std::vector<uint32_t> part(
            values.begin() + static_cast<int64_t>(at),
            values.begin() + static_cast<int64_t>(at + std::min(left, 8 * groups)));
        part.resize(8 * groups);
        bytes += varint(groups << 1 | 1) + packed(part, width);
        at += std::min(left, 8 * groups);
    }
    return bytes;
}

/// DELTA_BINARY_PACKED.
std::string deltas(const std::vector<int32_t>& values) {
    const size_t miniblock = 32 * static_cast<size_t>(random_int(1, 3));
    const size_t miniblocks = 4 * static_cast<size_t>(random_int(1, 3));
    const size_t block = miniblock * miniblocks;
    std::string bytes = varint(block) + varint(miniblocks) + varint(values.size()) +
                        zigzag(values.empty() ? 0 : values[0]);
    for (size_t at = 1; at < values.size(); at += block) {
        std::vector<int32_t> steps;
        for (size_t i = at; i < std::min(values.size(), at + block); ++i)
            steps.push_back(values[i] - values[i - 1]);
        const int32_t smallest = *std::min_element(steps.begin(), steps.end());
        bytes += zigzag(smallest);
        std::string widths, bodies;
        for (size_t m = 0; m < miniblocks; ++m) {
            std::vector<uint32_t> part;
            for (size_t i = m * miniblock; i < std::min(steps.size(), (m + 1) * miniblock); ++i)
                part.push_back(static_cast<uint32_t>(steps[i] - smallest));
            if (part.empty()) {  // of no meaning
                widths += static_cast<char>(random_int(0, 255));
                continue;
            }
            const uint32_t largest = *std::max_element(part.begin(), part.end());
            const int width = std::min(
                32, static_cast<int>(std::bit_width(largest)) + static_cast<int>(random_int(0, 2)));
            while (part.size() < miniblock) part.push_back(width > 0 ? 1 : 0);  // padding
            widths += static_cast<char>(width);
            bodies += packed(part, width);
        }
        bytes += widths + bodies;
    }
    return bytes;
}

std::string plain_texts(const std::vector<std::string>& texts) {
    std::string bytes;
    for (const std::string& text : texts)
        bytes += little_endian(static_cast<uint32_t>(text.size())) + text;
    return bytes;
}

std::string delta_lengths(const std::vector<std::string>& texts) {
    std::vector<int32_t> lengths;
    std::string all;
    for (const std::string& text : texts) {
        lengths.push_back(static_cast<int32_t>(text.size()));
        all += text;
    }
    return deltas(lengths) + all;
}

std::string delta_prefixes(const std::vector<std::string>& texts) {
    std::vector<int32_t> prefixes;
    std::vector<std::string> rests;
    std::string last;
    for (const std::string& text : texts) {
        const size_t most = std::min(last.size(), text.size());
        size_t same = 0;
        while (same < most && last[same] == text[same]) ++same;
        prefixes.push_back(static_cast<int32_t>(same));
        rests.push_back(text.substr(same));
        last = text;
    }
    return deltas(prefixes) + delta_lengths(rests);
}

std::string compressed(const std::string& bytes, int codec) {
    switch (codec) {
#ifdef TRAIN_GPT_SNAPPY
        case parquet_numbers::snappy: {
            size_t size = ::snappy_max_compressed_length(bytes.size());
            std::string to(size, '\0');
            REQUIRE(::snappy_compress(bytes.data(), bytes.size(), to.data(), &size) == SNAPPY_OK);
            to.resize(size);
            return to;
        }
#endif
#ifdef TRAIN_GPT_LZ4
        case lz4_raw: {
            std::string to(static_cast<size_t>(::LZ4_compressBound(static_cast<int>(bytes.size()))),
                           '\0');
            const int size =
                ::LZ4_compress_default(bytes.data(), to.data(), static_cast<int>(bytes.size()),
                                       static_cast<int>(to.size()));
            to.resize(static_cast<size_t>(size));
            return to;
        }
#endif
#ifdef TRAIN_GPT_ZLIB
        case parquet_numbers::gzip: {
            // One member, several, or zlib's format, which some writers use.
            if (chance(3)) {
                std::string to(::compressBound(bytes.size()), '\0');
                uLongf size = to.size();
                REQUIRE(::compress(reinterpret_cast<Bytef*>(to.data()), &size,
                                   reinterpret_cast<const Bytef*>(bytes.data()),
                                   bytes.size()) == Z_OK);
                to.resize(size);
                return to;
            }
            const size_t half = chance(3) ? bytes.size() / 2 : bytes.size();
            std::string to = train_gpt::gzip(bytes.substr(0, half));
            return half < bytes.size() ? to + train_gpt::gzip(bytes.substr(half)) : to;
        }
#endif
#ifdef TRAIN_GPT_ZSTD
        case parquet_numbers::zstd: {
            const size_t half = chance(3) ? bytes.size() / 2 : bytes.size();
            std::string to = train_gpt::zstd(bytes.substr(0, half));
            return half < bytes.size() ? to + train_gpt::zstd(bytes.substr(half)) : to;
        }
#endif
        default:
            return bytes;
    }
}

/// Writes the pages of the column.
class ColumnWriter {
  public:
    ColumnWriter(const ParquetShape& shape, WrittenParquet& file) : shape_(shape), file_(file) {}

    struct Chunk {
        size_t begin, data, end;
        bool has_dictionary;
    };
    Chunk write(const Rows& rows, size_t from, size_t to) {
        Chunk chunk{file_.bytes.size(), file_.bytes.size(), 0, false};
        number_ = 0;
        words_.clear();
        const bool is_dictionary =
            shape_.encoding == plain_dictionary || shape_.encoding == rle_dictionary;
        if (is_dictionary) {
            write_dictionary(rows, from, to);
            chunk.has_dictionary = true;
            chunk.data = file_.bytes.size();
        }
        bool falls_back = false;
        for (size_t at = from; at < to;) {
            const size_t end = std::min(to, at + shape_.page_rows);
            falls_back = falls_back || (is_dictionary && at > from && chance(10));
            write_page(Rows(rows.begin() + static_cast<int64_t>(at),
                            rows.begin() + static_cast<int64_t>(end)),
                       falls_back, at);
            at = end;
        }
        chunk.end = file_.bytes.size();
        return chunk;
    }

  private:
    void write_dictionary(const Rows& rows, size_t from, size_t to) {
        std::set<std::string> all;
        for (size_t i = from; i < to; ++i)
            if (rows[i]) all.insert(*rows[i]);
        std::vector<std::string> texts(all.begin(), all.end());
        std::shuffle(texts.begin(), texts.end(), test_rng());
        for (size_t i = 0; i < texts.size(); ++i) words_[texts[i]] = static_cast<uint32_t>(i);
        Struct header;
        header.i32(1, static_cast<int64_t>(texts.size()) + shape_.more_words)
            .i32(2, shape_.encoding == plain_dictionary ? plain_dictionary : plain);
        const std::string bytes = plain_texts(texts);
        put(2, bytes.size(), compressed(bytes, shape_.codec), 7, header, from);
    }

    void write_page(const Rows& rows, bool falls_back, size_t first_row) {
        std::vector<std::string> texts;
        std::vector<uint32_t> levels;
        for (const auto& row : rows) {
            levels.push_back(row.has_value());
            if (row) texts.push_back(*row);
        }
        int encoding = falls_back ? plain : shape_.encoding;
        std::string values;
        if (encoding == plain) values = plain_texts(texts);
        if (encoding == delta_length) values = delta_lengths(texts);
        if (encoding == delta_bytes) values = delta_prefixes(texts);
        if (encoding == plain_dictionary || encoding == rle_dictionary) {
            std::vector<uint32_t> indices;
            for (const std::string& text : texts) indices.push_back(words_.at(text));
            const int width = std::min<int>(32, static_cast<int>(std::bit_width(words_.size())) +
                                                    static_cast<int>(random_int(0, 2)));
            values = static_cast<char>(width) + hybrid(indices, width);
        }
        if (texts.empty() && chance(2)) values.clear();
        if (shape_.page_encoding >= 0) encoding = shape_.page_encoding;
        const std::string level_bytes = shape_.is_optional ? hybrid(levels, 1) : "";
        const auto count = static_cast<int64_t>(rows.size());
        Struct header;
        if (shape_.page_version == 1) {
            if (shape_.is_optional)
                values =
                    little_endian(static_cast<uint32_t>(level_bytes.size())) + level_bytes + values;
            header.i32(1, count).i32(2, encoding).i32(3, shape_.level_encoding).i32(4, 3);
            if (chance(2)) header.inner(5, statistics());
            put(0, values.size(), compressed(values, shape_.codec), 5, header, first_row);
            return;
        }
        const bool is_packed = shape_.codec != uncompressed && !chance(4);
        header.i32(1, count)
            .i32(2, count - static_cast<int64_t>(texts.size()) + shape_.more_nulls)
            .i32(3, count)
            .i32(4, encoding)
            .i32(5, static_cast<int64_t>(level_bytes.size()))
            .i32(6, 0);
        if (!is_packed)
            header.boolean(7, shape_.codec == uncompressed && chance(2));
        else if (chance(2))
            header.boolean(7, true);
        if (chance(2)) header.inner(8, statistics());
        const bool leaves_out = values.empty() && chance(2);
        put(3, level_bytes.size() + values.size(),
            level_bytes + (is_packed && !leaves_out ? compressed(values, shape_.codec) : values), 8,
            header, first_row);
    }

    static Struct statistics() {
        // Longer than what a reader reads of a page at first.
        const std::string text(static_cast<size_t>(random_int(0, 3)) * 5000, 'm');
        return Struct().text(1, text).text(2, text).i64(3, 1);
    }

    void put(int kind, size_t unpacked, const std::string& body, int id, const Struct& inner,
             size_t first_row) {
        const bool is_data = kind != 2;
        Struct header;
        header.i32(1, kind)
            .i32(2, static_cast<int64_t>(unpacked) + (is_data ? shape_.more_unpacked : 0))
            .i32(3, static_cast<int64_t>(body.size()) + (is_data ? shape_.more_packed : 0));
        if (shape_.has_checksums) header.i32(4, static_cast<int32_t>(checksum(body)));
        header.inner(id, inner);
        if (chance(4)) header.unknown();
        WrittenPage page{file_.groups + 1, ++number_, file_.bytes.size(), 0, 0, first_row};
        file_.bytes += header.bytes();
        page.body = file_.bytes.size();
        file_.bytes += body;
        page.end = file_.bytes.size();
        file_.pages.push_back(page);
    }

    const ParquetShape& shape_;
    WrittenParquet& file_;
    size_t number_ = 0;
    std::map<std::string, uint32_t> words_;
};

std::string element(const std::string& name, int type, int repetition, int children = 0,
                    int converted = -1, int logical = -1) {
    Struct all;
    if (type >= 0) all.i32(1, type);
    if (repetition >= 0) all.i32(3, repetition);
    all.text(4, name);
    if (children > 0) all.i32(5, children);
    if (converted >= 0) all.i32(6, converted);
    if (logical >= 0) all.inner(10, Struct().inner(logical, Struct()));
    return all.bytes();
}

}  // namespace

std::vector<int> parquet_codecs() {
    return {
        uncompressed,
#ifdef TRAIN_GPT_SNAPPY
        parquet_numbers::snappy,
#endif
#ifdef TRAIN_GPT_ZLIB
        parquet_numbers::gzip,
#endif
#ifdef TRAIN_GPT_ZSTD
        parquet_numbers::zstd,
#endif
#ifdef TRAIN_GPT_LZ4
        lz4_raw,
#endif
    };
}

ParquetShape random_shape() {
    const auto one_of = [](const std::vector<int>& all) {
        return all[static_cast<size_t>(random_int(0, std::ssize(all) - 1))];
    };
    ParquetShape shape;
    shape.encoding = one_of({plain, plain_dictionary, rle_dictionary, delta_length, delta_bytes});
    shape.codec = one_of(parquet_codecs());
    shape.page_version = one_of({1, 2});
    shape.is_optional = !chance(4);
    shape.has_checksums = chance(2);
    shape.has_others = chance(2);
    shape.group_rows = static_cast<size_t>(random_int(1, 500));
    shape.page_rows = static_cast<size_t>(random_int(1, 200));
    shape.converted = one_of({utf8, enumeration, parquet_numbers::json, -1});
    shape.logical = shape.converted == -1                  ? one_of({1, 4, 12})
                    : shape.converted == utf8 && chance(2) ? 1
                                                           : -1;
    return shape;
}

WrittenParquet write_parquet(const Rows& rows, const ParquetShape& shape) {
    WrittenParquet file;
    file.bytes = "PAR1";
    ColumnWriter writer(shape, file);
    std::vector<std::string> groups;
    const auto other_chunk = [&](const std::vector<std::string>& path, int type, int64_t count) {
        const auto begin = static_cast<int64_t>(file.bytes.size());
        file.bytes += random_document(static_cast<size_t>(random_int(1, 50)));
        std::vector<std::string> names;
        for (const std::string& name : path) names.push_back(varint(name.size()) + name);
        Struct meta;
        meta.i32(1, type).list(2, 5, {zigzag(0)}).list(3, 8, names).i32(4, 3).i64(5, count);
        meta.i64(6, 1).i64(7, std::ssize(file.bytes) - begin).i64(9, begin);
        return Struct().i64(2, 0).inner(3, meta).bytes();
    };
    for (size_t from = 0; from < rows.size();) {
        const size_t to = std::min(rows.size(), from + shape.group_rows);
        const auto count = static_cast<int64_t>(to - from);
        std::vector<std::string> chunks;
        if (shape.has_others) chunks.push_back(other_chunk({"id"}, int64, count));
        if (shape.has_others)
            chunks.push_back(other_chunk({"tags", "list", "element"}, byte_array, 3 * count));
        const ColumnWriter::Chunk chunk = writer.write(rows, from, to);
        Struct meta;
        meta.i32(1, shape.type).list(2, 5, {zigzag(shape.encoding), zigzag(3)});
        meta.list(3, 8, {varint(shape.column.size()) + shape.column});
        meta.i32(4, shape.footer_codec >= 0 ? shape.footer_codec : shape.codec);
        meta.i64(5, count + shape.more_rows).i64(6, 12345);
        meta.i64(7, static_cast<int64_t>(chunk.end - chunk.begin) + shape.longer);
        meta.i64(9, static_cast<int64_t>(chunk.data) + shape.later);
        if (chunk.has_dictionary)
            meta.i64(11, static_cast<int64_t>(chunk.begin) + shape.later);
        else if (chance(3))
            meta.i64(11, 0);
        if (chance(3)) meta.unknown();
        chunks.push_back(Struct().i64(2, static_cast<int64_t>(chunk.begin)).inner(3, meta).bytes());
        if (shape.has_others) chunks.push_back(other_chunk({"at", "x"}, real, count));
        if (shape.has_others) chunks.push_back(other_chunk({"at", "y"}, byte_array, count));
        groups.push_back(
            Struct().list(1, 12, chunks).i64(2, 777).i64(3, count + shape.more_rows).bytes());
        ++file.groups;
        from = to;
    }
    std::vector<std::string> schema{element("schema", -1, -1, shape.has_others ? 4 : 1)};
    if (shape.has_others) {
        schema.push_back(element("id", int64, 0));
        schema.push_back(element("tags", -1, 1, 1, list));
        schema.push_back(element("list", -1, 2, 1));
        schema.push_back(element("element", byte_array, 1, 0, utf8));
    }
    schema.push_back(element(shape.column, shape.type, shape.is_optional ? shape.repetition : 0, 0,
                             shape.converted, shape.logical));
    if (shape.has_others) {
        schema.push_back(element("at", -1, 1, 2));
        schema.push_back(element("x", real, 0));
        schema.push_back(element("y", byte_array, 1, 0, utf8));
    }
    Struct footer;
    footer.i32(1, 2).list(2, 12, schema);
    footer.i64(3, static_cast<int64_t>(rows.size()) +
                      shape.more_rows * static_cast<int64_t>(file.groups) + shape.more_file_rows);
    footer.list(4, 12, groups).text(6, "a test");
    if (chance(2)) footer.unknown();
    file.footer = file.bytes.size();
    const std::string bytes = footer.bytes();
    file.bytes += bytes + little_endian(static_cast<uint32_t>(bytes.size())) + "PAR1";
    return file;
}

}  // namespace train_gpt
