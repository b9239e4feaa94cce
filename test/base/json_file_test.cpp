// Values of JSON files, by key.
#include "base/json_file.h"

#include <limits>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "tokenizer/tokenizer.h"
#include "training/config/config.h"
#include "training/config/load_config.h"
#include "training/files/safetensors.h"

using namespace train_gpt;

namespace {

/// Lists or objects, one in the other.
std::string nested(int levels, bool objects) {
    std::string text;
    for (int i = 0; i < levels; ++i) text += objects ? "{\"a\": " : "[";
    text += objects ? "1" : "\"[[{{ \\\" [\"";
    return text + std::string(static_cast<size_t>(levels), objects ? '}' : ']');
}

}  // namespace

TEST_CASE("JSON is read up to a depth and without a NUL, whoever reads it") {
    const TemporaryDirectory folder;
    const std::string file = folder / "a.json";
    for (const bool objects : {false, true}) {
        const std::string deepest = nested(max_json_depth, objects);
        CHECK_FALSE(try_parse_json(deepest).is_discarded());
        CHECK(to_text(parse_json(deepest)).size() <= deepest.size());
        for (const int levels : {max_json_depth + 1, 20'000}) {
            const std::string deep = nested(levels, objects);
            CHECK(try_parse_json(deep).is_discarded());
            write(file, "\n" + deep);
            const std::string message = error_of([&] { read_json(file); });
            CHECK(contains(message, file + " is nested more than 1000 levels deep (line 2, "));
            CHECK(contains(message, concat("column ", 1 + (objects ? 6 : 1) * max_json_depth)));
            CHECK(contains(error_of([&] { Tokenizer::load(file); }), "nested more than"));
            CHECK(contains(error_of([&] { load_config(file, {}); }), "nested more than"));
            const std::string header = std::string(1, static_cast<char>(deep.size() & 0xFF)) +
                                       static_cast<char>(deep.size() >> 8 & 0xFF) +
                                       static_cast<char>(deep.size() >> 16) + std::string(5, '\0') +
                                       deep;
            write(folder / "a.safetensors", header);
            CHECK(contains(error_of([&] { SafetensorsFile open(folder / "a.safetensors"); }),
                           "nested deeper"));
        }
    }
    // Many values beside each other are not deep.
    std::string wide = "[0";
    for (int i = 0; i < 3000; ++i) wide += i % 2 ? ",[]" : ",{\"a\": [1]}";
    CHECK(parse_json(wide + "]").size() == 3001);

    const std::string good = "{\"seed\": 1}";
    const auto at = static_cast<size_t>(random_int(0, std::ssize(good)));
    for (const std::string& bytes : {good + '\0', good + std::string("\n\0{}", 4),
                                     good.substr(0, at) + '\0' + good.substr(at)}) {
        CAPTURE(at);
        CHECK(try_parse_json(bytes).is_discarded());
        write(file, bytes);
        CHECK(contains(error_of([&] { read_json(file); }), file + " is not valid JSON (a NUL"));
        CHECK(contains(error_of([&] { Tokenizer::load(file); }), "NUL"));
        CHECK(contains(error_of([&] { load_config(file, {}); }), "NUL"));
        write(folder / "a.safetensors",
              static_cast<char>(bytes.size()) + std::string(7, '\0') + bytes);
        CHECK(contains(error_of([&] { SafetensorsFile open(folder / "a.safetensors"); }), "NUL"));
    }
}

TEST_CASE("an integer in a JSON file is read only if the type can represent it") {
    const auto fits = [](const Json& value, auto zero) {
        try {
            return field<decltype(zero)>(Json{{"n", value}}, "n", "config.json") == value;
        } catch (const Error&) {
            return false;
        }
    };
    constexpr auto largest32 = std::numeric_limits<int>::max();
    constexpr auto largest64 = std::numeric_limits<int64_t>::max();
    CHECK(fits(random_int(-largest32, largest32), int{}));
    CHECK(fits(largest32, int{}));
    CHECK_FALSE(fits(random_int(int64_t{largest32} + 1, largest64), int{}));
    CHECK_FALSE(fits(random_int(-largest64, -int64_t{largest32} - 2), int{}));
    CHECK(fits(random_int(0, largest64), int64_t{}));
    CHECK_FALSE(fits(static_cast<uint64_t>(random_int(0, largest64)) + largest64 + 1, int64_t{}));
    CHECK(fits(static_cast<uint64_t>(random_int(0, largest64)) + largest64 + 1, uint64_t{}));
    CHECK_FALSE(fits(random_int(-largest64, -1), uint64_t{}));
    CHECK_FALSE(fits(2.5, int{}));
    CHECK_FALSE(fits(true, int{}));
    CHECK(fits(true, bool{}));
    CHECK_FALSE(fits(1, bool{}));
}
