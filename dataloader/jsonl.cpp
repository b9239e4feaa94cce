#include "dataloader/jsonl.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace train_gpt {

namespace {

using Json = nlohmann::json;

/// Extracts one field of an object while it is parsed; keeps nothing else.
class FieldReader {
  public:
    FieldReader(const std::string& field, std::string& text, bool may_be_string)
        : field_(field), text_(text), may_be_string_(may_be_string) {}

    enum class Found { nothing, other, text };
    Found found = Found::nothing;
    bool is_object = false, is_string = false, has_huge_number = false;
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
        other();
        if (depth_++ == 0) is_object = true;
        return true;
    }
    bool start_array(size_t) {
        other();
        ++depth_;
        return true;
    }
    bool end_object() { return --depth_, true; }
    bool end_array() { return --depth_, true; }
    bool key(std::string& name) {
        key_matches_ = depth_ == 1 && is_object && name == field_;
        return true;
    }
    bool parse_error(size_t position, const std::string&,
                     const nlohmann::detail::exception& error) {
        constexpr int number_overflow = 406;
        has_huge_number = error.id == number_overflow;
        error_at = position;
        return false;
    }

  private:
    bool wanted() const { return depth_ == 1 && is_object && key_matches_; }
    bool other() {
        if (wanted()) found = Found::other;
        return true;
    }

    const std::string& field_;
    std::string& text_;
    const bool may_be_string_;
    int64_t depth_ = 0;
    bool key_matches_ = false;
};

}  // namespace

bool is_blank(std::string_view line) {
    return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

std::string read_field(std::string_view line, const std::string& field, std::string& text,
                       size_t& column, bool may_be_string) {
    // The parser takes a NUL for the end and ignores what follows.
    if (const size_t nul = line.find('\0'); nul != line.npos) {
        column = nul + 1;
        return "is not valid JSON";
    }
    FieldReader reader(field, text, may_be_string);
    const bool valid = Json::sax_parse(line.data(), line.data() + line.size(), &reader);
    column = reader.error_at;
    if (reader.has_huge_number) return "has a number that no 64-bit float can hold";
    if (!valid) return "is not valid JSON";
    if (reader.is_string) return "";
    if (!reader.is_object) return "is not a JSON object";
    if (reader.found == FieldReader::Found::nothing) return concat("has no field \"", field, "\"");
    if (reader.found == FieldReader::Found::other)
        return concat("has no string in the field \"", field, "\"");
    return "";
}

}  // namespace train_gpt
