#include "tokenizer/nfc.h"

#include <algorithm>
#include <new>
#include <vector>

#include <utf8proc.h>

#include "base/utf8.h"

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

bool is_ascii(char c) { return (c & 0x80) == 0; }

}  // namespace

std::string_view nfc(std::string_view text, std::string& storage) {
    const auto next_not_ascii = [&](size_t at) {
        return static_cast<size_t>(
            std::find_if_not(text.begin() + static_cast<std::ptrdiff_t>(at), text.end(), is_ascii) -
            text.begin());
    };
    size_t at = next_not_ascii(0);
    if (at == text.size()) return text;
    storage.assign(text.substr(0, at));
    while (at < text.size()) {
        // An ASCII character is composed with nothing before it, but with marks after it.
        size_t end = at;
        while (end < text.size() && !is_ascii(text[end])) ++end;
        if (!storage.empty() && at > 0 && is_ascii(text[at - 1])) {
            storage.pop_back();
            --at;
        }
        while (at < end) {
            const std::string_view rest = text.substr(at, end - at);
            const size_t good = find_not_utf8(rest);
            append_nfc(rest.substr(0, good), storage);
            at += good;
            if (at < end) storage += text[at++];
        }
        const size_t ascii_end = next_not_ascii(end);
        storage += text.substr(end, ascii_end - end);
        at = ascii_end;
    }
    return storage;
}

}  // namespace train_gpt
