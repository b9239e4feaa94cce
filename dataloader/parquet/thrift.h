// Thrift's compact protocol, in which Parquet's metadata are written
// (thrift/doc/specs/thrift-compact-protocol.md).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace train_gpt::parquet {

/// The bytes end within a value. More of them may complete it.
class EndOfBytes : public Error {
  public:
    EndOfBytes() : Error("its metadata end too early") {}
};

/// Reads values one after the other. All functions throw Error, with just the reason, for what is
/// not valid, and EndOfBytes at the end. No size in the bytes is believed: nothing is read beyond
/// their end, and nesting is limited.
class ThriftReader {
  public:
    enum class Type : uint8_t {
        stop,
        is_true,
        is_false,
        byte,
        int16,
        int32,
        int64,
        real,
        binary,
        list,
        set,
        map,
        structure,
        uuid
    };

    explicit ThriftReader(std::string_view bytes) : bytes_(bytes) {}

    /// Reads a struct. Calls field(id, type) for each of its fields, which must read or skip it.
    template <class Field>
    void structure(Field&& field) {
        int32_t id = 0;
        for (;;) {
            const Type type = next_field(id);
            if (type == Type::stop) return;
            field(id, type);
        }
    }

    /// The value of a field of this type.
    bool boolean(Type type) const;
    int64_t integer(Type type);
    int32_t int32(Type type);
    std::string_view text(Type type);
    /// Enters a struct that is a field or an element.
    static void expect(Type type, Type expected);

    struct List {
        size_t size;  // at most the number of bytes that are left
        Type type;    // of each element
    };
    List list(Type type);

    /// Skips the value of a field, or an element of a list.
    void skip(Type type) { skip(type, 0, false); }
    void skip_element(Type type) { skip(type, 0, true); }

    /// Bytes that were read so far.
    size_t position() const { return at_; }

  private:
    Type next_field(int32_t& id);
    uint8_t byte();
    uint64_t varint();
    int64_t zigzag();
    std::string_view take(uint64_t size);
    static Type type_of(uint8_t number);
    void skip(Type type, int depth, bool is_element);

    std::string_view bytes_;
    size_t at_ = 0;
};

}  // namespace train_gpt::parquet
