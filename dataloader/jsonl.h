// Texts in JSON Lines: one object per line, with the text in one of its fields.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace train_gpt {

/// Whether a line is only white space; such lines are not records.
bool is_blank(std::string_view line);

/// What is wrong with a line.
struct LineFault {
    /// The rest of a sentence that begins with "this line", one of few: "is not valid JSON", "is
    /// not a JSON object", "has no field \"text\"", "has no string in the field \"text\"", "is
    /// nested more than 1000 levels deep". Empty: nothing is wrong.
    std::string reason;
    std::string detail = {};  // about this line: "it ends too early"
    size_t column = 0;        // of the error, in bytes from 1; 0: none
};

/// Puts the value of `field` of the object in `line` (the last one if it occurs several times) into
/// `text`, or returns what is wrong. JSON text is UTF-8: other bytes are not valid JSON. What
/// Python's json writes beyond JSON is read too: an escaped surrogate without its other half is
/// U+FFFD, and NaN and Infinity are numbers, as are those that no 64-bit float can hold. With
/// `may_be_string`, as in an array, the line may also be a string, which is then the text.
LineFault read_field(std::string_view line, const std::string& field, std::string& text,
                     bool may_be_string = false);

/// What JSON a text begins with.
struct FirstObject {
    /// incomplete: the text may begin with an object that ends after what is known of it
    enum class Found { nothing, incomplete, object };
    Found found = Found::nothing;
    bool in_array = false;  // the first element of an array, else a line
    bool has_text = false;  // it has a string in the field
    std::string fields;     // the names of its fields, for a message
};

/// Looks for a first line that is a JSON object with fields, or an array whose first element is
/// such an object. `text` is the beginning of a text, or all of it if `complete`. Lines before the
/// first line may be empty or damaged objects.
FirstObject find_first_object(std::string_view beginning, bool complete, const std::string& field);

}  // namespace train_gpt
