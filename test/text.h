// Text helpers for tests: files, error messages, and what they contain.
#pragma once
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/error.h"

namespace train_gpt {

inline std::string read(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

inline void write(const std::filesystem::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

/// How often `part` occurs in the text, without overlaps.
inline size_t occurrences(const std::string& text, const std::string& part) {
    size_t count = 0;
    for (size_t at = text.find(part); at != std::string::npos;
         at = text.find(part, at + part.size()))
        ++count;
    return count;
}

/// The message of the Error that `action` throws; empty when it throws none.
template <class Action>
std::string error_of(Action&& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

}  // namespace train_gpt
