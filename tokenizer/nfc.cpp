#include "tokenizer/nfc.h"

#include <algorithm>
#include <new>
#include <vector>

#include <utf8proc.h>

#include "base/utf8.h"
#include "tokenizer/unicode.h"

namespace train_gpt {

namespace {

/// Appends the form C of well-formed UTF-8.
void append_nfc(std::string_view text, std::string& out) {
    constexpr auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    static thread_local std::vector<utf8proc_int32_t> codes;
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
    const auto decompose = [&] {
        return utf8proc_decompose(bytes, static_cast<utf8proc_ssize_t>(text.size()), codes.data(),
                                  static_cast<utf8proc_ssize_t>(codes.size()), options);
    };
    utf8proc_ssize_t n = decompose();
    if (n > static_cast<utf8proc_ssize_t>(codes.size())) {
        codes.resize(static_cast<size_t>(n));
        n = decompose();
    }
    if (n >= 0) n = utf8proc_normalize_utf32(codes.data(), n, options);
    if (n < 0) throw std::bad_alloc();  // the only failure for well-formed text
    for (utf8proc_ssize_t i = 0; i < n; ++i) {
        utf8proc_uint8_t encoded[4];
        const auto length = utf8proc_encode_char(codes[static_cast<size_t>(i)], encoded);
        out.append(reinterpret_cast<const char*>(encoded), static_cast<size_t>(length));
    }
}

bool is_changed(char32_t code) {
    static const std::vector<bool> table = [] {
        const CodePoints& set = changed_by_nfc();
        std::vector<bool> result(CodePoints::limit);
        const std::vector<char32_t>& edges = set.edges();
        for (size_t i = 0; i < edges.size(); i += 2)
            std::fill(result.begin() + edges[i], result.begin() + edges[i + 1], true);
        return result;
    }();
    return table[code];
}

/// The position of the first character at or after `at` that NFC may change, or the end.
size_t find_changed(std::string_view text, size_t at) {
    while (at < text.size()) {
        const Utf8Character next = utf8_character(text, at);
        if (next.code >= 0x80 && is_changed(next.code)) return at;
        at += next.length;
    }
    return at;
}

/// The first position at or after `at` of a character that NFC leaves alone.
size_t skip_changed(std::string_view text, size_t at) {
    while (at < text.size()) {
        const Utf8Character next = utf8_character(text, at);
        if (next.code < 0x80 || !is_changed(next.code)) return at;
        at += next.length;
    }
    return at;
}

}  // namespace

std::string_view nfc(std::string_view text, std::string& storage) {
    size_t begin = find_changed(text, 0);
    if (begin == text.size()) return text;
    storage.clear();
    for (size_t done = 0; done < text.size();) {
        // An ASCII character is composed with nothing before it, but with marks after it.
        if (begin > done && begin < text.size() && !(text[begin - 1] & 0x80)) --begin;
        storage += text.substr(done, begin - done);
        done = skip_changed(text, begin + (begin < text.size() && !(text[begin] & 0x80)));
        append_nfc(text.substr(begin, done - begin), storage);
        begin = find_changed(text, done);
    }
    return storage;
}

}  // namespace train_gpt
