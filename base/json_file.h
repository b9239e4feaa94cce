// Reading JSON files with known keys. Errors name the file and the key.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/json_text.h"

namespace train_gpt {

/// Throws Error when the file is not JSON, or is nested too deeply (max_json_depth).
Json read_json(const std::filesystem::path& path);

/// The value of a key. Throws Error when it is missing or not a T.
template <class T>
T field(const Json& json, const char* key, const std::filesystem::path& path) {
    try {
        const Json& value = json.at(key);
        // The library would convert 2.5, true and numbers that do not fit to integers.
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
            if (value.is_number_unsigned()
                    ? std::in_range<T>(value.get<uint64_t>())
                    : value.is_number_integer() && std::in_range<T>(value.get<int64_t>()))
                return value.get<T>();
        } else {
            return value.get<T>();
        }
    } catch (const Json::exception&) {
    }
    throw Error(path.string(), " has no valid \"", key,
                "\"; is this the folder of a model or checkpoint?");
}

/// The value of a key, or `fallback` when it is missing or null.
template <class T>
T optional_field(const Json& json, const char* key, T fallback, const std::filesystem::path& path) {
    if (!json.contains(key) || json[key].is_null()) return fallback;
    return field<T>(json, key, path);
}

}  // namespace train_gpt
