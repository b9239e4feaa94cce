#include "dataloader/json_array.h"

namespace train_gpt {

bool begins_array(std::string_view text) {
    const size_t at = text.find_first_not_of(" \t\r\n");
    return at != text.npos && text[at] == '[';
}

ArrayScanner::Byte ArrayScanner::next(char c) {
    if (in_string_) {
        if (escaped_)
            escaped_ = false;
        else if (c == '\\')
            escaped_ = true;
        else if (c == '"')
            in_string_ = false;
        return Byte::of_element;
    }
    switch (c) {
        case '"':
            in_string_ = true;
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
