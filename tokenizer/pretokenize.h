// Pre-tokenisation: cuts text into pieces (roughly words), within which byte pairs are merged.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace train_gpt {

/// A published way to cut text: a regular expression whose successive matches are the pieces.
///
/// gpt2 (GPT-2; also r50k_base and p50k_base of tiktoken)
///     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// cl100k (GPT-3.5 and GPT-4, as tiktoken defines it since version 0.9)
///     '(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+
///     |\s++$|\s*[\r\n]|\s+(?!\S)|\s
/// cl100k_first (the same as first published, and as in the tokenizer.json of GPT-4 and Llama 3)
///     (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
///     |\s*[\r\n]+|\s+(?!\S)|\s+
/// The last two differ only in white space that contains a line break and ends the text: cl100k
/// keeps it whole, while cl100k_first cuts it after the last line break.
/// qwen2 (Qwen 2 and 3): cl100k_first with \p{N} in place of \p{N}{1,3}
enum class Pattern { gpt2, cl100k, cl100k_first, qwen2 };

/// The name of a pattern, as above.
const char* pattern_name(Pattern pattern);

/// The pattern as tokenizer.json files write it.
std::string regex_of(Pattern pattern);

/// The pattern of GPT-4o (o200k), which PCRE2 matches.
extern const std::string_view o200k_regex;

/// What the step Digits of a tokenizer.json cuts out: each digit, or whole numbers. Hugging Face's
/// step asks Rust, which knows the numbers of Unicode 17.0. Patterns know the numbers of 16.0.
extern const std::string_view single_digits_regex, whole_numbers_regex;

/// The pattern that a tokenizer.json writes as this regular expression.
std::optional<Pattern> known_pattern(std::string_view regex);

/// Whether the pieces of a regular expression do not reach across the places where
/// is_encodable_cut() (dataloader/documents.h) lets a long document be cut. True for the published
/// patterns; false for what is not known.
bool respects_encodable_cuts(std::string_view regex);

/// Whether it is known that the matches of a regular expression cover every text.
bool matches_everything(std::string_view regex);

/// Length in bytes of the first piece of `text`, at least 1; `text` must not be empty. The patterns
/// only look ahead, so the rest of the text can be cut as if it stood alone; the end of `text`
/// counts as the end of the text.
///
/// \p{L}, \p{N} and \s have the characters of Unicode 16.0. The expressions are defined on
/// characters. A byte that is not part of a well-formed UTF-8 character counts as a separate
/// character that is neither letter, number nor space.
size_t first_piece(Pattern pattern, std::string_view text);

/// Whether the last character of `text` is one of \p{L} or \p{N}.
bool ends_in_letter_or_number(std::string_view text);

}  // namespace train_gpt
