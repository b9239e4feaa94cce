#include "training/files/token_ids.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/json_file.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* begin_key = "bos_token_id";
constexpr const char* end_key = "eos_token_id";

/// The entries of an object that name tokens.
Json token_entries(const Json& object, const fs::path& path) {
    if (!object.is_object()) throw Error(path.string(), " is not a JSON object; restore the file");
    Json entries = Json::object();
    for (const auto& [key, value] : object.items()) {
        if (!key.ends_with("_token_id")) continue;
        const bool valid = value.is_null() || value.is_number_integer() ||
                           (value.is_array() && std::ranges::all_of(value, [](const Json& id) {
                                return id.is_number_integer();
                            }));
        if (!valid)
            throw Error(path.string(), " has ", key, " = ", to_text(value),
                        "; it must be the id of a token, a list of ids, or null");
        entries[key] = value;
    }
    return entries;
}

/// Appends the ids in a value of an entry that `to` lacks.
void add_ids(const Json& value, std::vector<int64_t>& to) {
    for (const Json& id : value.is_array() ? value : Json::array({value}))
        if (id.is_number_integer() && std::ranges::find(to, id.get<int64_t>()) == to.end())
            to.push_back(id.get<int64_t>());
}

Json with_end(Json object, uint32_t end) {
    std::vector<int64_t> ends;
    if (object.contains(end_key)) add_ids(object[end_key], ends);
    if (ends.empty())
        object[end_key] = end;
    else if (std::ranges::find(ends, int64_t{end}) == ends.end())
        object[end_key] = (ends.push_back(end), ends);
    return object;
}

}  // namespace

TokenIds read_token_ids(const fs::path& directory) {
    const fs::path config = directory / "config.json",
                   generation = directory / "generation_config.json";
    TokenIds ids{.config = to_text(token_entries(read_json(config), config))};
    if (fs::exists(generation)) {
        (void)token_entries(read_json(generation), generation);
        ids.generation = MappedFile(generation).text();
    }
    return ids;
}

TokenIds token_ids_of(const Tokenizer* tokenizer) {
    Json begin, end;
    if (tokenizer && tokenizer->end_of_text()) end = *tokenizer->end_of_text();
    // Without a token that begins documents, the one that ends the document before does.
    begin = tokenizer && tokenizer->begin_of_text() ? Json(*tokenizer->begin_of_text()) : end;
    return {.config = to_text({{begin_key, begin}, {end_key, end}})};
}

TokenIds adapt_token_ids(const TokenIds& ids, const Tokenizer* theirs, const Tokenizer& tokenizer) {
    const std::optional<uint32_t> end = tokenizer.end_of_text();
    const bool same = theirs && tokenizer.has_tokens_of(*theirs), differ = theirs && !same;
    const std::vector<int64_t> ends = ends_of_text(ids);
    const bool ends_there = !end || std::ranges::find(ends, int64_t{*end}) != ends.end();
    if (!differ && ends_there) return ids;

    Json generation = ids.generation.empty() ? Json() : parse_json(ids.generation);
    if (same) {
        if (!generation.is_null() && generation.contains(end_key))
            generation = with_end(generation, *end);
        return {.config = to_text(with_end(parse_json(ids.config), *end)),
                .generation = generation.is_null() ? "" : to_text(generation, 2) + "\n"};
    }
    TokenIds own = token_ids_of(&tokenizer);
    if (generation.is_null()) return own;
    Json kept = Json::object();
    for (const auto& [key, value] : generation.items())
        if (!key.ends_with("_token_id")) kept[key] = value;
    kept.update(parse_json(own.config));
    own.generation = to_text(kept, 2) + "\n";
    return own;
}

std::vector<int64_t> ends_of_text(const TokenIds& ids) {
    std::vector<int64_t> ends;
    for (const std::string* text : {&ids.config, &ids.generation})
        if (const Json object = text->empty() ? Json::object() : parse_json(*text);
            object.contains(end_key))
            add_ids(object[end_key], ends);
    return ends;
}

}  // namespace train_gpt
