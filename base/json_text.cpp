#include "base/json_text.h"

#include <algorithm>

#include "base/error.h"

namespace train_gpt {

Json parse_json(std::string_view text) { return Json::parse(text); }

Json try_parse_json(std::string_view text) { return Json::parse(text, nullptr, false); }

std::string to_text(const Json& json, int indent) {
    return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::string place_of(const nlohmann::json::parse_error& error, std::string_view text) {
    const std::string_view before =
        text.substr(0, std::min(error.byte > 0 ? error.byte - 1 : 0, text.size()));
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t newline = before.rfind('\n');
    const size_t column = 1 + before.size() - (newline == before.npos ? 0 : newline + 1);
    return concat("line ", line, ", column ", column);
}

std::string describe_json_error(const nlohmann::json::exception& error, std::string_view text) {
    if (const auto* at = dynamic_cast<const nlohmann::json::parse_error*>(&error))
        return concat("is not valid JSON (", place_of(*at, text), ")");
    constexpr int number_overflow = 406;
    return error.id == number_overflow ? "holds a number too large to represent"
                                       : "does not have the expected entries";
}

}  // namespace train_gpt
