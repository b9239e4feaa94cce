#include "tokenizer/regex.h"

#include <algorithm>
#include <new>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "base/utf8.h"
#include "tokenizer/regex_translation.h"

namespace train_gpt {

namespace {

std::string message_of(int code) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(code, text, sizeof text);
    return reinterpret_cast<const char*>(text);
}

struct Free {
    void operator()(pcre2_code* p) const { pcre2_code_free(p); }
    void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
    void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
    void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
    void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};

}  // namespace

struct Regex::Compiled {
    explicit Compiled(std::string_view pattern) {
        RegexTranslation translation = translate_regex(pattern);
        symbols = std::move(translation.symbols);
        const std::unique_ptr<pcre2_compile_context, Free> context(
            pcre2_compile_context_create(nullptr));
        if (!context) throw std::bad_alloc();
        pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
        int error = 0;
        PCRE2_SIZE where = 0;
        code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translation.pattern.data()),
                                 translation.pattern.size(), PCRE2_MULTILINE, &error, &where,
                                 context.get()));
        if (!code) throw Error("PCRE2 says: ", message_of(error));
        pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // where it cannot, matching is slower
    }
    std::unique_ptr<pcre2_code, Free> code;
    std::vector<uint8_t> symbols;  // of each code point
};

Regex::Regex(std::string_view pattern)
    : pattern_(pattern), compiled_(std::make_shared<const Compiled>(pattern)) {}

std::string escape_regex(std::string_view text) {
    std::string escaped;
    for (const char c : text) {
        if (std::string_view("\\^$.|?*+()[]{}-&#").find(c) != text.npos) escaped += '\\';
        escaped += c;
    }
    return escaped;
}

struct RegexMatcher::Memory {
    std::unique_ptr<pcre2_match_data, Free> data{pcre2_match_data_create(1, nullptr)};
    std::unique_ptr<pcre2_match_context, Free> context{pcre2_match_context_create(nullptr)};
    // The stack of compiled patterns grows as it is needed.
    std::unique_ptr<pcre2_jit_stack, Free> stack{
        pcre2_jit_stack_create(size_t{32} << 10, size_t{512} << 20, nullptr)};
};

RegexMatcher::RegexMatcher() : memory_(std::make_unique<Memory>()) {
    if (!memory_->data || !memory_->context) throw std::bad_alloc();
    if (memory_->stack)
        pcre2_jit_stack_assign(memory_->context.get(), nullptr, memory_->stack.get());
}
RegexMatcher::RegexMatcher(RegexMatcher&&) noexcept = default;
RegexMatcher& RegexMatcher::operator=(RegexMatcher&&) noexcept = default;
RegexMatcher::~RegexMatcher() = default;

void RegexMatcher::begin(const Regex& regex, std::string_view text) {
    regex_ = &regex;
    text_ = text;
    const uint8_t* const symbol_of = regex.compiled_->symbols.data();
    symbols_.resize(text.size());
    size_t count = 0;
    for (size_t at = 0; at < text.size();) {
        const Utf8Character character = utf8_character(text, at);
        symbols_[count++] = symbol_of[character.code];
        at += character.length;
    }
    symbols_.resize(count);
    from_ = symbol_ = byte_ = 0;
    last_end_.reset();
    // More than any search needs whose steps are in proportion to the text.
    const size_t limit = 10'000'000 + 100 * count;
    pcre2_set_match_limit(memory_->context.get(),
                          static_cast<uint32_t>(std::min<size_t>(limit, UINT32_MAX)));
}

bool RegexMatcher::search(size_t from, size_t& begin, size_t& end) {
    const auto match = [&](uint32_t options) {
        return pcre2_match(regex_->compiled_->code.get(), symbols_.data(), symbols_.size(), from,
                           options, memory_->data.get(), memory_->context.get());
    };
    int code = match(0);
    if (code == PCRE2_ERROR_JIT_STACKLIMIT) code = match(PCRE2_NO_JIT);
    if (code == PCRE2_ERROR_NOMATCH) return false;
    if (code < 0)
        throw Error("the tokenizer's pattern ", regex_->pattern(),
                    " takes too long or too much memory on a text of ", text_.size(), " bytes (",
                    message_of(code), "); use a simpler pattern or shorter documents");
    const PCRE2_SIZE* const places = pcre2_get_ovector_pointer(memory_->data.get());
    begin = places[0];
    end = places[1];
    return true;
}

size_t RegexMatcher::byte_of(size_t symbol) {
    if (symbols_.size() == text_.size()) return symbol;  // a byte each
    for (; symbol_ < symbol; ++symbol_) byte_ += utf8_character(text_, byte_).length;
    return byte_;
}

std::optional<RegexMatcher::Match> RegexMatcher::next() {
    while (from_ <= symbols_.size()) {
        size_t begin = 0, end = 0;
        if (!search(from_, begin, end)) break;
        from_ = end;
        if (begin == end && end == last_end_) {
            // An empty match where the last one ended does not count.
            ++from_;
            continue;
        }
        last_end_ = end;
        const size_t first = byte_of(begin);
        return Match{first, byte_of(end)};
    }
    return {};
}

}  // namespace train_gpt
