// Texts in JSON Lines: one object per line, with the text in one of its fields.
#pragma once
#include <string>
#include <string_view>

namespace train_gpt {

/// Whether a line is only white space; such lines are not records.
bool is_blank(std::string_view line);

/// Puts the value of `field` of the object in `line` (the last one if it occurs several times) into
/// `text` and returns an empty string; or returns what is wrong with the line, as the rest of a
/// sentence that begins with "this line": "is not valid JSON", "is not a JSON object", "has no
/// field \"text\"", "has no string in the field \"text\"", "has a number that no 64-bit float can
/// hold". JSON text is UTF-8: other bytes and lone surrogates are not valid JSON. `column` is the
/// position of the error in the line, in bytes from 1, or 0 if it has none. With `may_be_string`,
/// as in an array, the line may also be a string, which is then the text.
std::string read_field(std::string_view line, const std::string& field, std::string& text,
                       size_t& column, bool may_be_string = false);

}  // namespace train_gpt
