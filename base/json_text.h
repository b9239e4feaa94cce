// What is wrong with a text that should be JSON, in words of our own.
#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace train_gpt {

/// Where a text stops being JSON, as the library found: "line 3, column 7". Columns count bytes.
std::string place_of(const nlohmann::json::parse_error& error, std::string_view text);

/// "is not valid JSON (line 3, column 7)", or what else keeps the library from reading a text: for
/// a sentence that begins with the file's name.
std::string describe_json_error(const nlohmann::json::exception& error, std::string_view text);

}  // namespace train_gpt
