#include "tokenizer/regex_translation.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "tokenizer/regex_characters.h"
#include "tokenizer/unicode.h"

namespace train_gpt {

namespace {

/// A part of a translated pattern: text, or a character of a set.
struct Part {
    static constexpr size_t no_set = static_cast<size_t>(-1);
    std::string text;
    size_t set;
};

/// The sets that a pattern uses, and the symbols of their characters.
class Alphabet {
  public:
    /// The number of a set.
    size_t add(CodePoints set) {
        return numbers_.try_emplace(std::move(set), numbers_.size()).first->second;
    }

    /// Gives every code point its symbol; no set may be added later. A line feed is itself, because
    /// PCRE2 looks for it where lines begin and end.
    std::vector<uint8_t> assign_symbols() {
        const size_t line_feed = add({'\n', '\n'});
        std::vector<std::pair<char32_t, size_t>> edges;  // of which set
        for (const auto& [set, number] : numbers_)
            for (const char32_t edge : set.edges()) edges.emplace_back(edge, number);
        edges.emplace_back(CodePoints::limit, line_feed);
        std::ranges::sort(edges);

        members_.resize(numbers_.size());
        std::vector<uint8_t> symbols(CodePoints::limit);
        std::map<std::vector<bool>, uint8_t> symbol_of;  // by which sets hold the character
        std::vector<bool> holders(numbers_.size());
        size_t unused = 0;
        char32_t at = 0;
        for (const auto& [edge, number] : edges) {
            if (edge > at) {
                const auto [found, is_new] = symbol_of.try_emplace(holders, uint8_t{'\n'});
                if (is_new && !holders[line_feed]) {
                    if (unused == '\n') ++unused;
                    if (unused > 255)
                        throw refuse_in_pattern("it tells more than 256 kinds of characters apart");
                    found->second = static_cast<uint8_t>(unused++);
                }
                for (size_t set = 0; is_new && set < holders.size(); ++set)
                    if (holders[set]) members_[set].push_back(found->second);
                std::fill(symbols.begin() + at, symbols.begin() + edge, found->second);
                at = edge;
            }
            holders[number] = !holders[number];
        }
        return symbols;
    }

    /// A set as PCRE2 writes it.
    std::string written(size_t set) const {
        std::string text;
        for (const uint8_t symbol : members_[set]) {
            constexpr std::string_view digits = "0123456789abcdef";
            text += concat("\\x", digits[symbol / 16], digits[symbol % 16]);
        }
        if (text.empty()) text = "^\\x00-\\xff";
        return members_[set].size() == 1 ? text : "[" + text + "]";
    }

  private:
    std::map<CodePoints, size_t> numbers_;
    std::vector<std::vector<uint8_t>> members_;  // the symbols of each set
};

class Translator {
  public:
    explicit Translator(std::string_view pattern) : in_{pattern} {}

    RegexTranslation translate() {
        while (!in_.at_end()) step();
        close_options();
        RegexTranslation result;
        result.symbols = alphabet_.assign_symbols();
        for (const Part& part : parts_)
            result.pattern += part.set == Part::no_set ? part.text : alphabet_.written(part.set);
        return result;
    }

  private:
    static constexpr size_t none = static_cast<size_t>(-1);

    /// What holds until a group ends.
    struct State {
        bool any_case = false;  // (?i)
        bool dot_all = false;   // (?m)
        bool behind = false;    // in a lookbehind
        int options = 0;        // how many (?i) without a group of their own have begun
    };
    struct Group {
        size_t begin;  // in parts_
        State outside;
    };

    void step() {
        const char c = in_.next();
        if (c == '[') {
            const PatternSet set = read_set(in_);
            atom(set.members, set.negated);
        } else if (c == '(') {
            open();
        } else if (c == ')') {
            close();
        } else if (c == '*' || c == '+' || c == '?') {
            require_atom();
            copy(1);
            if (in_.next() == '?' || in_.next() == '+') copy(1);
        } else if (c == '{' && repetition_end() != none) {
            repetition();
        } else if (c == '|') {
            copy(1);
            atom_ = none;
        } else if (c == '^' || c == '$') {
            begin_atom();
            copy(1);
        } else if (c == '.') {
            ++in_.at;
            write_set(state_.dot_all ? CodePoints() : CodePoints('\n', '\n'), true);
        } else if (c != '\\' || !escape()) {
            literals();
        }
    }

    void write(std::string text) { parts_.push_back({std::move(text), Part::no_set}); }
    void copy(size_t length) {
        write(std::string(in_.pattern.substr(in_.at, length)));
        in_.at += length;
    }
    void begin_atom() { atom_ = parts_.size(); }
    void require_atom() const {
        if (atom_ == none) throw Error("it repeats nothing at byte ", in_.at + 1);
    }
    void append_set(const CodePoints& set) { parts_.push_back({"", alphabet_.add(set)}); }
    void write_set(const CodePoints& set, bool negated) {
        begin_atom();
        append_set(negated ? set.complement() : set);
    }

    void open() {
        begin_group();
        ++in_.at;
        if (in_.next() != '?') return write("(?:");
        const char kind = in_.next(1), third = in_.next(2);
        const bool behind = kind == '<' && (third == '=' || third == '!');
        if (behind) state_.behind = true;
        if (behind) return write_opening(3);
        if (kind == ':' || kind == '=' || kind == '!' || kind == '>') return write_opening(2);
        if (kind == '<' || kind == '\'') {  // a name, which nothing can refer to
            const size_t end = in_.pattern.find(kind == '<' ? '>' : '\'', in_.at + 2);
            if (end == std::string_view::npos) throw Error("it has a group with an endless name");
            in_.at = end + 1;
            return write("(?:");
        }
        if (kind == '#') return comment();
        ++in_.at;
        options();
    }

    void begin_group() {
        groups_.push_back({parts_.size(), state_});
        state_.options = 0;
        group_atom_ = std::exchange(atom_, none);
    }
    void write_opening(size_t length) {
        write("(");
        copy(length);
    }

    /// A comment is no group: what precedes it can still be repeated.
    void comment() {
        state_ = groups_.back().outside;
        groups_.pop_back();
        atom_ = group_atom_;
        while (!in_.at_end() && in_.next() != ')') in_.at += in_.next() == '\\' ? 2 : 1;
        ++in_.at;
    }

    /// (?i-m:…), or (?i-m) for the rest of the enclosing group, alternatives included.
    void options() {
        bool on = true;
        for (; std::string_view("im-").find(in_.next()) != none; ++in_.at) {
            if (in_.next() == '-')
                on = false;
            else
                (in_.next() == 'i' ? state_.any_case : state_.dot_all) = on;
        }
        write("(?:");
        const char end = in_.next();
        if (end != ':' && end != ')') throw refuse_in_pattern(concat("it has a group (?", end));
        ++in_.at;
        if (end == ':') return;
        state_.options = groups_.back().outside.options + 1;
        groups_.pop_back();
    }

    void close_options() {
        for (; state_.options > 0; --state_.options) write(")");
    }
    void close() {
        if (groups_.empty()) throw Error("it has a ) without a (");
        close_options();
        atom_ = groups_.back().begin;
        state_ = groups_.back().outside;
        groups_.pop_back();
        copy(1);
    }

    /// Where {n}, {n,}, {,m} or {n,m} ends; any other brace is a character.
    size_t repetition_end() const {
        const size_t end = in_.pattern.find('}', in_.at);
        if (end == std::string_view::npos) return none;
        const std::string_view inside = in_.pattern.substr(in_.at + 1, end - in_.at - 1);
        const bool counts =
            std::ranges::all_of(inside, [](char c) { return is_decimal_digit(c) || c == ','; });
        return counts && std::ranges::count(inside, ',') <= 1 && inside != "," && !inside.empty()
                   ? end
                   : none;
    }
    /// X{n,m}+ repeats X{n,m}, and X{n}? is X{n} or nothing.
    void repetition() {
        require_atom();
        const size_t end = repetition_end();
        const std::string_view counts = in_.pattern.substr(in_.at, end + 1 - in_.at);
        const bool comma = counts.find(',') != none;
        in_.at = end + 1;
        std::string text(counts);
        if (text[1] == ',') text.insert(1, "0");
        const bool again = in_.next() == '+' || (in_.next() == '?' && !comma);
        if (again)
            parts_.insert(parts_.begin() + static_cast<std::ptrdiff_t>(atom_),
                          {"(?:", Part::no_set});
        write(text + (again ? ")" : ""));
        if (again || in_.next() == '?') copy(1);
    }

    /// Whether what is next repeats what precedes it.
    bool repeats() const {
        const char c = in_.next();
        return c == '*' || c == '+' || c == '?' || (c == '{' && repetition_end() != none);
    }

    /// What an escape stands for, unless it is a character.
    bool escape() {
        if (const auto set = read_class(in_, false)) {
            write_set(*set, false);
            return true;
        }
        const char c = in_.next(1);
        if (c >= '1' && c <= '9')
            throw refuse_in_pattern(concat("it refers back to a group (\\", c, ")"));
        if (c == '\0' || std::string_view("AzZKRNObB").find(c) == none) return false;
        if (c == 'A' || c == 'z' || c == 'Z' || c == 'K') {
            begin_atom();
            copy(2);
            return true;
        }
        in_.at += 2;
        if (c == 'N' || c == 'O')
            write_set(c == 'N' ? CodePoints('\n', '\n') : CodePoints(), true);
        else if (c == 'R')
            line_end();
        else
            word_boundary(c == 'b');
        return true;
    }

    /// \R
    void line_end() {
        CodePoints single('\n', '\r');
        single.add({0x85, 0x85});
        single.add({0x2028, 0x2029});
        begin_atom();
        write("(?>");
        append_set({'\r', '\r'});
        append_set({'\n', '\n'});
        write("|");
        append_set(single);
        write(")");
    }

    /// \b or \B
    void word_boundary(bool at_boundary) {
        const CodePoints& word = word_characters();
        const auto look = [&](const char* how) {
            write(how);
            append_set(word);
            write(")");
        };
        begin_atom();
        write("(?:");
        look("(?<=");
        look(at_boundary ? "(?!" : "(?=");
        write("|");
        look("(?<!");
        look(at_boundary ? "(?=" : "(?!");
        write(")");
    }

    /// A set in which letter case may not count.
    void atom(const CodePoints& members, bool negated) {
        if (!state_.any_case) return write_set(members, negated);
        const CodePoints all = with_other_case(members);
        std::set<std::u32string_view> folds;
        for (const LongFold& fold : unicode_long_folds())
            if (!negated && !state_.behind && members.contains(fold.from))
                folds.insert(fold.letters());
        if (folds.empty()) return write_set(all, negated);
        begin_atom();
        write("(?:");
        append_set(all);
        for (const std::u32string_view letters : folds) append_letters(letters, "|");
        write(")");
    }

    void append_letters(std::u32string_view letters, const char* before) {
        write(before);
        for (const char32_t letter : letters) append_set(with_other_case({letter, letter}));
    }

    /// Characters that stand for themselves. Where letter case does not count, several together
    /// may stand for one.
    void literals() {
        std::vector<char32_t> letters;
        for (;;) {
            const size_t begin = in_.at;
            letters.push_back(read_character(in_, false));
            if (letters.size() > 1 && repeats()) {
                in_.at = begin;
                letters.pop_back();
                break;
            }
            if (!state_.any_case || in_.at_end() || repeats() || !is_literal_next()) break;
        }
        for (std::span<const char32_t> rest = letters; !rest.empty();)
            rest = rest.subspan(literal(rest));
    }

    bool is_literal_next() const {
        const char c = in_.next();
        if (c == '\\') {
            const char kind = in_.next(1);
            return std::string_view("pPwWdDsShHAzZKRNObB123456789").find(kind) == none;
        }
        return std::string_view("[()|^$.*+?").find(c) == none;
    }

    /// Writes the first character, or those that may stand for one; returns how many.
    size_t literal(std::span<const char32_t> letters) {
        begin_atom();
        const CodePoints first(letters[0], letters[0]);
        if (!state_.any_case) return append_set(first), 1;
        const LongFold* longest = nullptr;
        size_t length = 1;
        for (const LongFold& fold : unicode_long_folds()) {
            const auto to = fold.letters();
            const bool begins =
                to.size() <= letters.size() && to.size() > length &&
                std::ranges::equal(to, letters.first(to.size()), {}, without_case, without_case);
            if (!begins && (longest || fold.from != letters[0])) continue;
            longest = &fold;
            length = begins ? to.size() : 1;
        }
        if (!longest || state_.behind) return append_set(with_other_case(first)), 1;
        CodePoints singles;
        for (const LongFold& fold : unicode_long_folds())
            if (std::ranges::equal(fold.letters(), longest->letters()))
                singles.add({fold.from, fold.from});
        write("(?:");
        append_letters(longest->letters(), "");
        write("|");
        append_set(singles);
        write(")");
        return length;
    }

    PatternCursor in_;
    std::vector<Part> parts_;
    Alphabet alphabet_;
    size_t atom_ = none;        // where in parts_ the last character, set or group begins
    size_t group_atom_ = none;  // what it was before the last group
    State state_;
    std::vector<Group> groups_;
};

}  // namespace

RegexTranslation translate_regex(std::string_view pattern) {
    return Translator(pattern).translate();
}

}  // namespace train_gpt
