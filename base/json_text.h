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

/// Throws Json::exception when the text is not JSON; describe_json_error() says why.
Json parse_json(std::string_view text);

/// Like parse_json(), but does not throw: when the text is not JSON, is_discarded() is true.
Json try_parse_json(std::string_view text);

/// Text on one line, or indented by `indent` spaces per level. Bytes that are not valid UTF-8, as
/// in some file names, become U+FFFD.
std::string to_text(const Json& json, int indent = -1);

/// Where the parser found a text to be invalid: "line 3, column 7". Columns count bytes.
std::string place_of(const nlohmann::json::parse_error& error, std::string_view text);

/// "is not valid JSON (line 3, column 7)", or another reason why the library could not read the
/// text. To be put after the file's name in a sentence.
std::string describe_json_error(const nlohmann::json::exception& error, std::string_view text);

}  // namespace train_gpt
