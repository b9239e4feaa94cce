#include "dataloader/parquet/thrift.h"

namespace train_gpt::parquet {

namespace {

constexpr int max_depth = 64;

}  // namespace

uint8_t ThriftReader::byte() {
    if (at_ == bytes_.size()) throw EndOfBytes();
    return static_cast<uint8_t>(bytes_[at_++]);
}

uint64_t ThriftReader::varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        const uint64_t next = byte();
        value |= (next & 0x7F) << shift;
        if (next < 0x80) return value;
    }
    throw Error("its metadata have a number of more than 64 bits");
}

int64_t ThriftReader::zigzag() {
    const uint64_t value = varint();
    return static_cast<int64_t>(value >> 1 ^ (~(value & 1) + 1));
}

std::string_view ThriftReader::take(uint64_t size) {
    if (size > bytes_.size() - at_) throw EndOfBytes();
    const std::string_view taken = bytes_.substr(at_, size);
    at_ += size;
    return taken;
}

ThriftReader::Type ThriftReader::type_of(uint8_t number) {
    if (number > static_cast<uint8_t>(Type::uuid)) throw Error("its metadata have an unknown type");
    return static_cast<Type>(number);
}

ThriftReader::Type ThriftReader::next_field(int32_t& id) {
    const uint8_t header = byte();
    const Type type = type_of(header & 0x0F);
    if (type == Type::stop) return type;
    const int64_t next = header >> 4 > 0 ? id + (header >> 4) : zigzag();
    if (next < INT16_MIN || next > INT16_MAX) throw Error("its metadata have a wrong field");
    id = static_cast<int32_t>(next);
    return type;
}

void ThriftReader::expect(Type type, Type expected) {
    if (type != expected) throw Error("its metadata have a field of another type");
}

bool ThriftReader::boolean(Type type) const {
    if (type != Type::is_true) expect(type, Type::is_false);
    return type == Type::is_true;
}

int64_t ThriftReader::integer(Type type) {
    if (type == Type::byte) return static_cast<int8_t>(byte());
    if (type != Type::int16 && type != Type::int32) expect(type, Type::int64);
    return zigzag();
}

int32_t ThriftReader::int32(Type type) {
    const int64_t value = integer(type);
    if (value < INT32_MIN || value > INT32_MAX)
        throw Error("its metadata have a number of more than 32 bits");
    return static_cast<int32_t>(value);
}

std::string_view ThriftReader::text(Type type) {
    expect(type, Type::binary);
    return take(varint());
}

ThriftReader::List ThriftReader::list(Type type) {
    if (type != Type::set) expect(type, Type::list);
    const uint8_t header = byte();
    uint64_t size = header >> 4;
    if (size == 15) size = varint();
    // Each element has at least one byte.
    if (size > bytes_.size() - at_) throw EndOfBytes();
    return {size, type_of(header & 0x0F)};
}

void ThriftReader::skip(Type type, int depth, bool is_element) {
    if (depth > max_depth) throw Error("its metadata are nested too deeply");
    switch (type) {
        case Type::stop:
            throw Error("its metadata have a list without a type");
        case Type::is_true:
        case Type::is_false:
            if (is_element) byte();  // a field has its value in its type
            return;
        case Type::byte:
            byte();
            return;
        case Type::int16:
        case Type::int32:
        case Type::int64:
            varint();
            return;
        case Type::real:
            take(8);
            return;
        case Type::uuid:
            take(16);
            return;
        case Type::binary:
            take(varint());
            return;
        case Type::list:
        case Type::set: {
            const List all = list(type);
            for (size_t i = 0; i < all.size; ++i) skip(all.type, depth + 1, true);
            return;
        }
        case Type::map: {
            const uint64_t size = varint();
            if (size == 0) return;
            const uint8_t types = byte();
            const Type key = type_of(types >> 4), value = type_of(types & 0x0F);
            for (uint64_t i = 0; i < size; ++i) {
                skip(key, depth + 1, true);
                skip(value, depth + 1, true);
            }
            return;
        }
        case Type::structure:
            structure([&](int32_t, Type inner) { skip(inner, depth + 1, false); });
            return;
    }
}

}  // namespace train_gpt::parquet
