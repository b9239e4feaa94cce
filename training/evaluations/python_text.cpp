#include "training/evaluations/python_text.h"

#include <algorithm>
#include <initializer_list>

namespace train_gpt {

namespace {

/// Every character that is white space to Python, in UTF-8.
constexpr std::string_view spaces[] = {
    "\x09",         "\x0a",         "\x0b",         "\x0c",         "\x0d",
    "\x1c",         "\x1d",         "\x1e",         "\x1f",         " ",
    "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x81",
    "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86",
    "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8",
    "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"};

}  // namespace

std::string_view python_rstrip(std::string_view text) {
    for (;;) {
        const auto* space =
            std::ranges::find_if(spaces, [&](std::string_view one) { return text.ends_with(one); });
        if (space == std::end(spaces)) return text;
        text.remove_suffix(space->size());
    }
}

std::string_view python_strip(std::string_view text) {
    text = python_rstrip(text);
    for (;;) {
        const auto* space = std::ranges::find_if(
            spaces, [&](std::string_view one) { return text.starts_with(one); });
        if (space == std::end(spaces)) return text;
        text.remove_prefix(space->size());
    }
}

size_t python_length(std::string_view text) {
    return static_cast<size_t>(std::ranges::count_if(
        text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace train_gpt
