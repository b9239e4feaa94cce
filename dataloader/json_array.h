// Converts one JSON array of texts, `[{"text": "a"}, {"text": "b"}]`, which many exports write, to
// JSON Lines.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace train_gpt {

/// Whether a text, of which this is the beginning, is one array rather than JSON Lines: its first
/// byte that is not white space opens an array, and no object begins the line after that array.
bool begins_array(std::string_view text);

/// Where the element ends that text[0] begins, before a comma or bracket; npos if it does not end.
size_t end_of_element(std::string_view text);

/// Finds where the elements of an array end. It starts after the opening bracket or after any comma
/// between two elements. It checks only what the boundaries depend on: strings and brackets. A line
/// break in a string is an error in JSON; if only what may follow an element precedes it in the
/// string, it was a stray quote that began the string, and the elements on later lines are found.
class ArrayScanner {
  public:
    enum class Byte { of_element, comma, end };

    /// What the next byte is. The result means nothing for bytes after the end.
    Byte next(char c);
    /// Whether a string is open after that byte.
    bool in_string() const { return in_string_; }

  private:
    Byte outside_string(char c);
    Byte inside_string(char c);

    int64_t depth_ = 0;  // of nesting inside the array itself
    bool in_string_ = false, escaped_ = false;
    // The brackets and commas that a string begins with, as long as it has nothing else but blanks.
    std::string structure_;
    bool is_structure_ = false;
};

/// Turns each array element in text[0, size) into one line. These bytes are whole elements, each
/// with the comma or bracket that ends it. That comma or bracket becomes a line break, and line
/// breaks inside an element become spaces (inside a string, where JSON does not allow a line break,
/// they become another control character, which is just as invalid).
void array_to_lines(std::string& text, size_t size);

}  // namespace train_gpt
