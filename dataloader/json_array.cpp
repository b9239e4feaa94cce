#include "dataloader/json_array.h"

#include <algorithm>

namespace train_gpt {

namespace {

constexpr std::string_view json_white_space = " \t\r\n";

}  // namespace

bool begins_array(std::string_view text) {
    const size_t at = text.find_first_not_of(json_white_space);
    if (at == text.npos || text[at] != '[') return false;
    ArrayScanner scanner;
    for (size_t i = at + 1; i < text.size() && text[i] != '\n'; ++i) {
        if (scanner.next(text[i]) != ArrayScanner::Byte::end) continue;
        const size_t next =
            text.find_first_not_of(json_white_space, std::min(text.find('\n', i), text.size()));
        return next == text.npos || text[next] != '{';
    }
    return true;
}

size_t end_of_element(std::string_view text) {
    ArrayScanner scanner;
    for (size_t i = 0; i < text.size(); ++i)
        if (scanner.next(text[i]) != ArrayScanner::Byte::of_element) return i;
    return text.npos;
}

ArrayScanner::Byte ArrayScanner::next(char c) {
    return in_string_ ? inside_string(c) : outside_string(c);
}

ArrayScanner::Byte ArrayScanner::inside_string(char c) {
    if (c == '\n' && is_structure_ && !structure_.empty()) {
        in_string_ = false;
        Byte last = Byte::of_element;
        for (const char bracket : structure_)
            if (last != Byte::end) last = std::max(last, outside_string(bracket));
        return last;
    }
    if (is_structure_) {
        if (c == '}' || c == ']' || c == ',')
            structure_ += c;
        else
            is_structure_ = json_white_space.find(c) != json_white_space.npos;
    }
    if (escaped_)
        escaped_ = false;
    else if (c == '\\')
        escaped_ = true;
    else if (c == '"')
        in_string_ = false;
    return Byte::of_element;
}

ArrayScanner::Byte ArrayScanner::outside_string(char c) {
    switch (c) {
        case '"':
            in_string_ = is_structure_ = true;
            structure_.clear();
            break;
        case '[':
        case '{':
            ++depth_;
            break;
        case ',':
            if (depth_ == 0) return Byte::comma;
            break;
        case ']':
            if (depth_ == 0) return Byte::end;
            --depth_;
            break;
        case '}':
            if (depth_ > 0) --depth_;
            break;
        default:
            break;
    }
    return Byte::of_element;
}

void array_to_lines(std::string& text, size_t size) {
    ArrayScanner scanner;
    for (size_t i = 0; i < size; ++i) {
        if (scanner.next(text[i]) != ArrayScanner::Byte::of_element)
            text[i] = '\n';
        else if (text[i] == '\n')
            text[i] = scanner.in_string() ? '\x1F' : ' ';
    }
}

}  // namespace train_gpt
