// Tables as text for terminals.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace train_gpt {

/// The characters of UTF-8 text, each of which takes a column of a terminal.
size_t width_of(std::string_view text);

/// The text with spaces after it, so that it is at least so wide.
std::string padded(std::string text, size_t width);

/// Rows of cells under each other, in columns as wide as their widest cell and two spaces apart.
/// Rows may have different numbers of cells. `right`: whether a column is aligned to the right.
std::string text_table(
    const std::vector<std::vector<std::string>>& rows,
    const std::function<bool(size_t column)>& right = [](size_t) { return false; });

}  // namespace train_gpt
