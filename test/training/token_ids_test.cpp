// The ids of tokens in config.json and generation_config.json, on their way through the program.
#include "training/files/token_ids.h"

#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "test/training/foreign_models.h"
#include "training/files/checkpoint.h"
#include "training/files/interchange.h"

using namespace train_gpt;
using namespace train_gpt::foreign_models;

namespace {

void write_config(const fs::path& folder, const Json& entries) {
    Json config = Json::parse(read(folder / "config.json"));
    config.erase("eos_token_id");
    config.update(entries);
    write(folder / "config.json", config.dump());
}

Json entries_of(const fs::path& file) {
    const Json all = Json::parse(read(file));
    Json entries = Json::object();
    for (const auto& [key, value] : all.items())
        if (key.ends_with("_token_id")) entries[key] = value;
    return entries;
}

Tokenizer tokenizer_of(std::string_view text) {
    return Tokenizer::train(std::vector<std::string_view>{text}, 258);
}

}  // namespace

TEST_CASE("ids of tokens and generation_config.json survive import and export as they are",
          "[interchange]") {
    const Numbers model = random_numbers(StoredType::fp32);
    const int64_t beyond = model.spec.vocab_size + random_int(0, 99);
    const std::vector<Json> all_entries{
        {{"eos_token_id", {3, 5}}, {"bos_token_id", 1}, {"pad_token_id", -1}},
        {{"eos_token_id", Json::array({4})}, {"bos_token_id", nullptr}},
        {{"eos_token_id", {3, beyond, 3}}, {"pad_token_id", beyond}, {"unk_token_id", 0}},
        {{"eos_token_id", Json::array()}, {"decoder_start_token_id", 2}, {"sep_token_id", {1, 2}}},
        {{"eos_token_id", nullptr}, {"bos_token_id", {1, 2}}},
        Json::object()};
    for (const Json& entries : all_entries)
        for (const std::string generation :
             {"", "{ \"eos_token_id\": [3,6, 3],\n\t\"temperature\": 0.60,\"top_p\":0.95}", "{}"}) {
            CAPTURE(entries.dump(), generation);
            const TemporaryDirectory directory;
            const fs::path source = write_folder(directory / "source", model, ""),
                           file = "generation_config.json";
            write_config(source, entries);
            if (!generation.empty()) write(source / file, generation);
            import_model({source, directory / "in", ""});
            export_model({.checkpoint = directory / "in", .out = directory / "out", .dtype = {}});
            for (const char* folder : {"in", "out"}) {
                CHECK(entries_of(directory / folder + "/config.json") == entries);
                CHECK(fs::exists(fs::path(directory / folder) / file) == !generation.empty());
                if (!generation.empty())
                    CHECK(read(fs::path(directory / folder) / file) == generation);
            }
        }
}

TEST_CASE("what cannot be the id of a token is refused by its name", "[interchange]") {
    const Numbers model = random_numbers(StoredType::fp32);
    for (const Json& value : {Json("2"), Json(2.5), Json(true), Json::object(), Json({1, "2"}),
                              Json({1, nullptr}), Json(Json::array({{1}}))})
        for (const std::string name : {"config.json", "generation_config.json"})
            for (const char* key : {"eos_token_id", "pad_token_id"}) {
                CAPTURE(value.dump(), name, key);
                const TemporaryDirectory directory;
                const fs::path source = write_folder(directory / "source", model, "");
                if (name == "config.json")
                    write_config(source, {{key, value}});
                else
                    write(source / name, Json({{key, value}}).dump());
                const std::string error = error_of([&] {
                    import_model({source, directory / "out", ""});
                });
                CHECK(error.starts_with((source / name).string() + " has " + key + " = "));
                CHECK_FALSE(fs::exists(directory / "out"));
            }
    const TemporaryDirectory directory;
    const fs::path source = write_folder(directory / "source", model, "");
    for (const char* text : {"", "[1]", "{"}) {
        write(source / "generation_config.json", text);
        CHECK(contains(error_of([&] {
                           import_model({source, directory / "out", ""});
                       }),
                       "generation_config.json"));
    }
}

TEST_CASE("a text ends with any id that either file lists", "[interchange]") {
    CHECK(ends_of_text({}).empty());
    const TokenIds both{.config = R"({"eos_token_id": [9, 4, 9]})",
                        .generation = R"({"eos_token_id": [4, 2], "pad_token_id": 8})"};
    CHECK(ends_of_text(both) == std::vector<int64_t>{9, 4, 2});
    CHECK(ends_of_text({.config = R"({"eos_token_id": 3})"}) == std::vector<int64_t>{3});
    CHECK(ends_of_text({.config = R"({"eos_token_id": null, "bos_token_id": 1})",
                        .generation = R"({"eos_token_id": 6})"}) == std::vector<int64_t>{6});
}

TEST_CASE("ids of tokens follow the tokenizer that a model gets", "[interchange]") {
    using Unordered = nlohmann::json;
    const Tokenizer tokenizer = tokenizer_of("ab ab abc"), other = tokenizer_of("xy xy xyz");
    const uint32_t end = *tokenizer.end_of_text();
    const TokenIds ids{.config = R"({"eos_token_id":[3,5],"pad_token_id":7})",
                       .generation = R"({"eos_token_id": 3, "temperature": 0.6})"};
    TokenIds with = ids;
    with.config = Unordered({{"eos_token_id", {3, end}}, {"pad_token_id", 7}}).dump();
    const auto adapted = [&](const TokenIds& from, const Tokenizer* theirs) {
        const TokenIds to = adapt_token_ids(from, theirs, tokenizer);
        return std::pair(Unordered::parse(to.config),
                         to.generation.empty() ? Unordered() : Unordered::parse(to.generation));
    };
    const Unordered own = {{"bos_token_id", end}, {"eos_token_id", end}};
    Unordered own_generation = own;
    own_generation["temperature"] = 0.6;

    // Listed already
    CHECK(adapt_token_ids(with, &tokenizer, tokenizer).config == with.config);
    CHECK(adapt_token_ids(with, nullptr, tokenizer).generation == with.generation);
    // The same tokens, of which another ends documents from now on
    CHECK(adapted(ids, &tokenizer) ==
          std::pair(Unordered({{"eos_token_id", {3, 5, end}}, {"pad_token_id", 7}}),
                    Unordered({{"eos_token_id", {3, end}}, {"temperature", 0.6}})));
    CHECK(adapted({.config = R"({"eos_token_id":null,"pad_token_id":7})"}, &tokenizer) ==
          std::pair(Unordered({{"eos_token_id", end}, {"pad_token_id", 7}}), Unordered()));
    // Others, or unknown ones
    CHECK(adapted(with, &other) == std::pair(own, own_generation));
    CHECK(adapted(ids, nullptr) == std::pair(own, own_generation));
    CHECK(adapted({}, nullptr) == std::pair(own, Unordered()));
    const TokenIds unknown = token_ids_of(nullptr);
    CHECK(Unordered::parse(unknown.config) ==
          Unordered({{"bos_token_id", nullptr}, {"eos_token_id", nullptr}}));
}
