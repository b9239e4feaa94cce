// JSON from and to text. Every file that uses the library's parser or writer directly takes one to
// two seconds longer to compile, so other files call these functions. Errors are described in our
// own words.
#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace train_gpt {

/// Keys keep their order. Lookup is linear in the number of keys.
using Json = nlohmann::ordered_json;

/// The deepest nesting of lists and objects that is read. The library itself has no limit, but
/// writing and copying what it has read take stack for each level.
constexpr int max_json_depth = 1000;

/// What the library would let pass: nesting deeper than max_json_depth, and a NUL, which it takes
/// for the end of the text. As the rest of a sentence that begins with the text's name: "is nested
/// more than 1000 levels deep (line 3, column 7)"; empty if there is neither.
std::string json_hazard(std::string_view text);

/// Throws Error when the text is not JSON or has a hazard. The error's message is the rest of a
/// sentence that begins with the text's name: "is not valid JSON (line 3, column 7)".
Json parse_json(std::string_view text);

/// Like parse_json(), but does not throw: when the text is not JSON, is_discarded() is true.
Json try_parse_json(std::string_view text);

/// Text on one line, or indented by `indent` spaces per level. Bytes that are not valid UTF-8, as
/// in some file names, become U+FFFD.
std::string to_text(const Json& json, int indent = -1);

/// The place of text[at]: "line 3, column 7". Columns count bytes.
std::string place_of(size_t at, std::string_view text);

/// Where the parser found a text to be invalid.
std::string place_of(const nlohmann::json::parse_error& error, std::string_view text);

}  // namespace train_gpt
