#include "training/config/config_schema.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "training/config/config_keys.h"

namespace train_gpt {

namespace {

/// The JSON Schema of a source in a list of sources.
Json source_schema() {
    return {{"type", "object"},
            {"additionalProperties", false},
            {"required", {"glob"}},
            {"properties",
             {{"glob", {{"type", "string"}}},
              {"weight", {{"type", "number"}, {"exclusiveMinimum", 0}}},
              {"name", {{"type", "string"}}}}}};
}

}  // namespace

std::string config_schema() {
    Json root = {
        {"$schema", "https://json-schema.org/draft/2020-12/schema"},
        {"title", "train_gpt configuration"},
        {"type", "object"},
        {"additionalProperties", false},
        {"properties", {{"$schema", {{"type", "string"}}}}},
    };
    Config defaults;
    const auto number = [](double value) {
        const bool whole = std::trunc(value) == value && std::abs(value) <= max_exact_integer;
        return whole ? Json(static_cast<int64_t>(value)) : Json(value);
    };
    for (const ConfigKey& key : config_keys()) {
        const KeyField field = key.field(defaults);
        const KeyRule& rule = key.rule;
        Json property;
        property["description"] = std::string(key.meaning);
        const bool has_switch = takes_switch(key, field);
        property["type"] = has_switch          ? Json({"string", "boolean"})
                           : is_text(field)    ? Json("string")
                           : is_sources(field) ? Json({"string", "array"})
                           : is_texts(field)   ? Json({"string", "array"})
                           : takes_first(key)  ? Json({"integer", "array"})
                           : is_numbers(field) ? Json("array")
                           : is_real(field)    ? Json("number")
                                               : Json("integer");
        if (is_optional_number(field)) {
            property["type"] = {"integer", "string"};
            property["pattern"] = "^auto$";
        }
        if (is_sources(field)) property["items"] = source_schema();
        if (is_texts(field)) property["items"] = {{"type", "string"}};
        Json bounds = Json::object();
        if (is_numbers(field)) bounds["type"] = "integer";
        for (const std::string_view word : rule.words())
            (is_texts(field) ? property["items"] : property)["enum"].push_back(std::string(word));
        if (has_switch) {
            if (rule.words().empty()) property["enum"] = {"on", "off"};
            for (const bool value : {false, true})
                property["enum"].insert(
                    rule.words().empty() ? property["enum"].end() : property["enum"].begin(),
                    Json(value));
        }
        if (rule.low > -infinity)
            bounds[rule.above_low ? "exclusiveMinimum" : "minimum"] = number(rule.low);
        if (rule.high < infinity) bounds["maximum"] = number(rule.high);
        if (is_numbers(field)) property["items"] = bounds;
        if (!is_numbers(field) || takes_first(key)) {
            bounds.erase("type");
            property.update(bounds);
        }
        property["default"] = value_of(defaults, key);
        Json* properties = &root["properties"];
        const std::string section(section_of_key(key.path));
        if (!section.empty()) {
            Json& object = (*properties)[section];
            if (object.is_null())
                object = {{"type", "object"},
                          {"additionalProperties", false},
                          {"properties", Json::object()}};
            properties = &object["properties"];
        }
        (*properties)[std::string(name_of_key(key.path))] = std::move(property);
    }
    return to_text(root, 2) + "\n";
}

}  // namespace train_gpt
