#include "training/config/json_mistake.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/error.h"

namespace train_gpt {

namespace {

constexpr const char* no_comments =
    ", and JSON has no comments; remove it (// and /* */ are tolerated)";

/// Goes through a text and stops at the first mistake.
class Scanner {
  public:
    explicit Scanner(std::string_view text) : text_(text) {}

    std::string scan() {
        while (mistake_.empty() && skip_to_token()) token();
        if (mistake_.empty() && !open_.empty())
            found(text_.size(), concat("the \"", text_[open_.back()], "\" of line ",
                                       line_of(open_.back()), " is not closed; \"",
                                       text_[open_.back()] == '{' ? '}' : ']', "\" is missing"));
        return mistake_;
    }

  private:
    void found(size_t at, const std::string& what) {
        const size_t newline = text_.substr(0, at).rfind('\n');
        mistake_ = concat("line ", line_of(at), ", column ",
                          at + 1 - (newline == text_.npos ? 0 : newline + 1), ": ", what);
    }

    int64_t line_of(size_t at) const {
        return 1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    }

    size_t end_of_line(size_t at) const { return std::min(text_.find('\n', at), text_.size()); }

    /// Skips space and the comments that are tolerated. False at the end, or at a comment that is
    /// not closed.
    bool skip_to_token() {
        for (; at_ < text_.size(); ++at_) {
            if (text_.substr(at_).starts_with("//")) {
                at_ = end_of_line(at_) - 1;
            } else if (text_.substr(at_).starts_with("/*")) {
                const size_t end = text_.find("*/", at_ + 2);
                if (end == text_.npos) {
                    found(at_, "this comment is not closed with */");
                    return false;
                }
                at_ = end + 1;
            } else if (!std::isspace(static_cast<unsigned char>(text_[at_]))) {
                return true;
            }
        }
        return false;
    }

    void token() {
        const char c = text_[at_];
        const bool begins_value = c == '"' || c == '{' || c == '[' || c == '-' || is_word(c);
        if (text_.substr(at_).starts_with("--") || c == '#' || c == ';')
            return found(at_, concat("\"", text_.substr(at_, c == '-' ? 2 : 1),
                                     "\" begins a comment", no_comments));
        if (begins_value && after_value_)
            return found(at_, open_.empty() ? "there is more text after the end of the object"
                                            : "a comma or \":\" is missing before this");
        if ((c == '}' || c == ']') && comma_ != text_.npos)
            return found(at_, concat("the comma on line ", line_of(comma_), " stands before \"", c,
                                     "\", and JSON has no comma after the last entry; remove it"));
        if (c == ',' && comma_ != text_.npos)
            return found(at_, "there are two commas in a row; remove one");
        comma_ = text_.npos;
        after_value_ = begins_value && c != '{' && c != '[';
        if (c == '"') return string();
        if (c == '\'' || c == '`')
            return found(at_, concat(c, " is not a quotation mark of JSON; write \""));
        if (c == '-' || is_word(c)) return word();
        if (c == '=')
            return found(at_, "\"=\" is not JSON; write \":\" between a key and its value");
        if (c == '{' || c == '[') open_.push_back(at_);
        if (c == '}' || c == ']') {
            if (open_.empty() || (text_[open_.back()] == '{') != (c == '}'))
                return found(at_, concat("\"", c, "\" closes nothing that is open"));
            open_.pop_back();
            after_value_ = true;
        }
        if (c == ',') comma_ = at_;
        ++at_;
    }

    void string() {
        const size_t begin = at_;
        for (++at_; at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\n'; ++at_)
            if (text_[at_] == '\\') ++at_;
        if (at_ >= text_.size() || text_[at_] == '\n')
            return found(begin, "the text that begins here is not closed with \" on its line");
        ++at_;
    }

    static bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

    /// A number, true, false or null, or what is none of these.
    void word() {
        const size_t begin = at_;
        while (at_ < text_.size() &&
               (is_word(text_[at_]) || text_[at_] == '.' || text_[at_] == '-' || text_[at_] == '+'))
            ++at_;
        const std::string_view word = text_.substr(begin, at_ - begin);
        if (word == "true" || word == "false" || word == "null") return;
        if (std::isdigit(static_cast<unsigned char>(word.back())) && word.find('_') == word.npos &&
            !std::isalpha(static_cast<unsigned char>(word.front())))
            return;
        skip_to_token();
        const bool is_key = at_ < text_.size() && text_[at_] == ':';
        const char* truth = word == "True"    ? "true"
                            : word == "False" ? "false"
                            : word == "None"  ? "null"
                                              : nullptr;
        found(begin, concat("\"", word, "\" is not JSON; ",
                            is_key  ? "keys stand in quotation marks"
                            : truth ? concat("write ", truth)
                                    : "a value is a number, true, false, null, or a text in "
                                      "quotation marks"));
    }

    std::string_view text_;
    size_t at_ = 0, comma_ = std::string_view::npos;  // the comma just before this place
    bool after_value_ = false;
    std::vector<size_t> open_;  // the places of { and [ that are not closed yet
    std::string mistake_;
};

}  // namespace

std::string find_json_mistake(std::string_view text) { return Scanner(text).scan(); }

}  // namespace train_gpt
