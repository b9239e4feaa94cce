// TensorBoard's event files: TFRecord records with checksums. Each record holds a protobuf message
// tensorboard.Event (tensorboard/compat/proto/event.proto). The messages have a dozen fields of
// four types, which a few lines encode. A library for protobuf would add a compiler for its
// definitions, a step of the build, and a dependency for every user.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_text.h"

namespace train_gpt {

/// CRC-32C (Castagnoli) as in RFC 3720, appendix B.4.
uint32_t crc32c(std::string_view bytes);

// ---- Values of an event: encoded messages of type Summary.Value ---------------------------------

std::string scalar_value(const std::string& tag, float value);
/// A text, which TensorBoard shows as Markdown. Bytes that are not UTF-8 become U+FFFD.
std::string text_value(const std::string& tag, const std::string& text);
/// The hyperparameters of a run. Each is a number, a Boolean or a text. Other JSON is written as
/// text.
constexpr const char* hparams_tag = "_hparams_/session_start_info";
std::string hparams_value(const std::map<std::string, Json>& hparams);

// ---- Events: encoded messages of type Event -----------------------------------------------------

/// wall_time: seconds since 1970.
std::string event_of(double wall_time, int64_t step, const std::vector<std::string>& values);
/// The first event of a file.
std::string version_event(double wall_time);

/// The contents of an event. Texts are parts of the event's bytes.
struct ParsedEvent {
    struct Value {
        std::string_view bytes;  // the whole Summary.Value
        std::string_view tag;
    };
    int64_t step = 0;
    std::vector<Value> values;
};
/// Returns no values if the bytes are not an event.
ParsedEvent parse_event(std::string_view event);

// ---- Records ------------------------------------------------------------------------------------

/// An event's record, little endian: length (8 bytes), checksum of the length (4 bytes), the event,
/// checksum of the event (4 bytes).
std::string record_of(std::string_view event);

struct EventFileContents {
    std::vector<std::string_view> events;
    bool whole = true;  // false: a record after these events is incomplete or damaged
};
/// The events of a file up to the first record that is incomplete or damaged.
EventFileContents events_in(std::string_view file);

}  // namespace train_gpt
