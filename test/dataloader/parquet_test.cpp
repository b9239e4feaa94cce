// Parquet files: what is read from files in every shape, what is refused, and what damage does.
#include <limits>

#include <nlohmann/json.hpp>

#include "dataloader/parquet/text_column.h"
#include "test/dataloader/corpus.h"
#include "test/dataloader/parquet_writer.h"

using namespace train_gpt;
using namespace train_gpt::parquet;
using namespace parquet_numbers;
using namespace std::literals;

namespace {

Rows rows_of(const std::string& path, const std::string& column = "text") {
    TextColumn texts(path, column);
    Rows rows;
    std::string_view text;
    int64_t before = 0;
    for (TextColumn::Row row; (row = texts.next(text)) != TextColumn::Row::end;) {
        rows.push_back(row == TextColumn::Row::null ? std::nullopt
                                                    : std::optional(std::string(text)));
        CHECK(texts.file_bytes() >= before);
        before = texts.file_bytes();
    }
    CHECK(texts.file_bytes() == texts.file().size());
    return rows;
}

/// Texts of all kinds: short, long, empty, repeated, and null.
Rows random_rows(int64_t count, bool has_nulls) {
    Rows rows;
    const bool in_runs = random_int(0, 1) == 1;
    bool is_null = false;
    for (int64_t i = 0; i < count; ++i) {
        if (!in_runs || random_int(0, 20) == 0) is_null = random_int(0, 3) == 0;
        const int64_t kind = random_int(0, 9);
        if (has_nulls && is_null)
            rows.emplace_back();
        else if (kind == 0)
            rows.emplace_back("");
        else if (kind <= 3 && i > 0 && rows.back())
            rows.push_back(random_int(0, 1) ? rows.back() : *rows.back() + "more");
        else
            rows.push_back(random_document(kind == 4 ? 2000 : 20));
    }
    return rows;
}

/// The first row that differs; -1 if none does.
int64_t first_difference(const Rows& a, const Rows& b) {
    const auto [in_a, in_b] = std::ranges::mismatch(a, b);
    return in_a == a.end() && in_b == b.end() ? -1 : in_a - a.begin();
}

Strings texts_in(const Rows& rows) {
    Strings texts;
    for (const auto& row : rows)
        if (row && !row->empty()) texts.push_back(*row);
    return texts;
}

int64_t nulls_in(const Rows& rows) {
    return std::ranges::count_if(rows, [](const auto& row) { return !row.has_value(); });
}

/// A file in a folder of its own.
struct WrittenFile {
    TemporaryDirectory folder;
    const std::string path = folder / "some.parquet";
    Rows rows;
    WrittenParquet written;

    WrittenFile(Rows all, const ParquetShape& shape) : rows(std::move(all)) {
        written = write_parquet(rows, shape);
        write(path, written.bytes);
    }
    std::string error(const std::string& column = "text") const {
        return error_of([&] { rows_of(path, column); });
    }
};

std::string described(const ParquetShape& shape) {
    return concat("encoding ", shape.encoding, ", codec ", shape.codec, ", pages ",
                  shape.page_version, ", optional ", shape.is_optional, ", checksums ",
                  shape.has_checksums, ", others ", shape.has_others, ", rows ", shape.group_rows,
                  " and ", shape.page_rows);
}

}  // namespace

TEST_CASE("a Parquet file gives the rows that were written, whatever its shape") {
    for (int trial = 0; trial < 100; ++trial) {
        const ParquetShape shape = random_shape();
        const WrittenFile file(random_rows(random_int(0, 700), shape.is_optional), shape);
        CAPTURE(trial, described(shape), file.rows.size());
        CHECK(first_difference(rows_of(file.path), file.rows) == -1);
    }
}

TEST_CASE("a page of Parquet is read in all encodings and codecs, even if it is large") {
    for (const int encoding : {plain, rle_dictionary, delta_length, delta_bytes}) {
        for (const int codec : parquet_codecs()) {
            ParquetShape shape;
            shape.encoding = encoding;
            shape.codec = codec;
            shape.page_version = static_cast<int>(random_int(1, 2));
            shape.has_checksums = true;
            Rows rows;
            for (int i = 0; i < 30; ++i) rows.emplace_back(random_document(100'000));
            rows.emplace_back(std::string(3'000'000, 'x'));  // packs to very little
            const WrittenFile file(std::move(rows), shape);
            CAPTURE(described(shape));
            CHECK(first_difference(rows_of(file.path), file.rows) == -1);
        }
    }
}

TEST_CASE("files that pyarrow wrote are read as it read them") {
    const fs::path folder = "test/fixtures/parquet";
    const nlohmann::json expected = nlohmann::json::parse(read(folder / "rows.json"));
    REQUIRE(expected.size() > 5);
    const std::vector<int> codecs = parquet_codecs();
    for (const auto& [name, file] : expected.items()) {
        CAPTURE(name);
        if (std::ranges::find(codecs, file.at("codec").get<int>()) == codecs.end()) {
            WARN("skipped: " << name << ", whose codec this build lacks");
            continue;
        }
        Rows rows;
        for (const nlohmann::json& text : file.at("rows"))
            rows.push_back(text.is_null() ? std::nullopt : std::optional(text.get<std::string>()));
        CHECK(first_difference(rows_of(folder / name), rows) == -1);
    }
}

// ---- Encodings ----------------------------------------------------------------------------------

TEST_CASE("the specification's examples of encodings are decoded") {
    // The numbers 1 through 7 in 3 bits, after 0: Encodings.md, "RLE".
    HybridReader packed("\x03\x88\xC6\xFA"sv, 3);
    for (uint32_t i = 0; i < 8; ++i) CHECK(packed.next() == i);
    CHECK(contains(error_of([&] { packed.next(); }), "fewer levels or indices"));
    HybridReader run("\x0A\x05\x01"sv, 9);  // five times 0x105
    for (int i = 0; i < 5; ++i) CHECK(run.next() == 0x105);
    CHECK(HybridReader("", 0).next() == 0);
    // 1 2 3 4 5 in a block of 128 in 4 parts: "Delta Encoding", example 1.
    DeltaReader deltas("\x80\x01\x04\x05\x02\x02\x00\x00\x00\x00"sv);
    CHECK(deltas.count() == 5);
    CHECK(deltas.size() == 10);
    for (int32_t i = 1; i <= 5; ++i) CHECK(deltas.next() == i);
    CHECK(contains(error_of([&] { deltas.next(); }), "fewer lengths"));
    // "Delta Strings": the prefixes 0 2 0 3, and what follows them, of the lengths 4 2 6 5.
    const std::string texts = "\x80\x01\x04\x04\x00\x03\x03\x00\x00\x00\x44\x01"s +
                              std::string(10, '\0') +
                              "\x80\x01\x04\x04\x08\x03\x03\x00\x00\x00\x70"s +
                              std::string(11, '\0') + "axislebabbleyhood";
    TextReader reader;
    reader.begin(Encoding::delta_byte_array, texts, nullptr);
    for (const char* text : {"axis", "axle", "babble", "babyhood"}) CHECK(reader.next() == text);
}

TEST_CASE("differences wrap around at 32 bits") {
    // The smallest number, then the largest: the difference is -1 modulo 2^32.
    DeltaReader reader("\x80\x01\x01\x02\xFF\xFF\xFF\xFF\x0F\x01\x00"sv);
    CHECK(reader.next() == std::numeric_limits<int32_t>::min());
    CHECK(reader.next() == std::numeric_limits<int32_t>::max());
}

TEST_CASE("encoded numbers and texts beyond their bytes are errors") {
    const auto text_error = [](Encoding encoding, const std::string& bytes, int texts = 1) {
        return error_of([&] {
            TextReader reader;
            Dictionary dictionary;
            dictionary.assign("\x01\0\0\0x"s, 1);
            reader.begin(encoding, bytes, &dictionary);
            for (int i = 0; i < texts; ++i) reader.next();
        });
    };
    const std::string one = "\x80\x01\x04\x01"s;  // one number follows
    CHECK(text_error(Encoding::plain, "\x02\0\0\0ab"s).empty());
    CHECK(contains(text_error(Encoding::plain, "\x03\0\0\0ab"s), "a text beyond its end"));
    CHECK(contains(text_error(Encoding::plain,
                              "\xFF\xFF\xFF\xFF"
                              "ab"s),
                   "beyond its end"));
    CHECK(contains(text_error(Encoding::plain, "\x02\0\0"s), "a length beyond its end"));
    CHECK(text_error(Encoding::rle_dictionary, "\x01\x02\x00"s).empty());
    CHECK(contains(text_error(Encoding::rle_dictionary, "\x01\x02\x01"s), "refers to text 1"));
    CHECK(contains(text_error(Encoding::rle_dictionary, "\x21\x02\x01"s), "numbers of 33 bits"));
    CHECK(contains(text_error(Encoding::rle_dictionary, "\x01\x03"s), "packed numbers beyond"));
    CHECK(contains(text_error(Encoding::rle_dictionary, "\x01\x02"s), "a run beyond its end"));
    CHECK(contains(text_error(Encoding::rle_dictionary, "\x01\x82"s), "does not end"));
    CHECK(contains(text_error(Encoding::rle_dictionary, ""s), "beyond its end"));
    CHECK(text_error(Encoding::delta_length_byte_array, one + "\x04"
                                                              "ab")
              .empty());
    CHECK(contains(text_error(Encoding::delta_length_byte_array, one + "\x06"
                                                                       "ab"),
                   "beyond"));
    CHECK(contains(text_error(Encoding::delta_length_byte_array, one + "\x03"
                                                                       "ab"),
                   "-2 bytes"));
    CHECK(contains(text_error(Encoding::delta_length_byte_array,
                              one + "\x02"
                                    "ab",
                              2),
                   "fewer"));
    CHECK(contains(text_error(Encoding::delta_length_byte_array,
                              "\x21\x01\x01\x02"
                              "ab"s),
                   "wrong size"));
    CHECK(contains(text_error(Encoding::delta_length_byte_array,
                              "\x80\x01\x00\x01\x02"
                              "ab"s),
                   "wrong size"));
    CHECK(contains(text_error(Encoding::delta_length_byte_array,
                              "\x80\x01\x01\x02\x02\x02\x08"
                              "ab"s,
                              2),
                   "deltas beyond"));
    const std::string suffix = one +
                               "\x04"
                               "ab";  // of two bytes
    CHECK(text_error(Encoding::delta_byte_array, one + "\x00"s + suffix).empty());
    CHECK(contains(text_error(Encoding::delta_byte_array, one + "\x02" + suffix),
                   "repeats 1 bytes of a text that has 0"));
    CHECK(contains(text_error(Encoding::delta_byte_array, one + "\x01" + suffix), "repeats -1"));
    Dictionary dictionary;
    CHECK(contains(error_of([&] { dictionary.assign("\0\0\0\0"s, 2); }), "more texts than bytes"));
}

TEST_CASE("a page that claims to be huge takes no memory for that") {
    Unpacker unpacker;
    constexpr size_t huge = std::numeric_limits<int32_t>::max();
    for (const int codec : parquet_codecs()) {
        ParquetShape shape;
        shape.codec = codec;
        shape.more_unpacked = huge - 10'000;
        const WrittenFile file({"some text"}, shape);
        CAPTURE(codec);
        CHECK(contains(file.error(), "row group 1 of 1, page 1 ("));
        const WrittenPage& page = file.written.pages[0];
        const std::string packed = file.written.bytes.substr(page.body, page.end - page.body);
        std::string to;
        const std::string error =
            error_of([&] { unpacker.unpack(static_cast<Codec>(codec), packed, huge, to); });
        CHECK_FALSE(error.empty());
        CHECK(to.capacity() <= 1 << 20);
    }
}

// ---- Damage -------------------------------------------------------------------------------------

TEST_CASE("a damaged page of Parquet is named, and what comes before it can be kept") {
    for (int trial = 0; trial < 40; ++trial) {
        ParquetShape shape = random_shape();
        shape.has_checksums = true;
        shape.page_rows = static_cast<size_t>(random_int(1, 20));
        const WrittenFile file(random_rows(random_int(30, 300), shape.is_optional), shape);
        std::vector<WrittenPage> pages = file.written.pages;
        std::erase_if(pages, [](const WrittenPage& page) { return page.body == page.end; });
        if (pages.empty()) continue;
        const WrittenPage page = pages[static_cast<size_t>(random_int(0, std::ssize(pages) - 1))];
        std::string bytes = file.written.bytes;
        const auto at = static_cast<size_t>(
            random_int(static_cast<int64_t>(page.body), static_cast<int64_t>(page.end) - 1));
        bytes[at] ^= static_cast<char>(1 << random_int(0, 7));
        write(file.path, bytes);
        const std::string damage =
            concat(file.path, " is damaged in row group ", page.group, " of ", file.written.groups,
                   ", page ", page.number, " (its checksum is wrong)");
        CAPTURE(described(shape), at);
        CHECK(file.error() == damage +
                                  "; download it again, or use --skip-bad to leave out the "
                                  "rest");
        auto options = options_for({file.path}, file.folder / "out");
        options.val_fraction = 0;
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), damage));
        options.skip_bad = true;
        const Rows kept(file.rows.begin(),
                        file.rows.begin() + static_cast<int64_t>(page.first_row));
        if (texts_in(kept).empty()) continue;
        CHECK(contains(said_by(options), damage + "; what follows is left out"));
        CHECK(documents_in(options.out, "train") == texts_in(kept));
        const DataManifest manifest = read_data_manifest(options.out);
        REQUIRE(manifest.left_out.size() == 1);
        CHECK(manifest.left_out[0].reason == reason_damaged);
        CHECK(manifest.sources[0].nulls == nulls_in(kept));
    }
}

TEST_CASE("a file of Parquet that contradicts itself is damaged") {
    const auto check = [](const char* words, bool in_page, auto&& change) {
        ParquetShape shape = random_shape();
        shape.codec = uncompressed;
        shape.has_checksums = false;
        shape.is_optional = true;
        change(shape);
        Rows rows = random_rows(200, true);
        rows[0] = "the first";
        rows[1] = rows[2] = std::nullopt;
        const WrittenFile file(std::move(rows), shape);
        const std::string error = file.error();
        CAPTURE(words, described(shape), error);
        CHECK(error.starts_with(file.path + " is damaged"));
        CHECK(contains(error, words));
        CHECK(contains(error, "in row group ") == in_page);
        CHECK(contains(error, "use --skip-bad"));
    };
    using Shape = ParquetShape;
    check("before those of the row group", true, [](Shape& shape) { shape.more_rows = 1; });
    check("more rows than the row group", true, [](Shape& shape) { shape.more_rows = -1; });
    check("more rows than the row group", true, [](Shape& shape) {
        shape.more_rows = -1;  // of pages of one row, so that the last page is one too many
        shape.page_rows = 1;
        if (random_int(0, 1)) shape.group_rows = 1;  // so that the row groups have no rows
    });
    check("row groups have 1 rows less", false, [](Shape& shape) { shape.more_file_rows = 1; });
    check("more rows than the file", false, [](Shape& shape) { shape.more_file_rows = -1; });
    check("a page unpacks to", true, [](Shape& shape) { shape.more_unpacked = 4; });
    check("are left of the row group", true, [](Shape& shape) { shape.more_packed = 1 << 30; });
    check("outside of the file", false, [](Shape& shape) { shape.later = int64_t{1} << 40; });
    check("outside of the file", false, [](Shape& shape) { shape.later = int64_t{-1} << 40; });
    check("outside of the file", false, [](Shape& shape) { shape.longer = 1 << 30; });
    check("", true, [](Shape& shape) {
        shape.has_others = true;  // so that the file goes on behind the column
        shape.later = 1;
    });
    check("number of nulls", true, [](Shape& shape) {
        shape.page_version = 2;
        shape.page_rows = shape.group_rows = 1000;
        shape.more_nulls = -1;
    });
    for (const int64_t words : {int64_t{1} << 30, int64_t{1}, int64_t{-1}})
        check(words > 1   ? "more texts than bytes"
              : words > 0 ? "beyond its end"
                          : "of a dictionary of",
              true, [&](Shape& shape) {
                  shape.encoding = rle_dictionary;
                  shape.page_rows = shape.group_rows = 1000;
                  shape.more_words = words;
              });
    check("there is none", true, [](Shape& shape) {
        shape.encoding = plain;
        shape.page_encoding = rle_dictionary;
    });
}

TEST_CASE("damage in the footer of Parquet names the row group") {
    ParquetShape shape;
    shape.group_rows = 1;
    shape.later = 1;  // only the last row group ends where the footer begins
    const WrittenFile file({"a", "b", "c"}, shape);
    CHECK(contains(file.error(), file.path +
                                     " is damaged (row group 3 of 3: its pages are outside of "
                                     "the file); download it again"));
}

TEST_CASE("a footer of Parquet takes no more memory than its bytes are worth") {
    // Field 2, the schema: a list of 1,000 structs, each of which is a byte long and has no field.
    const std::string empty = "\x29\xFC\xE8\x07"s + std::string(1002, '\0');
    CHECK(error_of([&] { find_column(empty, 1000, "x", "text"); }) ==
          "its schema has 1000 columns in 1002 bytes");

    const TemporaryDirectory folder;
    const std::string path = folder / "large.parquet";
    write(path, "PAR1");
    fs::resize_file(path, 80 << 20);
    write(path, read(path) + "\x01\x00\x00\x04PAR1"s);
    CHECK(contains(error_of([&] { rows_of(path); }),
                   path + " is damaged: its footer says that it has 67108865 bytes, more than 64 "
                          "MiB; download it again"));
}

TEST_CASE("numbers of fields beyond 16 bits are errors") {
    // Each field is a truth value, whose number is the one before and 15.
    const auto error_after = [](size_t fields) {
        const std::string bytes(fields, '\xF1');
        return error_of([&] { ThriftReader(bytes).structure([](int32_t, ThriftReader::Type) {}); });
    };
    CHECK(error_after(2184) == "its metadata end too early");
    CHECK(error_after(2185) == "its metadata have a wrong field");
}

TEST_CASE("a file of Parquet that is cut off is named, wherever it ends") {
    ParquetShape shape = random_shape();
    const WrittenFile file(random_rows(100, shape.is_optional), shape);
    for (int trial = 0; trial < 30; ++trial) {
        const auto size = static_cast<size_t>(random_int(0, std::ssize(file.written.bytes) - 1));
        write(file.path, file.written.bytes.substr(0, size));
        const std::string error = file.error();
        CAPTURE(size, error);
        CHECK(error.starts_with(file.path + " is t"));  // truncated, or too short
        CHECK(contains(error, "download it again"));
        const auto refused = error_of([&] { find_sources({file.path}, ""); });
        CHECK(refused == error);
        CHECK(find_sources({file.path}, "", true).sources.size() == 1);
    }
    // The footer's size.
    std::string bytes = file.written.bytes;
    for (const char* size : {"\xFF\xFF\xFF\xFF", "\xFF\xFF\xFF\x7F", "\x00\x00\x00\x01"}) {
        bytes.replace(bytes.size() - 8, 4, size, 4);
        write(file.path, bytes);
        CHECK(contains(file.error(), "is damaged: its footer says that it has "));
    }
    bytes.replace(bytes.size() - 8, 4, "\x02\x00\x00\x00", 4);
    write(file.path, bytes);
    CHECK(contains(file.error(), file.path + " is damaged ("));
}

TEST_CASE("bytes of a Parquet file that change without a checksum do no harm") {
    for (int trial = 0; trial < 200; ++trial) {
        ParquetShape shape = random_shape();
        shape.has_checksums = false;
        const WrittenFile file(random_rows(random_int(1, 60), shape.is_optional), shape);
        std::string bytes = file.written.bytes;
        const bool in_footer = random_int(0, 2) == 0;
        for (int64_t edits = random_int(1, 3); edits > 0; --edits)
            bytes[static_cast<size_t>(
                random_int(in_footer ? static_cast<int64_t>(file.written.footer) : 0,
                           std::ssize(bytes) - 1))] = static_cast<char>(random_int(0, 255));
        write(file.path, bytes);
        const std::string error = file.error();  // nothing else than an Error
        CAPTURE(error);
        CHECK((error.empty() || contains(error, file.path)));
    }
}

// ---- What is refused ----------------------------------------------------------------------------

TEST_CASE("a column that has no strings is refused with the columns that do") {
    ParquetShape shape;
    shape.has_others = true;
    {
        const WrittenFile file({"x"}, shape);
        const std::string known = "its columns of strings are: text; name one with --field";
        for (const auto& [column, words] : {std::pair{"body", "has no column \"body\"; "},
                                            {"id", "holds integers, not strings; "},
                                            {"tags", "holds lists, not strings; "},
                                            {"at", "holds structures, not strings; "},
                                            {"y", "has no column"},
                                            {"at.y", "has no column"}}) {
            const std::string error = file.error(column);
            CAPTURE(column, error);
            CHECK(contains(error, file.path));
            CHECK(contains(error, words));
            CHECK(contains(error, known));
        }
    }
    const auto refusal = [&](auto&& change) {
        ParquetShape other = shape;
        change(other);
        return WrittenFile({"x"}, other).error();
    };
    using Shape = ParquetShape;
    const std::string none = "not strings; it has no column of strings";
    CHECK(contains(refusal([](Shape& other) { other.converted = -1; }), "holds bytes, " + none));
    CHECK(contains(refusal([](Shape& other) { other.converted = decimal; }),
                   "holds decimal numbers, " + none));
    CHECK(contains(refusal([](Shape& other) { other.repetition = 2; }), "holds lists, " + none));
    CHECK(contains(refusal([](Shape& other) { other.type = fixed; }), "holds bytes, " + none));
    CHECK(contains(refusal([](Shape& other) { other.column = "id"; }), "has no column \"text\""));
    CHECK(contains(error_of([&] {
                       Shape other = shape;
                       other.column = "id";
                       const WrittenFile file({"x"}, other);
                       rows_of(file.path, "id");
                   }),
                   "has 2 columns \"id\"; give them different names"));
}

TEST_CASE("what Parquet has and train_gpt does not read is refused by name") {
    const auto refusal = [&](auto&& change) {
        ParquetShape shape;
        change(shape);
        const WrittenFile file({"x", {}}, shape);
        const std::string error = file.error();
        CHECK(contains(error, file.path));
        CHECK_FALSE(contains(error, "damaged"));
        return error;
    };
    using Shape = ParquetShape;
    for (const auto& [codec, words] : {std::pair{3, "with LZO, which"},
                                       {4, "with brotli, which"},
                                       {5, "with LZ4 in Hadoop's frames, which"},
                                       {42, "with the codec 42 of Parquet"}}) {
        const std::string error = refusal([&](Shape& shape) { shape.footer_codec = codec; });
        CAPTURE(error);
        CHECK(contains(error, words));
        CHECK(contains(error, "write it again with snappy"));
    }
    CHECK(contains(refusal([](Shape& shape) { shape.page_encoding = 9; }),
                   ", row group 1, page 1: its texts have the encoding 9"));
    CHECK(contains(refusal([](Shape& shape) { shape.level_encoding = 4; }),
                   ", row group 1, page 1: its levels have the encoding 4"));
    const std::string all = write_parquet({"x"}, {}).bytes;
    const TemporaryDirectory folder;
    const std::string path = folder / "secret.parquet";
    write(path, all.substr(0, all.size() - 4) + "PARE");
    CHECK(contains(error_of([&] { rows_of(path); }), path + " is encrypted"));
    write(path, "some text that has another name");
    CHECK(contains(error_of([&] { rows_of(path); }), "is not a Parquet file"));
    write(path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n");
    CHECK(contains(error_of([&] { rows_of(path); }), "is a Git LFS pointer"));
}

TEST_CASE("Parquet under another name, packed and piped is refused with what to do") {
    const TemporaryDirectory folder;
    const std::string bytes = write_parquet({"x", "y"}, {}).bytes;
    const auto refusal = [&](const std::string& name, const std::string& content) {
        write(folder / name, content);
        return error_of([&] { find_sources({folder / name}, ""); });
    };
    CHECK(contains(refusal("part-0", bytes), "give it a name that ends in .parquet"));
    CHECK(contains(refusal("part.txt", bytes), "give it a name that ends in .parquet"));
    CHECK(refusal("part.txt", "PAR1 is a text, too, and so is this").empty());
    for (const auto& [extension, pack] : packers())
        CHECK(contains(refusal("a.parquet" + extension, pack(bytes)),
                       "is a Parquet file that is compressed as a whole; unpack it"));
    write(folder / "input", bytes);
    with_input(folder / "input", [&] {
        auto options = options_for({"-"}, folder / "out");
        CHECK(contains(error_of([&] { prepare(options, nullptr); }),
                       "cannot be read from a pipe; name the file itself"));
    });
    CHECK(refusal("A.PARQUET", bytes).empty());
    const Sources found = find_sources({folder.path()}, "", true);
    REQUIRE(found.sources.size() == 2);  // the other one is a text
    CHECK(found.sources[0].column == "text");
    CHECK_FALSE(found.sources[0].is_plain_file());
    CHECK(find_sources({folder / "A.PARQUET"}, "text").sources[0].is_parquet());
    CHECK(contains(error_of([&] { find_sources({folder / "A.PARQUET"}, "body"); }),
                   "has no column \"body\""));
}

// ---- Tokens -------------------------------------------------------------------------------------

TEST_CASE("rows of Parquet give the shards of the same texts in JSON Lines, also in steps") {
    const TemporaryDirectory folder;
    for (int trial = 0; trial < 2; ++trial) {
        Strings rows_inputs, lines_inputs;
        int64_t nulls = 0;
        for (int i = 0; i < 3; ++i) {
            ParquetShape shape = random_shape();
            shape.group_rows *= 5;
            Rows rows = random_rows(random_int(500, 3000), shape.is_optional);
            // So that a file has several batches.
            for (int n = 0; n < 20; ++n)
                rows.insert(rows.begin() + random_int(0, std::ssize(rows)),
                            random_document(100'000));
            if (i == 1) rows.emplace_back(random_document(2'500'000));
            nulls += nulls_in(rows);
            const std::string name = folder / ("part" + std::to_string(i));
            write(name + ".parquet", write_parquet(rows, shape).bytes);
            write(name + ".jsonl", as_jsonl(texts_in(rows)));
            rows_inputs.push_back(name + ".parquet");
            lines_inputs.push_back(name + ".jsonl");
        }
        auto options = options_for(lines_inputs, folder / "lines");
        options.val_split = "";
        options.threads = static_cast<int>(random_int(1, 3));
        prepare(options, nullptr);
        const auto expected = shards_in(folder / "lines");
        options.texts = rows_inputs;
        options.out = folder / "rows";
        CHECK(contains(said_by(options), concat("left out: ", nulls, " rows of Parquet")) ==
              (nulls > 1));
        CHECK(difference(shards_in(options.out), expected) == "");
        const auto with_manifest = files_in(options.out);
        // Stopped again and again, it ends with the same files.
        options.out = folder / "steps";
        options.save_seconds = 0;
        int stops = 0;
        // (Some calls come while it waits; patience grows, so that it ends on a slow machine, too.)
        for (int64_t patience = 1;; patience = random_int(1, 4) + stops / 50, ++stops) {
            REQUIRE(stops < 1000);
            if (prepare(options, nullptr, [&] { return --patience < 0; })) break;
        }
        CHECK(stops > 0);
        CHECK(difference(files_in(options.out), with_manifest) == "");
        for (const char* name : {"lines", "rows", "steps"}) fs::remove_all(folder / name);
    }
}

TEST_CASE("a row that is not UTF-8 is an error that names it, or is left out") {
    ParquetShape shape = random_shape();
    shape.is_optional = true;
    const WrittenFile file({"one", {}, "", "caf\xE9", "five", "\xFF"}, shape);
    auto options = options_for({file.path}, file.folder / "out");
    options.val_fraction = 0;
    const std::string error = error_of([&] { prepare(options, nullptr); });
    CHECK(contains(error, "row 4 of " + file.path +
                              " is not UTF-8 (the byte 0xE9, at its byte 4); fix it, or use "
                              "--skip-bad to leave such rows out"));
    options.skip_bad = true;
    const std::string said = said_by(options);
    CAPTURE(said);
    CHECK(contains(said, "left out: 2 rows, each of which is not UTF-8, first row 4 of "));
    CHECK(contains(said, "left out: 1 row of Parquet without a text (null)"));
    CHECK((documents_in(options.out, "train") == Strings{"one", "five"}));
    const DataManifest manifest = read_data_manifest(options.out);
    REQUIRE(manifest.left_out.size() == 1);
    CHECK(manifest.left_out[0].record == Record::row);
    CHECK(manifest.left_out[0].line == 4);
    CHECK(manifest.sources[0].nulls == 1);
}

TEST_CASE("a Parquet file that changes while a command is interrupted is noticed") {
    ParquetShape shape;
    Rows rows;
    for (int i = 0; i < 300; ++i) rows.emplace_back(random_document(20'000));
    const WrittenFile file(rows, shape);
    auto options = options_for({file.path}, file.folder / "out");
    options.save_seconds = 0;
    const std::string progress = options.out + "/.tokenize.tmp/progress.json";
    REQUIRE_FALSE(prepare(options, nullptr, [&] {
        return fs::exists(progress) && read_progress(progress, 1).position.offset > 0;
    }));
    const auto time = fs::last_write_time(file.path);
    std::string bytes = file.written.bytes;
    bytes[file.written.pages[0].body + 100] ^= 1;
    write(file.path, bytes);
    fs::last_write_time(file.path, time);
    CHECK(contains(error_of([&] { prepare(options, nullptr); }), "is not what it was"));
}
