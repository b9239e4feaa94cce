// The messages between watchdogs. A message is one byte for its kind, then fields; the kind
// determines the length. Numbers are eight bytes, little-endian; texts are padded with zeros to the
// length of their field.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "parallel/activity.h"
#include "parallel/watchdog/text.h"

namespace train_gpt::watchdog {

/// One half of the secret. Each side shows its half at the start of a connection.
using Key = std::array<uint8_t, 16>;

/// Whether the keys are equal. The time does not depend on where they differ.
bool equal(const Key& a, const Key& b);

enum class Kind : uint8_t {
    // From a rank that connects: half of the secret, rank, size, host.
    hello = 1,
    // Rank 0's answer: the other half of the secret, host. The first heartbeat after it makes the
    // rank a member.
    welcome,
    // An ActivityReport.
    heartbeat,
    // To rank 0: the failure that a rank reports. From rank 0: the line that rank 0 has printed.
    // The exit code of all ranks comes first; 0 stands for WatchdogOptions::exit_code.
    failure,
    goodbye,
};

/// The length of a message in bytes; 0 if there is no such kind.
constexpr size_t length_of(Kind kind) {
    switch (kind) {
        case Kind::hello:
            return 1 + sizeof(Key) + 2 * 8 + sizeof(Name);
        case Kind::welcome:
            return 1 + sizeof(Key) + sizeof(Name);
        case Kind::heartbeat:
            return 1 + 3 * 8 + 2 * sizeof(Name);
        case Kind::failure:
            return 1 + 8 + sizeof(Line);
        case Kind::goodbye:
            return 1;
    }
    return 0;
}
constexpr size_t longest_message = length_of(Kind::failure);

/// A message, written field by field.
class Message {
  public:
    explicit Message(Kind kind) : bytes_{static_cast<uint8_t>(kind)}, size_(1) {}

    Message& number(int64_t value);
    Message& key(const Key& key) { return append(key.data(), key.size()); }
    template <size_t n>
    Message& text(const Text<n>& text) {
        return append(text.chars().data(), n);
    }
    std::span<const uint8_t> bytes() const { return {bytes_.data(), size_}; }

  private:
    Message& append(const void* data, size_t size);

    std::array<uint8_t, longest_message> bytes_;
    size_t size_;
};

/// Reads the fields of a complete message, in their order.
class Fields {
  public:
    explicit Fields(const uint8_t* message)
        : at_(message + 1), kind_(static_cast<Kind>(*message)) {}

    Kind kind() const { return kind_; }
    int64_t number();
    Key key();
    template <class T>
    T text() {
        const auto* chars = reinterpret_cast<const char*>(at_);
        at_ += sizeof(T);
        return T(std::string_view(chars, ::strnlen(chars, sizeof(T))));
    }

  private:
    const uint8_t* at_;
    Kind kind_;
};

/// The exit code that a message has sent. Returns 0 (a failure) if `number` cannot be an exit code.
inline int exit_code_of(int64_t number) {
    return number > 0 && number < 256 ? static_cast<int>(number) : 0;
}

/// What a heartbeat says: an Activity at one moment.
struct ActivityReport {
    int64_t pulses = 0, step = 0, collectives = 0;
    Name collective{"none"}, phase{"start"};
};

ActivityReport report_of(const Activity& activity);
Message heartbeat(const ActivityReport& report);
ActivityReport parse_report(Fields fields);

}  // namespace train_gpt::watchdog
