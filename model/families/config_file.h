// Reading a config.json of Hugging Face's. Errors name the file and the key.
#pragma once
#include <charconv>
#include <filesystem>

#include "base/error.h"
#include "base/json_file.h"

namespace train_gpt {

/// A float as a person would write it: 1.702, where the next double is 1.7020000219345093.
inline double as_written(float value) {
    char text[32];
    double written = 0;
    const auto end = std::to_chars(text, text + sizeof text, value).ptr;
    std::from_chars(text, end, written);
    return written;
}

class ConfigFile {
  public:
    /// The JSON and the path must outlive the object.
    ConfigFile(const Json& json, const std::filesystem::path& path) : json_(json), path_(path) {}

    /// A size that a model must have: 1 … 2²⁴.
    int64_t size(const char* key) const {
        const auto value = field<int64_t>(json_, key, path_);
        if (value < 1 || value > 1 << 24) refuse(key, "; it must lie between 1 and ", 1 << 24);
        return value;
    }
    /// A size as size() reads it; 0 where the key is missing or null.
    int64_t optional_size(const char* key) const { return has(key) ? size(key) : 0; }

    /// A number without a fraction; `fallback` where it is missing or null.
    int64_t whole_number(const char* key, int64_t fallback) const {
        return optional_field(json_, key, fallback, path_);
    }
    double number(const char* key, double fallback) const {
        return optional_field(json_, key, fallback, path_);
    }
    bool flag(const char* key, bool fallback) const {
        return optional_field(json_, key, fallback, path_);
    }

    /// Refuses other values of a setting with which the same weights compute another function.
    template <class T>
    void only(const char* key, const T& supported) const {
        if (optional_field(json_, key, supported, path_) != supported)
            refuse(key, "; only ", to_text(supported), " is supported");
    }

    bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  private:
    template <class... Why>
    [[noreturn]] void refuse(const char* key, const Why&... why) const {
        throw Error(path_.string(), " has ", key, " = ", to_text(json_[key]), why...);
    }

    const Json& json_;
    const std::filesystem::path& path_;
};

}  // namespace train_gpt
