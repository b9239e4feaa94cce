#include "base/json_text.h"

#include <algorithm>

#include "base/error.h"

namespace train_gpt {

std::string json_hazard(std::string_view text) {
    if (const size_t nul = text.find('\0'); nul != text.npos)
        return concat("is not valid JSON (a NUL byte at ", place_of(nul, text), ")");
    int depth = 0;
    bool in_string = false;
    for (size_t at = 0; at < text.size(); ++at) {
        const char c = text[at];
        if (c == '"')
            in_string = !in_string;
        else if (in_string)
            at += c == '\\';  // the next byte is escaped
        else if (c == ']' || c == '}')
            --depth;
        else if ((c == '[' || c == '{') && ++depth > max_json_depth)
            return concat("is nested more than ", max_json_depth, " levels deep (",
                          place_of(at, text), ")");
    }
    return "";
}

Json parse_json(std::string_view text) {
    if (const std::string hazard = json_hazard(text); !hazard.empty()) throw Error(hazard);
    try {
        return Json::parse(text);
    } catch (const Json::parse_error& error) {
        throw Error("is not valid JSON (", place_of(error, text), ")");
    } catch (const Json::out_of_range&) {
        throw Error("holds a number too large to represent");
    }
}

Json try_parse_json(std::string_view text) {
    return json_hazard(text).empty() ? Json::parse(text, nullptr, false)
                                     : Json(Json::value_t::discarded);
}

std::string to_text(const Json& json, int indent) {
    return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::string place_of(size_t at, std::string_view text) {
    const std::string_view before = text.substr(0, at);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t newline = before.rfind('\n');
    const size_t column = 1 + before.size() - (newline == before.npos ? 0 : newline + 1);
    return concat("line ", line, ", column ", column);
}

std::string place_of(const nlohmann::json::parse_error& error, std::string_view text) {
    return place_of(std::min(error.byte > 0 ? error.byte - 1 : 0, text.size()), text);
}

}  // namespace train_gpt
