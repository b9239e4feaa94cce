// Lines of JSON: what Python writes beyond the standard, and what is wrong with a line.
#include "dataloader/jsonl.h"

#include "base/json_text.h"
#include "dataloader/json_array.h"
#include "test/dataloader/corpus.h"

using namespace train_gpt;
using namespace std::string_literals;

namespace {

void append_utf8(std::string& text, uint32_t c) {
    if (c < 0x80)
        text += static_cast<char>(c);
    else if (c < 0x800)
        text += {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
    else if (c < 0x10000)
        text += {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 0x3F)),
                 static_cast<char>(0x80 | (c & 0x3F))};
    else
        text += {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 0x3F)),
                 static_cast<char>(0x80 | (c >> 6 & 0x3F)), static_cast<char>(0x80 | (c & 0x3F))};
}

/// The text that read_field() finds; what is wrong if it finds none.
std::string text_of(const std::string& line, const std::string& field = "text") {
    std::string text = "(none)";
    const LineFault fault = read_field(line, field, text);
    return fault.reason.empty() ? text : concat(fault.reason, " (", fault.detail, ")");
}

}  // namespace

TEST_CASE("escaped surrogates are characters in pairs and U+FFFD alone, in keys and values") {
    for (int round = 0; round < 300; ++round) {
        // UTF-16 units, from which both the escapes and the text are made.
        std::vector<uint32_t> units;
        for (int64_t n = random_int(0, 12); n > 0; --n) switch (random_int(0, 3)) {
                case 0:
                    units.push_back(static_cast<uint32_t>(random_int(0xD800, 0xDBFF)));
                    break;
                case 1:
                    units.push_back(static_cast<uint32_t>(random_int(0xDC00, 0xDFFF)));
                    break;
                default:
                    units.push_back(static_cast<uint32_t>(
                        random_int(0, 1) ? random_int(0x20, 0x7E) : random_int(0, 0xD7FF)));
            }
        std::string escaped, expected;
        for (const uint32_t unit : units) {
            char escape[8];
            std::snprintf(escape, sizeof escape, random_int(0, 1) ? "\\u%04x" : "\\u%04X", unit);
            if (unit == '\\' || unit == '"')
                escaped += {'\\', static_cast<char>(unit)};
            else if (unit >= 0x20 && unit < 0x7F && random_int(0, 1))
                escaped += static_cast<char>(unit);
            else
                escaped += escape;
        }
        for (size_t i = 0; i < units.size(); ++i) {
            const bool high = units[i] >= 0xD800 && units[i] <= 0xDBFF;
            const bool pair =
                high && i + 1 < units.size() && units[i + 1] >= 0xDC00 && units[i + 1] <= 0xDFFF;
            if (pair) {
                append_utf8(expected,
                            0x10000 + ((units[i] - 0xD800) << 10) + (units[i + 1] - 0xDC00));
                ++i;
            } else {
                append_utf8(expected, units[i] >= 0xD800 && units[i] <= 0xDFFF ? 0xFFFD : units[i]);
            }
        }
        CAPTURE(escaped);
        CHECK(text_of("{\"text\": \"" + escaped + "\"}") == expected);
        CHECK(text_of("{\"" + escaped + "\": \"" + escaped + "\", \"text\": \"x\\\\ud83d\"}") ==
              "x\\ud83d");
        CHECK(text_of("{\"a\": [\"" + escaped + "\"], \"text\": \"kept\"}") == "kept");
    }
}

TEST_CASE("NaN, infinities and huge numbers in other fields do no harm") {
    for (const std::string value :
         {"NaN", "Infinity", "-Infinity", "1e999", "-1E+999", "123456789012345678901234567890",
          "[NaN, -Infinity]", "{\"text\": NaN}", "[1e400,NaN,{\"a\":Infinity}]"}) {
        CHECK(text_of("{\"score\": " + value + ", \"text\": \"NaN 1e999 kept\"}") ==
              "NaN 1e999 kept");
        CHECK(text_of("{\"text\":\"Infinity\",\"score\":" + value + "}") == "Infinity");
        CHECK(contains(text_of("{\"text\": " + value + "}"), "no string in the field \"text\""));
    }
    for (const std::string value :
         {"nan", "NAN", "Nan", "-NaN", "+1", "1NaN", "NaN1", "InfinityNaN", "-", "01", "1.", ".5",
          "1e", "--1", "inf", "None", "1e999x"})
        CHECK(contains(text_of("{\"score\": " + value + ", \"text\": \"x\"}"), "not valid JSON"));
}

TEST_CASE("a refused line says what is wrong with it, and at which byte") {
    const auto fault = [](const std::string& line) {
        std::string text;
        return read_field(line, "text", text);
    };
    struct Case {
        std::string line, detail;
        size_t column;
    };
    for (const Case& one : std::vector<Case>{
             {"{\"text\": \"x\"", "it ends too early", 13},
             {"{\"text\": \"open", "it ends too early", 15},
             {"{\"text\": \"open\r\n", "it ends too early", 15},
             {"{\"text\": \"x\"} {}", "more follows its end: {}", 15},
             {"{\"text\": \"caf\xE9 x\"}", "the byte 0xE9 is not UTF-8", 14},
             {"{\"text\": \"a\tb\"}", "control character", 12},
             {std::string("{\"text\": \"a\0b\"}", 15), "NUL", 12},
             {"{'text': 'a'}", "unexpected 'text': 'a'} (write \" for '", 2},
             {"{\"text\": \"x\",}", "unexpected }", 14},
             {"{\"score\": -Infinity, \"text\": nope}", "unexpected", 31},
             {"some text that is long and not JSON", "unexpected some text that is lo…", 1}}) {
        CAPTURE(one.line);
        const LineFault found = fault(one.line);
        CHECK(found.reason == "is not valid JSON");
        CHECK(contains(found.detail, one.detail));
        CHECK(found.column == one.column);
    }
    CHECK(fault("{\"body\": \"x\", \"n\": 1, \"a\": {\"b\": \"c\"}, \"t\": NaN}").detail ==
          "its fields are \"body\" (text), \"n\", \"a\", \"t\"");
    CHECK(fault("{}").detail == "it has no fields");
    std::string many = "{\"f\": 0";
    for (int i = 1; i < 100; ++i) many += concat(", \"f", i, "\": ", i);
    CHECK(fault(many + "}").detail.ends_with("\"f19\" and 80 more"));
    CHECK(fault("[1]").reason == "is not a JSON object");
}

TEST_CASE("a line of JSON may be nested up to a depth") {
    for (const auto& [open, close] : {std::pair{"[", "]"}, {"{\"text\": ", "}"}}) {
        for (const int levels : {max_json_depth - 1, max_json_depth, 20'000}) {
            std::string value = "1";
            for (int i = 0; i < levels; ++i) value = open + value;
            for (int i = 0; i < levels; ++i) value += close;
            const std::string found = text_of("{\"a\": " + value + ", \"text\": \"x\"}");
            CHECK(found ==
                  (levels < max_json_depth ? "x" : "is nested more than 1000 levels deep ()"));
        }
    }
}

TEST_CASE("objects at the beginning of a text are found, and nothing else is") {
    using Found = FirstObject::Found;
    const auto found = [](const std::string& text, bool complete = true) {
        return find_first_object(text, complete, "text");
    };
    for (const std::string object : {R"({"text": "x"})", R"({"n": NaN, "text": "\ud83d}{é"})"})
        for (const std::string before : {"", "\xEF\xBB\xBF", "\n \r\n"})
            for (const std::string& text : {object, object + "\nnot JSON", object + "\r\n",
                                            "[" + object + "]", "[\n  " + object + ",\n 5"}) {
                CAPTURE(before, text);
                CHECK(found(before + text).found == Found::object);
                CHECK(found(before + text).has_text);
                CHECK(found(before + text).in_array == text.starts_with('['));
                // However much is known of it, it may be an object.
                const size_t brace = text.find('{'), end = brace + object.size();
                const auto known = static_cast<size_t>(random_int(
                    std::ssize(text.substr(0, brace)) + 1, static_cast<int64_t>(end) - 1));
                CHECK(found(before + text.substr(0, known), false).found == Found::incomplete);
                CHECK(found(before + text.substr(0, known)).found == Found::nothing);
            }
    for (const std::string first : {"{}", "{\"text\": \"a\" \"b\"}", "{\n{}\n\n{"}) {
        CAPTURE(first);
        CHECK(found(first + "\n{\"text\": \"x\"}\n").found == Found::object);
        CHECK(found(first + "\n{\"text\": ", false).found == Found::incomplete);
        CHECK(found(first + "\nwords\n{\"text\": \"x\"}\n").found == Found::nothing);
    }
    CHECK(found("{\"body\": \"x\"}\n").fields == "its fields are \"body\" (text)");
    CHECK_FALSE(found("{\"body\": \"x\", \"text\": 5}\n").has_text);
    for (const std::string text :
         {"", "\n\n", "{", "{\n\"text\": \"pretty printed\"}", "{}", "{ braces } in a text",
          "[1] A note.", "[\"text\"]", "[Verse]\n{\"text\": \"x\"}", "{\"text\": \"x\"} and more",
          "text {\"text\": \"x\"}", "{'text': 'x'}", "{{template}}", "[{note}]",
          "\\{\"text\": \"x\"}"})
        for (const bool complete : {false, true}) {
            CAPTURE(text, complete);
            const std::string more = complete ? "" : "\nand a second line, and more of it";
            CHECK(found(text + more, complete).found == Found::nothing);
        }
}

TEST_CASE("an element with a stray quote does not take the elements on later lines with it") {
    const std::string good = R"({"text": "one"})";
    for (const auto& [bad, lost] : {std::pair{R"({"text": "5" disk"})"s, 1},
                                    {R"({"text": "a, "b", c", "x": ["}]})", 1},
                                    {"{\n  \"text\": \"5\" disk\"\n}", 1},
                                    {"{\n  \"text\": \"5\" disk\",\n  \"n\": 2\n}", 1},
                                    {"{\"text\": \"line\nbreak\"}", 1},
                                    {"{\"text\": \"two, \nline }, \n breaks\"}", 1},
                                    // It could be a text of two lines.
                                    {R"({"text": 5" disk})", 2}}) {
        const TemporaryDirectory folder;
        write(folder / "a.json", "[\n" + good + ",\n" + bad + ",\n" + good +
                                     ",\n{\"text\": \"two\"},\n" + good + "\n]\n");
        auto options = options_for({folder / "a.json"}, folder / "out");
        options.val_fraction = 0;
        CAPTURE(bad);
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "element 2 of"));
        options.skip_bad = true;
        const std::string said = said_by(options);
        CAPTURE(said);
        Strings expected{"one", "one", "two", "one"};
        if (lost == 2) expected.erase(expected.begin());
        CHECK((documents_in(options.out, "train") == expected));
        CHECK(contains(said, "not valid JSON"));
    }
}

TEST_CASE("a bad first line that looks like an array costs one line") {
    const TemporaryDirectory folder;
    for (const std::string first :
         {"[]", "[1, 2]", "[log] started", "[\"a\", {\"text\": \"b\"}]"}) {
        write(folder / "a.jsonl", first + "\n\n{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
        auto options = options_for({folder / "a.jsonl"}, folder / "out");
        options.val_fraction = 0;
        CAPTURE(first);
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "line 1 of"));
        options.skip_bad = true;
        CHECK(contains(said_by(options), "left out: 1 line that is not"));
        CHECK((documents_in(options.out, "train") == Strings{"one", "two"}));
    }
}

TEST_CASE("a line without the field names the fields that there are, even if nothing is left") {
    const TemporaryDirectory folder;
    const std::string file = folder / "a.jsonl";
    auto options = options_for({file}, folder / "out");
    options.val_fraction = 0;
    write(file, "{\"id\": 1, \"content\": \"a\"}\n{\"id\": 2, \"content\": \"b\"}\n");
    const std::string fields = "has no field \"text\" (its fields are \"id\", \"content\" (text))";
    CHECK(
        contains(error_of([&] { prepare(options, nullptr); }), "line 1 of " + file + " " + fields));
    options.skip_bad = true;
    CHECK(contains(error_of([&] { prepare(options, nullptr); }),
                   "nothing is left of the text: line 1 of " + file + " " + fields));
    write(file, "{\"text\": \"x\"}\n{\"id\": 1, \"content\": \"a\"}\n{\"x\": 2}\n");
    CHECK(contains(said_by(options),
                   "left out: 2 lines, each of which has no field \"text\", first "
                   "line 2 of " +
                       file + " (its fields are \"id\", \"content\""));
    REQUIRE(read_data_manifest(options.out).left_out.size() == 1);
    CHECK(contains(read_data_manifest(options.out).left_out[0].detail, "\"content\" (text)"));
}
