#include "test/training/event_reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "test/text.h"

namespace train_gpt::event_reader {

namespace {

uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

uint64_t little_endian(const std::string& bytes) {
    uint64_t value = 0;
    for (size_t i = bytes.size(); i > 0; --i)
        value = value << 8 | static_cast<unsigned char>(bytes[i - 1]);
    return value;
}

/// A field of a protobuf message: a number of some kind as its bits, or bytes.
struct Field {
    int number = 0, type = 0;
    uint64_t bits = 0;
    std::string bytes;

    double real() const {
        double value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    float single() const {
        const auto half = static_cast<uint32_t>(bits);
        float value;
        std::memcpy(&value, &half, sizeof value);
        return value;
    }
};

std::vector<Field> fields_of(const std::string& message) {
    size_t at = 0;
    const auto take = [&](uint64_t n) {
        if (n > message.size() - at) throw std::runtime_error("a field ends after its message");
        at += n;
        return message.substr(at - n, n);
    };
    const auto varint = [&] {
        uint64_t value = 0;
        for (int shift = 0;; shift += 7) {
            const auto byte = static_cast<unsigned char>(take(1)[0]);
            value |= uint64_t{byte & 0x7Fu} << shift;
            if (!(byte & 0x80)) return value;
        }
    };
    std::vector<Field> fields;
    while (at < message.size()) {
        const uint64_t key = varint();
        Field field{static_cast<int>(key >> 3), static_cast<int>(key & 7), 0, {}};
        switch (field.type) {
            case 0:
                field.bits = varint();
                break;
            case 1:
                field.bits = little_endian(take(8));
                break;
            case 2:
                field.bytes = take(varint());
                break;
            case 5:
                field.bits = little_endian(take(4));
                break;
            default:
                throw std::runtime_error("a field of an unknown type");
        }
        fields.push_back(field);
    }
    return fields;
}

/// The only field of this number; an empty one if there is none.
Field field_of(const std::string& message, int number) {
    Field found;
    for (const Field& field : fields_of(message))
        if (field.number == number) {
            if (found.number) throw std::runtime_error("a field occurs twice");
            found = field;
        }
    return found;
}

nlohmann::json hparam_of(const std::string& message) {
    const std::vector<Field> fields = fields_of(message);
    if (fields.size() != 1) throw std::runtime_error("a hyperparameter without one value");
    if (fields[0].number == 2 && fields[0].type == 1) return fields[0].real();
    if (fields[0].number == 3 && fields[0].type == 2) return fields[0].bytes;
    if (fields[0].number == 4 && fields[0].type == 0) return fields[0].bits != 0;
    throw std::runtime_error("a hyperparameter of an unknown type");
}

Value value_of(const std::string& message) {
    Value value;
    value.tag = field_of(message, 1).bytes;
    if (const Field scalar = field_of(message, 2); scalar.number) value.scalar = scalar.single();
    const std::string plugin = field_of(field_of(message, 9).bytes, 1).bytes,
                      content = field_of(plugin, 2).bytes, tensor = field_of(message, 8).bytes;
    value.plugin = field_of(plugin, 1).bytes;
    constexpr uint64_t strings = 7;
    if (value.plugin == "text") {
        if (field_of(tensor, 1).bits != strings) throw std::runtime_error("a text without strings");
        value.text = field_of(tensor, 8).bytes;
    }
    if (value.plugin == "hparams")
        for (const Field& entry : fields_of(field_of(content, 3).bytes))
            value.hparams[field_of(entry.bytes, 1).bytes] =
                hparam_of(field_of(entry.bytes, 2).bytes);
    return value;
}

}  // namespace

uint32_t crc32c(const std::string& bytes) {
    uint32_t remainder = 0xFFFFFFFF;
    for (const char c : bytes)
        for (int bit = 0; bit < 8; ++bit) {
            const bool message = static_cast<unsigned char>(c) >> bit & 1, top = remainder >> 31;
            remainder <<= 1;
            if (message != top) remainder ^= 0x1EDC6F41;
        }
    uint32_t reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (remainder >> bit & 1) << (31 - bit);
    return ~reversed;
}

Event event_of(const std::string& message) {
    Event event;
    event.wall_time = field_of(message, 1).real();
    event.step = static_cast<int64_t>(field_of(message, 2).bits);
    event.version = field_of(message, 3).bytes;
    for (const Field& value : fields_of(field_of(message, 5).bytes))
        if (value.number == 1) event.values.push_back(value_of(value.bytes));
    return event;
}

std::vector<Event> read_events(const std::filesystem::path& path) {
    const std::string file = read(path);
    std::vector<Event> events;
    for (size_t at = 0; at < file.size();) {
        const auto part = [&](size_t n) {
            if (n > file.size() - at) throw std::runtime_error("an incomplete record");
            at += n;
            return file.substr(at - n, n);
        };
        const auto check = [&](const std::string& bytes) {
            if (little_endian(part(4)) != masked(crc32c(bytes)))
                throw std::runtime_error("a wrong checksum");
        };
        const std::string length = part(8);
        check(length);
        const std::string event = part(little_endian(length));
        check(event);
        events.push_back(event_of(event));
    }
    return events;
}

std::vector<std::filesystem::path> event_files(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        if (contains(entry.path().filename().string(), "tfevents")) files.push_back(entry.path());
    return files;
}

Board board_of(const std::filesystem::path& folder) {
    const std::vector<std::filesystem::path> files = event_files(folder);
    if (files.size() != 1) throw std::runtime_error("there is not exactly one event file");
    const std::vector<Event> events = read_events(files[0]);
    if (events.empty() || events[0].version != "brain.Event:2")
        throw std::runtime_error("the first event is not the version");
    Board board;
    std::map<std::string, int64_t> last;
    for (const Event& event : events)
        for (const Value& value : event.values) {
            if (const auto [at, is_new] = last.emplace(value.tag, event.step);
                !is_new && at->second >= event.step)
                throw std::runtime_error("steps of " + value.tag + " do not increase");
            last[value.tag] = event.step;
            if (value.scalar) board.scalars[value.tag][event.step] = *value.scalar;
            if (value.plugin == "text") board.texts[value.tag][event.step] = value.text;
            if (value.plugin == "hparams") board.hparams = value.hparams;
        }
    return board;
}

std::string without_indent(const std::string& text) {
    std::string plain;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        if (!line.starts_with("    ")) throw std::runtime_error("a line without indent: " + line);
        plain += line.substr(4) + (end < text.size() ? "\n" : "");
        begin = end + 1;
    }
    return plain;
}

}  // namespace train_gpt::event_reader
