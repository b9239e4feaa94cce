// What people get wrong when they write JSON by hand, in words for people.
#pragma once
#include <string>
#include <string_view>

namespace train_gpt {

/// The first mistake in a text that is not valid JSON: "line 3, column 7: what is wrong". Finds the
/// mistakes that people make: comments other than // and /* */, commas after the last entry,
/// missing commas, other quotes, words of Python, and brackets and texts that are not closed.
/// Returns an empty text for other mistakes.
std::string find_json_mistake(std::string_view text);

}  // namespace train_gpt
