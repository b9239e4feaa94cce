// Texts in JSON Lines: one object a line, the text in one of its fields.
#pragma once
#include <string>
#include <string_view>

namespace train_gpt {

/// Whether a line is nothing but white space; such lines are no records.
bool is_blank(std::string_view line);

/// Puts the value of `field` of the object in `line` (of several, the last) into `text` and returns
/// an empty string, or else what is wrong with the line, as a sentence goes on behind "this line":
/// "is no valid JSON", "is no JSON object", "has no field \"text\"", "has no string in the field
/// \"text\"", "has a number that no 64-bit float can hold". JSON's text is UTF-8: other bytes and
/// lone surrogates are no valid JSON. `column`, where it says anything, is the byte in the line
/// from 1, else 0. With `may_be_string`, as in an array, the line may also be a string, which is
/// the text then.
std::string read_field(std::string_view line, const std::string& field, std::string& text,
                       size_t& column, bool may_be_string = false);

}  // namespace train_gpt
