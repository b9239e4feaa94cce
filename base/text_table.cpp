#include "base/text_table.h"

#include <algorithm>

namespace train_gpt {

size_t width_of(std::string_view text) {
    return static_cast<size_t>(std::ranges::count_if(
        text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string padded(std::string text, size_t width) {
    const size_t wide = width_of(text);
    return text.append(width - std::min(width, wide), ' ');
}

std::string text_table(const std::vector<std::vector<std::string>>& rows,
                       const std::function<bool(size_t column)>& right) {
    std::vector<size_t> widths;
    for (const auto& row : rows) {
        widths.resize(std::max(widths.size(), row.size()));
        for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
    }
    std::string text;
    for (const auto& row : rows) {
        std::string line;
        for (size_t c = 0; c < row.size(); ++c) {
            line += c > 0 ? "  " : "";
            line += right(c) ? std::string(widths[c] - width_of(row[c]), ' ') + row[c]
                             : padded(row[c], widths[c]);
        }
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
}

}  // namespace train_gpt
