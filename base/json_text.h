// JSON from and to text. Each file that calls the library's parser or writer compiles them for one to two seconds: they are
// called here. What is wrong with a text is said in words of our own.
#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace train_gpt {

/// Keys keep their order. Looking one up takes time in proportion to their number.
using Json = nlohmann::ordered_json;

/// Throws Json::exception where the text is not JSON: describe_json_error says why.
Json parse_json(std::string_view text);

/// The same for a text that may be anything: is_discarded() tells what is not JSON.
Json try_parse_json(std::string_view text);

/// On one line, or with so many spaces a level. Bytes that are no UTF-8, as names of files may have, become U+FFFD.
std::string to_text(const Json& json, int indent = -1);

/// Where a text stops being JSON, as the library found: "line 3, column 7". Columns count bytes.
std::string place_of(const nlohmann::json::parse_error& error, std::string_view text);

/// "is not valid JSON (line 3, column 7)", or what else keeps the library from reading a text: for
/// a sentence that begins with the file's name.
std::string describe_json_error(const nlohmann::json::exception& error, std::string_view text);

}  // namespace train_gpt
