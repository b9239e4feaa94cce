#include "training/config/json_mistake.h"

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

nlohmann::ordered_json random_value(int64_t depth) {
    using Json = nlohmann::ordered_json;
    switch (random_int(0, depth > 0 ? 6 : 4)) {
        case 0:
            return random_int(-1000, 1000);
        case 1:
            return static_cast<double>(random_int(-1000, 1000)) * 1e-7;
        case 2:
            return random_int(0, 1) == 1;
        case 3:
            return nullptr;
        case 4:
            return "a # ; -- // 'text', with \"{[\" and }] in it " +
                   std::to_string(random_int(0, 9));
        case 5: {
            Json array = Json::array();
            for (int64_t n = random_int(0, 3); n > 0; --n) array.push_back(random_value(depth - 1));
            return array;
        }
        default: {
            Json object = Json::object();
            for (int64_t n = random_int(0, 3); n > 0; --n)
                object["key " + std::to_string(n)] = random_value(depth - 1);
            return object;
        }
    }
}

/// The lines of an object of random values, indented.
std::vector<std::string> random_lines() {
    nlohmann::ordered_json object = {{"first", 1}};
    for (int64_t n = random_int(1, 5); n > 0; --n)
        object["name " + std::to_string(n)] = random_value(3);
    std::vector<std::string> lines{""};
    for (const char c : object.dump(4))
        if (c == '\n')
            lines.emplace_back();
        else
            lines.back() += c;
    return lines;
}

std::string joined_lines(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    return text;
}

size_t random_line(const std::vector<std::string>& lines, size_t first = 0) {
    return static_cast<size_t>(
        random_int(static_cast<int64_t>(first), static_cast<int64_t>(lines.size()) - 1));
}

}  // namespace

TEST_CASE("no mistake is found in valid JSON, also with the comments that are tolerated",
          "[config]") {
    for (int i = 0; i < 100; ++i) {
        std::vector<std::string> lines = random_lines();
        CAPTURE(joined_lines(lines));
        CHECK(find_json_mistake(joined_lines(lines)).empty());
        lines[random_line(lines)] += random_int(0, 1) ? " // it's a # comment," : " /* , } */";
        CHECK(find_json_mistake(joined_lines(lines)).empty());
    }
}

TEST_CASE("a comment that JSON does not have is named with its line", "[config]") {
    for (int i = 0; i < 100; ++i) {
        std::vector<std::string> lines = random_lines();
        const size_t line = random_line(lines);
        const std::vector<std::string> marks{"#", ";", "--"};
        const std::string mark = marks[static_cast<size_t>(random_int(0, 2))];
        lines[line] += " " + mark + " my note";
        const std::string mistake = find_json_mistake(joined_lines(lines));
        CAPTURE(joined_lines(lines), mistake);
        CHECK(mistake.starts_with(
            concat("line ", line + 1, ", column ", lines[line].size() - mark.size() - 7, ": ")));
        CHECK(contains(mistake, concat("\"", mark, "\" begins a comment")));
    }
}

TEST_CASE("a comma after the last entry is named with its line", "[config]") {
    for (int i = 0; i < 100; ++i) {
        std::vector<std::string> lines = random_lines();
        size_t closing = random_line(lines, 2);  // of a bracket that has an entry before it
        while (lines[closing].find_first_of("}]") != lines[closing].find_first_not_of(' '))
            closing = random_line(lines, 2);
        lines[closing - 1] += ",";
        const std::string mistake = find_json_mistake(joined_lines(lines));
        CAPTURE(joined_lines(lines), mistake);
        CHECK(mistake.starts_with(concat("line ", closing + 1, ", column ")));
        CHECK(contains(mistake, concat("the comma on line ", closing, " stands before")));
    }
}

TEST_CASE("other mistakes that people make in JSON are named", "[config]") {
    for (const auto& [text, mistake] : std::vector<std::pair<std::string, std::string>>{
             {"{\"a\": 1\n\"b\": 2}", "line 2, column 1: a comma or \":\" is missing"},
             {"{\"a\" 1}", "line 1, column 6: a comma or \":\" is missing"},
             {"{\"a\": 1,, \"b\": 2}", "line 1, column 9: there are two commas"},
             {"{'a': 1}", "line 1, column 2: ' is not a quotation mark of JSON"},
             {"{a: 1}", "line 1, column 2: \"a\" is not JSON; keys stand in quotation marks"},
             {"{\"a\": True}", "line 1, column 7: \"True\" is not JSON; write true"},
             {"{\"a\": None}", "line 1, column 7: \"None\" is not JSON; write null"},
             {"{\"a\": NaN}", "line 1, column 7: \"NaN\" is not JSON; a value is"},
             {"{\"a\": cpu}", "line 1, column 7: \"cpu\" is not JSON; a value is"},
             {"{\"a\" = 1}", "line 1, column 6: \"=\" is not JSON"},
             {"{\"a\": \"b\n}", "line 1, column 7: the text that begins here is not closed"},
             {"{\"a\": 1 /* b\n}", "line 1, column 9: this comment is not closed"},
             {"{\n\"a\": [1\n", "line 3, column 1: the \"[\" of line 2 is not closed"},
             {"{\"a\": [1}", "line 1, column 9: \"}\" closes nothing"},
             {"{\"a\": 1}}", "line 1, column 9: \"}\" closes nothing"},
             {"{\"a\": 1} {", "line 1, column 10: there is more text after the end"}}) {
        CAPTURE(text, find_json_mistake(text));
        CHECK(find_json_mistake(text).starts_with(mistake));
    }
}
