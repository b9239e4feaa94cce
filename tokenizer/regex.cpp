#include "tokenizer/regex.h"

#include <utility>
#include <vector>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"

namespace train_gpt {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_alphanumeric(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// Unicode's white space and Oniguruma's word characters, to be used in a set.
constexpr const char* space_set = R"(\x09-\x0d\x{85}\p{Z})";
constexpr const char* word_set = R"(\p{L}\p{M}\p{Nd}\p{Pc})";
// Where Oniguruma looks for the boundaries of words, the numbers of Latin-1 count as well.
constexpr const char* boundary_set = R"(\p{L}\p{M}\p{Nd}\p{Pc}\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
constexpr const char* hexadecimal_set = "0-9A-Fa-f";

/// Rewrites a pattern for PCRE2.
class Translator {
  public:
    explicit Translator(std::string_view pattern) : in_(pattern) {}

    std::string translate() {
        while (at_ < in_.size()) {
            const char c = in_[at_];
            if (c == '\\') {
                begin_atom();
                escape();
            } else if (c == '[') {
                begin_atom();
                set();
            } else if (c == '(') {
                open();
            } else if (c == ')') {
                close();
            } else if (c == '*' || c == '+' || c == '?') {
                require_atom();
                copy(1);
                if (next() == '?' || next() == '+') copy(1);
            } else if (c == '{') {
                repetition();
            } else if (c == '|') {
                copy(1);
                atom_ = none;
            } else {
                begin_atom();
                copy(1);
                while (at_ < in_.size() && (in_[at_] & 0xC0) == 0x80) copy(1);
            }
        }
        return std::move(out_);
    }

  private:
    static constexpr size_t none = std::string::npos;

    static Error refuse(const std::string& what) { return Error(what, ", which is not supported"); }
    char next(size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
    void copy(size_t n) {
        out_ += in_.substr(at_, n);
        at_ += n;
    }
    void write(std::string_view text, size_t consumed) {
        out_ += text;
        at_ += consumed;
    }
    void begin_atom() { atom_ = out_.size(); }
    void require_atom() const {
        if (atom_ == none) throw Error("it repeats nothing at byte ", at_ + 1);
    }

    void open() {
        groups_.push_back(out_.size());
        atom_ = none;
        copy(1);
        if (next() != '?') return;
        const char kind = next(1);
        if (kind == ':' || kind == '=' || kind == '!' || kind == '>') return copy(2);
        if (kind == '<') return copy(next(2) == '=' || next(2) == '!' ? 3 : 2);
        if (kind == '#') {
            const size_t end = in_.find(')', at_);
            at_ = end == none ? in_.size() : end;
            out_ += "?:";
            return;
        }
        copy(1);
        while (next() == 'i' || next() == 'm' || next() == '-')
            write(next() == 'm' ? "s" : std::string(1, next()), 1);
        if (next() == ':') return copy(1);
        if (next() != ')') throw refuse(concat("it has a group (?", next()));
        // Options until the end of the enclosing group: no group of their own.
        groups_.pop_back();
        copy(1);
    }

    void close() {
        if (groups_.empty()) throw Error("it has a ) without a (");
        atom_ = groups_.back();
        groups_.pop_back();
        copy(1);
    }

    /// {n}, {n,}, {,m} or {n,m}; any other brace is a character.
    void repetition() {
        size_t end = at_ + 1;
        const auto number = [&] {
            const size_t begin = end;
            while (end < in_.size() && is_digit(in_[end])) ++end;
            return in_.substr(begin, end - begin);
        };
        const std::string_view least = number();
        const bool comma = end < in_.size() && in_[end] == ',';
        if (comma) ++end;
        const std::string_view most = comma ? number() : least;
        if (end == in_.size() || in_[end] != '}' || (least.empty() && most.empty())) {
            begin_atom();
            return write("\\{", 1);
        }
        require_atom();
        at_ = end + 1;
        const std::string counts =
            concat("{", least.empty() ? "0" : least, comma ? "," : "", comma ? most : "", "}");
        if (next() == '+' || (next() == '?' && !comma)) {
            out_.insert(atom_, "(?:");
            out_ += concat(counts, ")", next());
            ++at_;
        } else {
            out_ += counts;
            if (next() == '?') copy(1);
        }
    }

    /// \xHH, \x{H…} and \uHHHH; false if this is none of them.
    bool code_point() {
        const bool braces = next(1) == 'x' && next(2) == '{';
        const size_t most = next(1) == 'u' ? 4 : braces ? 8 : 2, begin = at_ + (braces ? 3 : 2);
        if (next(1) != 'x' && next(1) != 'u') return false;
        size_t end = begin;
        while (end < in_.size() && end < begin + most &&
               std::string_view("0123456789abcdefABCDEF").find(in_[end]) != none)
            ++end;
        if (end == begin || (braces && (end == in_.size() || in_[end] != '}')) ||
            (next(1) == 'u' && end != begin + 4))
            throw Error("it has a malformed code point at byte ", at_ + 1);
        out_ += concat("\\x{", in_.substr(begin, end - begin), "}");
        at_ = end + (braces ? 1 : 0);
        return true;
    }

    /// \p{…} and \P{…}; false if this is neither.
    bool property() {
        if (next(1) != 'p' && next(1) != 'P') return false;
        const size_t end = in_.find('}', at_);
        if (next(2) != '{' || end == none)
            throw Error("it has a malformed property at byte ", at_ + 1);
        copy(end + 1 - at_);
        return true;
    }

    void escape() {
        if (code_point() || property()) return;
        const char c = next(1);
        if (c == '\0') throw Error("it ends in a backslash");
        const auto set = [](const char* members, bool negated) {
            return concat(negated ? "[^" : "[", members, "]");
        };
        if (c == 's' || c == 'S') return write(set(space_set, c == 'S'), 2);
        if (c == 'w' || c == 'W') return write(set(word_set, c == 'W'), 2);
        if (c == 'h' || c == 'H') return write(set(hexadecimal_set, c == 'H'), 2);
        if (c == 'v') return write("\\x0b", 2);
        if (c == 'b' || c == 'B') {
            const std::string word = set(boundary_set, false);
            const char *at_start = c == 'b' ? "!" : "=", *at_end = c == 'b' ? "=" : "!";
            return write(concat("(?:(?<=", word, ")(?", at_start, word, ")|(?<!", word, ")(?",
                                at_end, word, "))"),
                         2);
        }
        if (is_alphanumeric(c) && std::string_view("dDntrfaeAzZKRXk0123456789").find(c) == none)
            throw refuse(concat("it uses \\", c));
        copy(2);
        while (at_ < in_.size() && (in_[at_] & 0xC0) == 0x80) copy(1);
    }

    void set() {
        copy(1);
        if (next() == '^') copy(1);
        if (next() == ']') throw refuse("it has a set that begins with ]");
        // PCRE2's \s and \S together are every character.
        const bool has_not_space = in_.substr(at_, end_of_set() - at_).find("\\S") != none;
        while (next() != ']') {
            if (at_ >= in_.size()) throw Error("it has a [ without a ]");
            const char c = next();
            if (c == '[') throw refuse("it has a set within a set");
            if (c == '&' && next(1) == '&') throw refuse("it has && in a set");
            if (c != '\\') {
                copy(1);
            } else if (!code_point() && !property()) {
                escape_in_set(has_not_space);
            }
        }
        copy(1);
    }

    void escape_in_set(bool has_not_space) {
        const char c = next(1);
        if (c == 's' && !has_not_space) return write(space_set, 2);
        if (c == 'w') return write(word_set, 2);
        if (c == 'h') return write(hexadecimal_set, 2);
        if (c == 'v') return write("\\x0b", 2);
        if (is_alphanumeric(c) && std::string_view("sSdDntrfaeb0123456789").find(c) == none)
            throw refuse(concat("it uses \\", c, " in a set"));
        copy(2);
    }

    size_t end_of_set() const {
        for (size_t at = at_; at < in_.size(); ++at) {
            if (in_[at] == ']') return at;
            if (in_[at] == '\\') ++at;
        }
        return in_.size();
    }

    std::string_view in_;
    size_t at_ = 0;
    std::string out_;
    size_t atom_ = none;  // where in out_ the last character, set or group begins
    std::vector<size_t> groups_;
};

std::string message_of(int code) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(code, text, sizeof text);
    return reinterpret_cast<const char*>(text);
}

struct Free {
    void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
    void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
    void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
    void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};

}  // namespace

Regex::Regex(std::string_view pattern) : pattern_(pattern) {
    const std::string translated = Translator(pattern).translate();
    const std::unique_ptr<pcre2_compile_context, Free> context(
        pcre2_compile_context_create(nullptr));
    if (!context) throw std::bad_alloc();
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    int error = 0;
    PCRE2_SIZE where = 0;
    pcre2_code* const code =
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                      &where, context.get());
    if (!code) throw Error("PCRE2 says: ", message_of(error));
    code_ = std::shared_ptr<const void>(code, [](const void* p) {
        pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(p)));
    });
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it cannot, matching is slower
}

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
        pcre2_jit_stack_create(size_t{32} << 10, size_t{64} << 20, nullptr)};
};

RegexMatcher::RegexMatcher() : memory_(std::make_unique<Memory>()) {
    if (!memory_->data || !memory_->context) throw std::bad_alloc();
    if (memory_->stack)
        pcre2_jit_stack_assign(memory_->context.get(), nullptr, memory_->stack.get());
}
RegexMatcher::RegexMatcher(RegexMatcher&&) noexcept = default;
RegexMatcher& RegexMatcher::operator=(RegexMatcher&&) noexcept = default;
RegexMatcher::~RegexMatcher() = default;

std::optional<RegexMatcher::Match> RegexMatcher::find(const Regex& regex, std::string_view text,
                                                      size_t from) {
    const auto search = [&](uint32_t options) {
        return pcre2_match(static_cast<const pcre2_code*>(regex.code_.get()),
                           reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                           PCRE2_NO_UTF_CHECK | options, memory_->data.get(),
                           memory_->context.get());
    };
    int code = search(0);
    if (code == PCRE2_ERROR_JIT_STACKLIMIT) code = search(PCRE2_NO_JIT);
    if (code == PCRE2_ERROR_NOMATCH) return {};
    if (code < 0)
        throw Error("the tokenizer's pattern ", regex.pattern(),
                    " takes too long or too much memory on a text of ", text.size(), " bytes (",
                    message_of(code), "); use a simpler pattern or shorter documents");
    const PCRE2_SIZE* const places = pcre2_get_ovector_pointer(memory_->data.get());
    return Match{places[0], places[1]};
}

}  // namespace train_gpt
