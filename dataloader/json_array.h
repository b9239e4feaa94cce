// One JSON array of texts as JSON Lines: `[{"text": "a"}, {"text": "b"}]`, as many exports write
// it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace train_gpt {

/// Whether the first byte that is no white space opens an array.
bool begins_array(std::string_view text);

/// Finds where the elements of an array end, from the byte after its opening bracket on, or after
/// any comma between two elements. Nothing is checked but what borders depend on: strings and
/// brackets.
class ArrayScanner {
  public:
    enum class Byte { of_element, comma, end };

    /// What the next byte is. Nothing is known of those after the end.
    Byte next(char c);
    /// Whether that byte is in a string.
    bool in_string() const { return in_string_; }

  private:
    int64_t depth_ = 0;  // below the array itself
    bool in_string_ = false, escaped_ = false;
};

/// Makes each of the whole elements in `text`, of which it has nothing but them and what ends them,
/// one line: the comma or bracket after it becomes a line break, and line breaks in it become
/// spaces (but in strings, where JSON has none, another control character, which is as wrong).
void array_to_lines(std::string& text, size_t size);

}  // namespace train_gpt
