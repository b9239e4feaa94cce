#include "training/watch/event_file.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/utf8.h"

namespace train_gpt {

static_assert(std::endian::native == std::endian::little, "the formats here are little endian");

namespace {

constexpr std::array<uint32_t, 256> crc32c_table = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        table[byte] = crc;
    }
    return table;
}();

/// The checksum that a record has, which is not the CRC itself so that files of files do not
/// confuse readers.
uint32_t masked_crc32c(std::string_view bytes) {
    return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u;
}

template <class T>
std::string_view bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class T>
T number_at(std::string_view bytes) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
}

enum WireType : unsigned { varint_type = 0, fixed64_type = 1, bytes_type = 2, fixed32_type = 5 };

/// A protobuf message in the making. Fields are named by their number.
class Message {
  public:
    Message& varint(unsigned field, uint64_t value) {
        key(field, varint_type);
        put(value);
        return *this;
    }
    Message& real(unsigned field, double value) {
        key(field, fixed64_type);
        bytes_ += bytes_of(value);
        return *this;
    }
    Message& real(unsigned field, float value) {
        key(field, fixed32_type);
        bytes_ += bytes_of(value);
        return *this;
    }
    /// A text, bytes, or a message.
    Message& bytes(unsigned field, std::string_view value) {
        key(field, bytes_type);
        put(value.size());
        bytes_ += value;
        return *this;
    }
    Message& message(unsigned field, const Message& value) { return bytes(field, value.bytes_); }

    std::string take() { return std::move(bytes_); }

  private:
    void key(unsigned field, WireType type) { put(field << 3 | type); }
    void put(uint64_t value) {
        for (; value >= 128; value >>= 7) bytes_ += static_cast<char>(value | 128);
        bytes_ += static_cast<char>(value);
    }

    std::string bytes_;
};

/// The fields of a message, one after the other.
class Fields {
  public:
    explicit Fields(std::string_view message) : left_(message) {}

    unsigned field = 0;
    uint64_t number = 0;     // of a varint
    std::string_view bytes;  // of a text, bytes, or a message

    /// Goes to the next field; false at the end, and where the message is damaged.
    bool next() {
        uint64_t key = 0;
        number = 0, bytes = {};
        if (!get(key)) return false;
        field = static_cast<unsigned>(key >> 3);
        switch (key & 7) {
            case varint_type:
                return get(number);
            case fixed64_type:
                return skip(8);
            case fixed32_type:
                return skip(4);
            case bytes_type: {
                uint64_t size = 0;
                if (!get(size) || size > left_.size()) return false;
                bytes = left_.substr(0, size);
                return skip(size);
            }
            default:
                return false;
        }
    }

  private:
    bool get(uint64_t& value) {
        value = 0;
        for (unsigned shift = 0; shift < 64 && !left_.empty(); shift += 7) {
            const auto byte = static_cast<unsigned char>(left_[0]);
            left_.remove_prefix(1);
            value |= static_cast<uint64_t>(byte & 127) << shift;
            if (byte < 128) return true;
        }
        return false;
    }
    bool skip(uint64_t size) {
        if (size > left_.size()) return false;
        left_.remove_prefix(size);
        return true;
    }

    std::string_view left_;
};

std::string valid_utf8(std::string_view text) {
    std::string valid;
    for (size_t from = 0; from < text.size();) {
        const size_t bad = find_not_utf8(text, from);
        valid += text.substr(from, bad - from);
        if (bad < text.size()) valid += "\xEF\xBF\xBD";
        from = bad + 1;
    }
    return valid;
}

/// SummaryMetadata: which plugin of TensorBoard shows the value.
Message metadata_of(const char* plugin, const Message& content) {
    constexpr uint64_t tensor_class = 2;
    return Message()
        .message(1, Message().bytes(1, plugin).message(2, content))
        .varint(4, tensor_class);
}

/// google.protobuf.Value
Message hparam_of(const Json& value) {
    if (value.is_boolean()) return Message().varint(4, value.get<bool>());
    if (value.is_number()) return Message().real(2, value.get<double>());
    return Message().bytes(
        3, valid_utf8(value.is_string() ? value.get<std::string>() : to_text(value)));
}

// TensorProto.dtype
constexpr uint64_t float_tensor = 1, string_tensor = 7;

}  // namespace

uint32_t crc32c(std::string_view bytes) {
    uint32_t crc = ~0u;
    for (const char byte : bytes)
        crc = crc >> 8 ^ crc32c_table[(crc ^ static_cast<unsigned char>(byte)) & 255];
    return ~crc;
}

std::string scalar_value(const std::string& tag, float value) {
    return Message().bytes(1, valid_utf8(tag)).real(2, value).take();
}

std::string text_value(const std::string& tag, const std::string& text) {
    const Message no_dimensions;
    return Message()
        .bytes(1, valid_utf8(tag))
        .message(9, metadata_of("text", {}))
        .message(
            8,
            Message().varint(1, string_tensor).message(2, no_dimensions).bytes(8, valid_utf8(text)))
        .take();
}

std::string hparams_value(const std::map<std::string, Json>& hparams) {
    Message start_info;
    for (const auto& [name, value] : hparams)
        start_info.message(1, Message().bytes(1, valid_utf8(name)).message(2, hparam_of(value)));
    const Message no_elements = Message().message(2, {});  // one dimension, of size 0
    return Message()
        .bytes(1, hparams_tag)
        .message(9, metadata_of("hparams", Message().message(3, start_info)))
        .message(8, Message().varint(1, float_tensor).message(2, no_elements))
        .take();
}

std::string event_of(double wall_time, int64_t step, const std::vector<std::string>& values) {
    Message summary;
    for (const std::string& value : values) summary.bytes(1, value);
    return Message()
        .real(1, wall_time)
        .varint(2, static_cast<uint64_t>(step))
        .message(5, summary)
        .take();
}

std::string version_event(double wall_time) {
    return Message().real(1, wall_time).bytes(3, "brain.Event:2").take();
}

ParsedEvent parse_event(std::string_view event) {
    ParsedEvent parsed;
    for (Fields at(event); at.next();) {
        if (at.field == 2) parsed.step = static_cast<int64_t>(at.number);
        if (at.field != 5) continue;
        for (Fields summary(at.bytes); summary.next();) {
            if (summary.field != 1) continue;
            ParsedEvent::Value value{summary.bytes, {}};
            for (Fields field(summary.bytes); field.next();)
                if (field.field == 1) value.tag = field.bytes;
            parsed.values.push_back(value);
        }
    }
    return parsed;
}

std::string record_of(std::string_view event) {
    const uint64_t size = event.size();
    std::string record(bytes_of(size));
    record += bytes_of(masked_crc32c(bytes_of(size)));
    record += event;
    return record += bytes_of(masked_crc32c(event));
}

EventFileContents events_in(std::string_view file) {
    constexpr size_t header = 12, checksum = 4;
    EventFileContents contents;
    for (; !file.empty();) {
        contents.whole = false;
        if (file.size() < header ||
            number_at<uint32_t>(file.substr(8)) != masked_crc32c(file.substr(0, 8)))
            break;
        const auto size = number_at<uint64_t>(file);
        if (size > file.size() - header || file.size() - header - size < checksum) break;
        const std::string_view event = file.substr(header, size);
        if (number_at<uint32_t>(file.substr(header + size)) != masked_crc32c(event)) break;
        contents.events.push_back(event);
        contents.whole = true;
        file.remove_prefix(header + size + checksum);
    }
    return contents;
}

}  // namespace train_gpt
