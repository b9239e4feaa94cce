#include "dataloader/parquet/metadata.h"

#include <algorithm>

namespace train_gpt::parquet {

namespace {

using Type = ThriftReader::Type;

// The numbers of the enumerations in parquet.thrift.
enum PhysicalType { boolean_type, int32_type, int64_type, int96_type, float_type, double_type };
constexpr int byte_array = 6, fixed_byte_array = 7;
enum Repetition { required, optional, repeated, vector };
enum Converted { utf8, map, map_key_value, list, enumeration, decimal, date };
constexpr int timestamp_micros = 10, json = 19;
constexpr int logical_string = 1, logical_map = 2, logical_list = 3, logical_enum = 4,
              logical_json = 12;

/// A column or a group of columns, or the root of all.
struct Element {
    std::string_view name;
    int type = -1;  // -1: a group
    int repetition = required;
    int children = 0;
    int converted = -1, logical = -1;  // -1: none

    bool is_one_of(int known_converted, int known_logical) const {
        return converted == known_converted || logical == known_logical;
    }
    bool has_texts() const {
        return type == byte_array &&
               (is_one_of(utf8, logical_string) || is_one_of(enumeration, logical_enum) ||
                is_one_of(json, logical_json));
    }
    bool is_text() const { return has_texts() && repetition <= optional; }
};

Element read_element(ThriftReader& reader) {
    Element element;
    reader.structure([&](int32_t id, Type type) {
        switch (id) {
            case 1:
                element.type = reader.int32(type);
                break;
            case 3:
                element.repetition = reader.int32(type);
                break;
            case 4:
                element.name = reader.text(type);
                break;
            case 5:
                element.children = reader.int32(type);
                break;
            case 6:
                element.converted = reader.int32(type);
                break;
            case 10:
                ThriftReader::expect(type, Type::structure);
                reader.structure([&](int32_t kind, Type inner) {
                    element.logical = kind;
                    reader.skip(inner);
                });
                break;
            default:
                reader.skip(type);
        }
    });
    if (element.children < 0) throw Error("its footer has a group of columns of a wrong size");
    return element;
}

/// What a column holds that is not a column of texts.
std::string describe(const Element& element) {
    if (element.repetition >= repeated || element.is_one_of(list, logical_list)) return "lists";
    if (element.is_one_of(map, logical_map) || element.converted == map_key_value) return "maps";
    if (element.type < 0) return "structures";
    if (element.converted == decimal) return "decimal numbers";
    if (element.converted >= date && element.converted <= timestamp_micros) return "dates or times";
    switch (element.type) {
        case boolean_type:
            return "truth values";
        case int32_type:
        case int64_type:
            return "integers";
        case int96_type:
            return "dates or times";
        case float_type:
        case double_type:
            return "floating-point numbers";
        case byte_array:
        case fixed_byte_array:
            return "bytes";
        default:
            return "values of an unknown type";
    }
}

/// The column of this name at the top level, and its place among all columns without groups.
struct Found {
    Element element;
    size_t leaf = 0, leaves = 0;
};

Found find_in_schema(const std::vector<Element>& schema, const std::string& path,
                     const std::string& column) {
    if (schema.empty()) throw Error("its footer has no schema");
    Found found;
    int matches = 0;
    std::string texts;
    size_t at = 1;
    for (int child = 0; child < schema[0].children; ++child) {
        if (at == schema.size()) throw Error("its schema ends too early");
        const Element& element = schema[at];
        if (element.name == column) {
            ++matches;
            found.element = element;
            found.leaf = found.leaves;
        }
        if (element.is_text()) texts += concat(texts.empty() ? "" : ", ", element.name);
        // Passes the columns inside a group.
        for (int64_t pending = 1; pending > 0; --pending, ++at) {
            if (at == schema.size()) throw Error("its schema ends too early");
            pending += schema[at].children;
            found.leaves += schema[at].type >= 0;
        }
    }
    if (matches == 1 && found.element.is_text()) return found;
    const std::string known =
        texts.empty() ? "it has no column of strings"
                      : concat("its columns of strings are: ", texts, "; name one with --field");
    if (matches == 0) throw CannotRead(path, " has no column \"", column, "\"; ", known);
    if (matches > 1)
        throw CannotRead(path, " has ", matches, " columns \"", column,
                         "\"; give them different names");
    throw CannotRead("the column \"", column, "\" of ", path, " holds ", describe(found.element),
                     ", not strings; ", known);
}

/// What the footer says about a column's pages of one row group.
struct ColumnFacts {
    int type = -1, codec = -1;
    int64_t values = -1, size = -1, data = -1, dictionary = -1, index = -1;
    std::optional<std::string_view> name;  // none: the column is inside a group
};

ColumnFacts read_column_facts(ThriftReader& reader) {
    ColumnFacts facts;
    reader.structure([&](int32_t id, Type type) {
        switch (id) {
            case 1:
                facts.type = reader.int32(type);
                break;
            case 3: {
                const ThriftReader::List names = reader.list(type);
                for (size_t i = 0; i < names.size; ++i) facts.name = reader.text(names.type);
                if (names.size != 1) facts.name.reset();
                break;
            }
            case 4:
                facts.codec = reader.int32(type);
                break;
            case 5:
                facts.values = reader.integer(type);
                break;
            case 7:
                facts.size = reader.integer(type);
                break;
            case 9:
                facts.data = reader.integer(type);
                break;
            case 10:
                facts.index = reader.integer(type);
                break;
            case 11:
                facts.dictionary = reader.integer(type);
                break;
            default:
                reader.skip(type);
        }
    });
    return facts;
}

/// Reads the row groups. Each has one chunk for each of `leaves` columns.
class RowGroups {
  public:
    RowGroups(const Found& found, int64_t bytes, const std::string& path)
        : found_(found), bytes_(bytes), path_(path) {}

    Chunk read(ThriftReader& reader) const {
        std::optional<ColumnFacts> facts;
        Chunk chunk;
        chunk.rows = -1;
        reader.structure([&](int32_t id, Type type) {
            if (id == 3) {
                chunk.rows = reader.integer(type);
            } else if (id == 1) {
                const ThriftReader::List columns = reader.list(type);
                if (columns.size != found_.leaves)
                    throw Error("it has ", columns.size, " columns, but the schema has ",
                                found_.leaves);
                ThriftReader::expect(columns.type, Type::structure);
                for (size_t i = 0; i < columns.size; ++i)
                    if (i == found_.leaf)
                        facts = read_chunk(reader);
                    else
                        reader.skip_element(columns.type);
            } else {
                reader.skip(type);
            }
        });
        if (chunk.rows < 0) throw Error("it has no number of rows");
        if (!facts) throw Error("it does not say where its pages are");
        place(*facts, chunk);
        return chunk;
    }

  private:
    std::optional<ColumnFacts> read_chunk(ThriftReader& reader) const {
        std::optional<ColumnFacts> facts;
        reader.structure([&](int32_t id, Type type) {
            switch (id) {
                case 1:
                    if (const std::string_view other = reader.text(type); !other.empty())
                        throw CannotRead(path_, " only describes other files (one of them is ",
                                         other, "); name these instead");
                    break;
                case 3:
                    ThriftReader::expect(type, Type::structure);
                    facts = read_column_facts(reader);
                    break;
                case 8:
                case 9:
                    throw CannotRead("the column \"", found_.element.name, "\" of ", path_,
                                     " is encrypted; write the file again without encryption");
                default:
                    reader.skip(type);
            }
        });
        return facts;
    }

    void place(const ColumnFacts& facts, Chunk& chunk) const {
        if (facts.type != byte_array || facts.name != found_.element.name)
            throw Error("its columns are not those of the schema");
        if (facts.values != chunk.rows)
            throw Error("it has ", chunk.rows, " rows, but ", facts.values,
                        " values in the column");
        require_codec(facts.codec);
        chunk.codec = static_cast<Codec>(facts.codec);
        // Some writers give 0 where there is no dictionary.
        chunk.begin = facts.data;
        for (const int64_t earlier : {facts.dictionary, facts.index})
            if (earlier > 0) chunk.begin = std::min(chunk.begin, earlier);
        chunk.size = facts.size;
        if (chunk.rows == 0 && chunk.size == 0) chunk.begin = std::ssize(magic);
        if (chunk.begin < std::ssize(magic) || chunk.size < 0 || chunk.begin > bytes_ ||
            chunk.size > bytes_ - chunk.begin)
            throw Error("its pages are outside of the file");
    }

    void require_codec(int codec) const {
        try {
            parquet::require_codec(path_, codec);
        } catch (const Error& error) {
            throw CannotRead(error.what());
        }
    }

    const Found& found_;
    const int64_t bytes_;
    const std::string& path_;
};

}  // namespace

ColumnLayout find_column(std::string_view footer, int64_t bytes, const std::string& path,
                         const std::string& column) {
    ThriftReader reader(footer);
    std::vector<Element> schema;
    std::string_view groups;  // read when the schema is known
    Type groups_type = Type::stop;
    int64_t rows = -1;
    reader.structure([&](int32_t id, Type type) {
        switch (id) {
            case 2: {
                const ThriftReader::List elements = reader.list(type);
                ThriftReader::expect(elements.type, Type::structure);
                // A column has a name, and so at least three bytes.
                if (const size_t left = footer.size() - reader.position(); elements.size > left / 3)
                    throw Error("its schema has ", elements.size, " columns in ", left, " bytes");
                schema.clear();
                schema.reserve(elements.size);
                for (size_t i = 0; i < elements.size; ++i) schema.push_back(read_element(reader));
                break;
            }
            case 3:
                rows = reader.integer(type);
                break;
            case 4:
                groups = footer.substr(reader.position());
                groups_type = type;
                reader.skip(type);
                break;
            case 8:
                throw CannotRead(path, " is encrypted; write the file again without encryption");
            default:
                reader.skip(type);
        }
    });
    if (groups_type == Type::stop || rows < 0) throw Error("its footer is not complete");
    const Found found = find_in_schema(schema, path, column);
    ColumnLayout layout;
    layout.is_optional = found.element.repetition == optional;
    ThriftReader inner(groups);
    const ThriftReader::List all = inner.list(groups_type);
    if (all.size > 0) ThriftReader::expect(all.type, Type::structure);
    const RowGroups row_groups(found, bytes, path);
    for (size_t i = 0; i < all.size; ++i) {
        try {
            layout.chunks.push_back(row_groups.read(inner));
        } catch (const CannotRead&) {
            throw;
        } catch (const Error& error) {
            throw Error("row group ", i + 1, " of ", all.size, ": ", error.what());
        }
        const int64_t more = layout.chunks.back().rows;
        if (more > rows) throw Error("its row groups have more rows than the file");
        rows -= more;
    }
    if (rows != 0) throw Error("its row groups have ", rows, " rows less than the file");
    return layout;
}

namespace {

size_t size_of(int32_t value) {
    if (value < 0) throw Error("a page has a negative size");
    return static_cast<size_t>(value);
}

void read_data_header(ThriftReader& reader, PageHeader& header) {
    reader.structure([&](int32_t id, Type type) {
        switch (id) {
            case 1:
                header.values = static_cast<uint32_t>(size_of(reader.int32(type)));
                break;
            case 2:
                header.encoding = reader.int32(type);
                break;
            case 3:
                header.level_encoding = reader.int32(type);
                break;
            default:
                reader.skip(type);
        }
    });
}

void read_dictionary_header(ThriftReader& reader, PageHeader& header) {
    reader.structure([&](int32_t id, Type type) {
        if (id == 1)
            header.values = static_cast<uint32_t>(size_of(reader.int32(type)));
        else if (id == 2)
            header.encoding = reader.int32(type);
        else
            reader.skip(type);
    });
}

void read_data_v2_header(ThriftReader& reader, PageHeader& header) {
    size_t repetition_bytes = 0;
    reader.structure([&](int32_t id, Type type) {
        switch (id) {
            case 1:
                header.values = static_cast<uint32_t>(size_of(reader.int32(type)));
                break;
            case 2:
                header.nulls = static_cast<uint32_t>(size_of(reader.int32(type)));
                break;
            case 3:
                header.rows = static_cast<uint32_t>(size_of(reader.int32(type)));
                break;
            case 4:
                header.encoding = reader.int32(type);
                break;
            case 5:
                header.level_bytes = size_of(reader.int32(type));
                break;
            case 6:
                repetition_bytes = size_of(reader.int32(type));
                break;
            case 7:
                header.is_compressed = reader.boolean(type);
                break;
            default:
                reader.skip(type);
        }
    });
    if (repetition_bytes > 0) throw Error("a page has lists, though its column has none");
    if (header.rows != header.values || header.nulls > header.values)
        throw Error("a page has ", header.values, " values, ", header.nulls, " of them null, in ",
                    header.rows, " rows");
}

}  // namespace

PageHeader read_page_header(ThriftReader& reader) {
    PageHeader header;
    bool has_kind = false, has_sizes[2] = {false, false};
    int described = -1;
    reader.structure([&](int32_t id, Type type) {
        const auto enter = [&](int kind) {
            ThriftReader::expect(type, Type::structure);
            described = kind;
        };
        switch (id) {
            case 1:
                header.kind = reader.int32(type);
                has_kind = true;
                break;
            case 2:
            case 3:
                (id == 2 ? header.unpacked : header.packed) = size_of(reader.int32(type));
                has_sizes[id - 2] = true;
                break;
            case 4:
                header.crc = static_cast<uint32_t>(reader.int32(type));
                break;
            case 5:
                enter(PageHeader::data);
                read_data_header(reader, header);
                break;
            case 7:
                enter(PageHeader::dictionary);
                read_dictionary_header(reader, header);
                break;
            case 8:
                enter(PageHeader::data_v2);
                read_data_v2_header(reader, header);
                break;
            default:
                reader.skip(type);
        }
    });
    if (!has_kind || !has_sizes[0] || !has_sizes[1]) throw Error("a page has no complete header");
    if (header.kind != described &&
        (header.kind == PageHeader::data || header.kind == PageHeader::dictionary ||
         header.kind == PageHeader::data_v2))
        throw Error("a page has the header of another kind");
    if (header.level_bytes > header.packed || header.level_bytes > header.unpacked)
        throw Error("a page has levels beyond its end");
    return header;
}

}  // namespace train_gpt::parquet
