#include "dataloader/jsonl.h"

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"
#include "base/utf8.h"
#include "dataloader/json_array.h"

namespace train_gpt {

namespace {

/// Extracts one field of an object while it is parsed; keeps nothing else.
class FieldReader {
  public:
    FieldReader(const std::string& field, std::string& text, bool may_be_string)
        : field_(field), text_(text), may_be_string_(may_be_string) {}

    enum class Found { nothing, other, text };
    Found found = Found::nothing;
    bool is_valid = false, is_complete = false, is_too_deep = false;
    bool is_object = false, has_fields = false, is_string = false;
    size_t error_at = 0;

    bool null() { return other(); }
    bool boolean(bool) { return other(); }
    bool number_integer(Json::number_integer_t) { return other(); }
    bool number_unsigned(Json::number_unsigned_t) { return other(); }
    bool number_float(Json::number_float_t, const std::string&) { return other(); }
    bool binary(Json::binary_t&) { return other(); }
    bool string(std::string& value) {
        is_string = may_be_string_ && depth_ == 0;
        if (is_string || wanted()) {
            found = Found::text;
            text_ = std::move(value);
        }
        return true;
    }
    bool start_object(size_t) {
        if (depth_ == 0) is_object = true;
        return start();
    }
    bool start_array(size_t) { return start(); }
    bool end_object() { return end(); }
    bool end_array() { return end(); }
    bool key(std::string& name) {
        has_fields = true;
        key_matches_ = depth_ == 1 && is_object && name == field_;
        return true;
    }
    bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) {
        error_at = position;
        return false;
    }

  private:
    bool wanted() const { return depth_ == 1 && is_object && key_matches_; }
    bool other() {
        if (wanted()) found = Found::other;
        return true;
    }
    bool start() {
        other();
        is_too_deep = ++depth_ > max_json_depth;
        return !is_too_deep;
    }
    bool end() {
        is_complete = --depth_ == 0;
        return true;
    }

    const std::string& field_;
    std::string& text_;
    const bool may_be_string_;
    int depth_ = 0;
    bool key_matches_ = false;
};

/// Lists the fields of an object while it is parsed.
class FieldLister {
  public:
    std::string listed() const {
        if (names_.empty()) return "it has no fields";
        std::string all = "its fields are ";
        for (size_t i = 0; i < names_.size(); ++i) all += (i > 0 ? ", " : "") + names_[i];
        return left_ > 0 ? concat(all, " and ", left_, " more") : all;
    }

    bool null() { return true; }
    bool boolean(bool) { return true; }
    bool number_integer(Json::number_integer_t) { return true; }
    bool number_unsigned(Json::number_unsigned_t) { return true; }
    bool number_float(Json::number_float_t, const std::string&) { return true; }
    bool binary(Json::binary_t&) { return true; }
    bool string(std::string&) {
        if (depth_ == 1 && is_listed_) names_.back() += " (text)";
        return true;
    }
    bool start_object(size_t) { return ++depth_; }
    bool start_array(size_t) { return ++depth_; }
    bool end_object() { return --depth_, true; }
    bool end_array() { return --depth_, true; }
    bool key(std::string& name) {
        constexpr size_t most_names = 20, longest = 60;
        if (depth_ != 1) return true;
        is_listed_ = names_.size() < most_names;
        if (is_listed_)
            names_.push_back(
                concat('"', name.substr(0, longest), name.size() > longest ? "…\"" : "\""));
        else
            ++left_;
        return true;
    }
    bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) {
        return false;
    }

  private:
    int depth_ = 0;
    bool is_listed_ = false;
    std::vector<std::string> names_;
    int64_t left_ = 0;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Whether a word is a number in JSON's grammar.
bool is_number(std::string_view word) {
    const auto digits = [&] {
        const size_t n = std::min(word.find_first_not_of("0123456789"), word.size());
        word.remove_prefix(n);
        return n > 0;
    };
    if (word.starts_with('-')) word.remove_prefix(1);
    if (word.starts_with('0'))
        word.remove_prefix(1);
    else if (!digits())
        return false;
    if (word.starts_with('.') && (word.remove_prefix(1), !digits())) return false;
    if (word.starts_with('e') || word.starts_with('E')) {
        word.remove_prefix(1);
        if (word.starts_with('+') || word.starts_with('-')) word.remove_prefix(1);
        if (!digits()) return false;
    }
    return word.empty();
}

/// The UTF-16 unit that is escaped at text[at], as "\ud83d"; -1 if there is none.
int escaped_unit(std::string_view text, size_t at) {
    if (text.substr(at, 2) != "\\u" || text.size() < at + 6) return -1;
    int unit = 0;
    for (const char c : text.substr(at + 2, 4)) {
        const int digit = is_digit(c)              ? c - '0'
                          : (c >= 'a' && c <= 'f') ? c - 'a' + 10
                          : (c >= 'A' && c <= 'F') ? c - 'A' + 10
                                                   : -1;
        if (digit < 0) return -1;
        unit = unit * 16 + digit;
    }
    return unit;
}

/// Replaces the escape at text[at], in a string, if it is a surrogate without its other half.
/// Returns its length.
size_t mend_escape(std::string& text, size_t at) {
    const int unit = escaped_unit(text, at);
    if (unit < 0) return 2;
    if (unit < 0xD800 || unit > 0xDFFF) return 6;
    const int next = escaped_unit(text, at + 6);
    if (unit < 0xDC00 && next >= 0xDC00 && next <= 0xDFFF) return 12;
    text.replace(at, 6, "\\ufffd");
    return 6;
}

/// The line with what Python's json writes beyond JSON replaced by JSON of the same length, so that
/// columns stay. Only the kinds of values matter: every number becomes 0.
std::string as_strict_json(std::string_view line) {
    std::string text(line);
    bool in_string = false;
    for (size_t at = 0; at < text.size();) {
        if (in_string && text[at] == '\\') {
            at += mend_escape(text, at);
        } else if (in_string || text[at] == '"') {
            in_string ^= text[at++] == '"';
        } else {
            const size_t end = std::min(text.find_first_of(" \t\r\n,:[]{}\"", at), text.size());
            const std::string_view word = std::string_view(text).substr(at, end - at);
            if (word == "NaN" || word == "Infinity" || word == "-Infinity" || is_number(word))
                text.replace(at, end - at, "0" + std::string(end - at - 1, ' '));
            at = std::max(end, at + 1);
        }
    }
    return text;
}

/// Reads a line; if it is not valid JSON, its strict form.
FieldReader parse(std::string_view line, const std::string& field, std::string& text,
                  bool may_be_string) {
    const auto read = [&](std::string_view json) {
        FieldReader reader(field, text, may_be_string);
        reader.is_valid = Json::sax_parse(json.data(), json.data() + json.size(), &reader);
        return reader;
    };
    FieldReader reader = read(line);
    if (reader.is_valid || reader.is_too_deep) return reader;
    return read(as_strict_json(line));
}

/// The fields of the object in a line, for a message.
std::string fields_of(std::string_view line) {
    const std::string strict = as_strict_json(line);
    FieldLister lister;
    Json::sax_parse(strict.begin(), strict.end(), &lister);
    return lister.listed();
}

/// Why a line is not JSON, where the parser stopped after reading `position` bytes.
LineFault invalid(std::string_view line, size_t position, bool is_complete) {
    LineFault fault{"is not valid JSON", "", position};
    const size_t at = std::min(position > 0 ? position - 1 : 0, line.size());
    if (const size_t bad = find_not_utf8(line); bad <= at && bad < line.size()) {
        char byte[8];
        std::snprintf(byte, sizeof byte, "0x%02X", static_cast<unsigned char>(line[bad]));
        fault.detail = concat("the byte ", byte, " is not UTF-8");
        fault.column = bad + 1;
    } else if (at >= line.size()) {
        fault.detail = "it ends too early";
    } else if (const char c = line[at]; c == '\0') {
        fault.detail = "it has a NUL byte";
    } else if (static_cast<unsigned char>(c) < 0x20) {
        fault.detail =
            "a string has a line break or another control character, which must be escaped";
    } else {
        size_t end = std::min(line.size(), at + 20);
        while (end < line.size() && (line[end] & 0xC0) == 0x80) ++end;
        fault.detail = concat(is_complete ? "more follows its end: " : "unexpected ",
                              line.substr(at, end - at), end < line.size() ? "…" : "");
        if (c == '\'') fault.detail += " (write \" for ', as Python's json.dumps does)";
    }
    return fault;
}

std::string_view without_line_end(std::string_view line) {
    while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.remove_suffix(1);
    return line;
}

}  // namespace

bool is_blank(std::string_view line) {
    return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

LineFault read_field(std::string_view line, const std::string& field, std::string& text,
                     bool may_be_string) {
    line = without_line_end(line);
    // The parser takes a NUL for the end and ignores what follows.
    if (const size_t nul = line.find('\0'); nul != line.npos) return invalid(line, nul + 1, false);
    const FieldReader reader = parse(line, field, text, may_be_string);
    if (reader.is_too_deep)
        return {concat("is nested more than ", max_json_depth, " levels deep"), "", 0};
    if (!reader.is_valid) return invalid(line, reader.error_at, reader.is_complete);
    if (reader.is_string) return {};
    if (!reader.is_object) return {"is not a JSON object", "", 0};
    if (reader.found == FieldReader::Found::nothing)
        return {concat("has no field \"", field, "\""), fields_of(line), 0};
    if (reader.found == FieldReader::Found::other)
        return {concat("has no string in the field \"", field, "\""), "", 0};
    return {};
}

FirstObject find_first_object(std::string_view beginning, bool complete, const std::string& field) {
    const auto skip_blanks = [](std::string_view text) {
        return text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    };
    FirstObject first;
    std::string_view text = skip_blanks(without_byte_order_mark(beginning));
    first.in_array = text.starts_with('[');
    if (first.in_array) text = skip_blanks(text.substr(1));
    constexpr size_t longest_token = 12;  // that may be cut: "\ud83d\ude00"
    constexpr int most_tried = 10;        // lines: the first ones may be damaged or empty objects
    for (int tried = 0; tried < most_tried && text.starts_with('{'); ++tried) {
        const size_t end = first.in_array ? end_of_element(text) : text.find('\n');
        const bool has_end = end != text.npos || complete;
        const std::string_view object = text.substr(0, end);
        std::string value;
        const FieldReader reader = parse(object, field, value, false);
        if (!reader.is_valid && !has_end && reader.error_at + longest_token > object.size()) {
            first.found = FirstObject::Found::incomplete;
            return first;
        }
        if (reader.is_valid && reader.has_fields) {
            first.found = FirstObject::Found::object;
            first.has_text = reader.found == FieldReader::Found::text;
            first.fields = fields_of(object);
            return first;
        }
        if (first.in_array || end == text.npos) return first;
        text = skip_blanks(text.substr(end));
    }
    return first;
}

}  // namespace train_gpt
