// A reader of TensorBoard's event files that shares no code with the writer: it knows the formats
// from their descriptions alone, and any damage is an exception.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace train_gpt::event_reader {

/// CRC-32C as the remainder of a division of polynomials, one bit after the other: the bits of each
/// byte and of the result are in reverse order, and the first and last 32 bits are inverted.
uint32_t crc32c(const std::string& bytes);

struct Value {
    std::string tag, plugin;
    std::optional<float> scalar;
    std::string text;
    std::map<std::string, nlohmann::json> hparams;
};

struct Event {
    double wall_time = 0;
    int64_t step = 0;
    std::string version;
    std::vector<Value> values;
};

Event event_of(const std::string& message);

/// All events of a file.
std::vector<Event> read_events(const std::filesystem::path& path);

/// The event files in a folder, as TensorBoard finds them.
std::vector<std::filesystem::path> event_files(const std::filesystem::path& folder);

/// What a folder's only event file says: scalars and texts by tag and step. A tag's steps must
/// increase.
struct Board {
    std::map<std::string, std::map<int64_t, float>> scalars;
    std::map<std::string, std::map<int64_t, std::string>> texts;
    std::map<std::string, nlohmann::json> hparams;
};

Board board_of(const std::filesystem::path& folder);

/// A text without the four spaces before each line that make Markdown show it as it is.
std::string without_indent(const std::string& text);

}  // namespace train_gpt::event_reader
