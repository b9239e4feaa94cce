#include "dataloader/manifest.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* manifest_format = "train_gpt data 1";

Json to_json(const PreparedShard& shard) {
    return {{"name", shard.name},
            {"split", shard.split},
            {"tokens", shard.tokens},
            {"bytes", shard.bytes},
            {"hash", shard.hash}};
}
Json to_json(const PreparedSource& source) {
    Json json{{"path", source.path},
              {"bytes", source.bytes},
              {"documents", source.documents},
              {"hash", source.hash}};
    if (source.not_utf8 > 0)
        json["not_utf8"] = {{"bytes", source.not_utf8},
                            {"first", source.first_not_utf8},
                            {"line", source.first_not_utf8_line}};
    if (source.nulls > 0) json["nulls"] = source.nulls;
    return json;
}
Json to_json(const LeftOut& left) {
    Json json{{"reason", left.reason},
              {"count", left.count},
              {"path", left.path},
              {name_of(left.record), left.line}};
    if (!left.detail.empty()) json["detail"] = left.detail;
    return json;
}
template <class T>
Json to_json(const std::vector<T>& all) {
    Json json = Json::array();
    for (const T& one : all) json.push_back(to_json(one));
    return json;
}

void from_json(const Json& json, PreparedShard& shard) {
    json.at("name").get_to(shard.name);
    json.at("split").get_to(shard.split);
    json.at("tokens").get_to(shard.tokens);
    json.at("bytes").get_to(shard.bytes);
    json.at("hash").get_to(shard.hash);
}
void from_json(const Json& json, PreparedSource& source) {
    json.at("path").get_to(source.path);
    json.at("bytes").get_to(source.bytes);
    source.documents = json.value("documents", int64_t{0});
    json.at("hash").get_to(source.hash);
    if (const auto found = json.find("not_utf8"); found != json.end()) {
        found->at("bytes").get_to(source.not_utf8);
        found->at("first").get_to(source.first_not_utf8);
        found->at("line").get_to(source.first_not_utf8_line);
    }
    source.nulls = json.value("nulls", int64_t{0});
}
void from_json(const Json& json, LeftOut& left) {
    json.at("reason").get_to(left.reason);
    json.at("count").get_to(left.count);
    json.at("path").get_to(left.path);
    for (const Record record : {Record::element, Record::row})
        if (json.contains(name_of(record))) left.record = record;
    json.at(name_of(left.record)).get_to(left.line);
    left.detail = json.value("detail", "");
}
template <class T>
void from_json(const Json& json, std::vector<T>& all) {
    all.clear();
    for (const Json& entry : json) from_json(entry, all.emplace_back());
}

/// What is wrong with a file, as parse_json() words it. Covers entries that are missing or have the
/// wrong type, too, for which the library's own message would describe the library.
std::string what_is_wrong(const std::exception& error) {
    return dynamic_cast<const Json::exception*>(&error) ? "does not have the expected entries"
                                                        : error.what();
}

}  // namespace

void write_progress(const fs::path& file, const PreparationState& state) {
    const Position& at = state.position;
    Json json;
    json["position"] = {{"source", at.source},
                        {"offset", at.offset},
                        {"line", at.line},
                        {"in_document", at.in_document},
                        {"hash", at.hash}};
    for (const Split split : splits)
        json[name_of(split)] = {{"documents", state.documents[index_of(split)]},
                                {"bytes", state.bytes[index_of(split)]},
                                {"shards", to_json(state.shards[index_of(split)])}};
    json["sources"] = to_json(state.sources);
    json["left_out"] = to_json(state.left_out);
    write_file(file, to_text(json, 2) + "\n");
}

PreparationState read_progress(const fs::path& path, size_t sources) {
    PreparationState state;
    try {
        const MappedFile file(path);
        const Json json = parse_json(file.text());
        const Json& at = json.at("position");
        state.position = {at.at("source").get<size_t>(), at.at("offset").get<int64_t>(),
                          at.at("line").get<int64_t>(), at.at("in_document").get<bool>(),
                          at.at("hash").get<uint64_t>()};
        for (const Split split : splits) {
            const Json& part = json.at(name_of(split));
            part.at("documents").get_to(state.documents[index_of(split)]);
            part.at("bytes").get_to(state.bytes[index_of(split)]);
            from_json(part.at("shards"), state.shards[index_of(split)]);
        }
        from_json(json.at("sources"), state.sources);
        from_json(json.at("left_out"), state.left_out);
        if (state.sources.size() != sources || state.position.source > sources)
            throw Error("does not describe ", sources, " sources");
    } catch (const std::exception& error) {
        throw Error(path.string(), " is damaged (it ", what_is_wrong(error),
                    "); remove the folder ", path.parent_path().string(),
                    " and run the same command again");
    }
    return state;
}

void write_data_manifest(const fs::path& folder, const DataManifest& manifest) {
    Json json;
    json["format"] = manifest_format;
    json["complete"] = manifest.complete;
    json["vocab_size"] = manifest.vocab_size;
    json["tokenizer"] = {{"name", manifest.tokenizer}, {"hash", manifest.tokenizer_hash}};
    json["val_fraction"] = manifest.val_fraction;
    json["val_split"] = manifest.val_split;
    json["documents"] = {{"train", manifest.train_documents}, {"val", manifest.val_documents}};
    json["files"] = to_json(manifest.shards);
    json["sources"] = to_json(manifest.sources);
    json["left_out"] = to_json(manifest.left_out);
    write_file(folder / data_manifest, to_text(json, 2) + "\n");
}

DataManifest read_data_manifest(const fs::path& folder) {
    const fs::path path = folder / data_manifest;
    DataManifest manifest;
    const MappedFile file(path);
    try {
        const Json json = parse_json(file.text());
        if (json.at("format") != manifest_format)
            throw Error("does not have the \"format\" \"", manifest_format, "\"");
        json.at("complete").get_to(manifest.complete);
        json.at("vocab_size").get_to(manifest.vocab_size);
        json.at("tokenizer").at("name").get_to(manifest.tokenizer);
        json.at("tokenizer").at("hash").get_to(manifest.tokenizer_hash);
        json.at("val_fraction").get_to(manifest.val_fraction);
        manifest.val_split = json.value("val_split", "tail");
        if (json.contains("documents")) {
            json["documents"].at("train").get_to(manifest.train_documents);
            json["documents"].at("val").get_to(manifest.val_documents);
        }
        from_json(json.at("files"), manifest.shards);
        from_json(json.at("sources"), manifest.sources);
        if (json.contains("left_out")) from_json(json["left_out"], manifest.left_out);
    } catch (const std::exception& error) {
        throw Error(path.string(), " is not a manifest of `train_gpt tokenize` (it ",
                    what_is_wrong(error), "); remove it or choose another folder");
    }
    return manifest;
}

std::optional<DataManifest> find_data_manifest(const fs::path& folder) {
    const fs::path path = folder / data_manifest;
    if (!fs::is_regular_file(path)) return {};
    const MappedFile file(path);
    const Json json = try_parse_json(file.text());
    const std::string opening = concat("{\n  \"format\": \"", manifest_format, "\"");
    if (json.is_discarded() &&
        (file.text().starts_with(opening) || opening.starts_with(file.text())))
        throw Error(path.string(),
                    " is damaged; copy the folder again, or remove that file to use the shards "
                    "without their hashes");
    if (!json.is_object() || json.value("format", Json()) != manifest_format) return {};
    return read_data_manifest(folder);
}

void check_prepared(const std::string& glob, const Tokenizer* tokenizer) {
    if (glob.empty() || glob == "synthetic") return;
    std::map<fs::path, std::set<std::string>> shards;  // by folder
    for (const fs::path& path : glob_files(glob))
        shards[path.parent_path()].insert(path.filename().string());
    for (const auto& [folder, names] : shards) {
        const auto manifest = find_data_manifest(folder);
        if (!manifest ||
            std::ranges::none_of(manifest->shards, [&names = names](const PreparedShard& shard) {
                return names.contains(shard.name);
            }))
            continue;
        if (!manifest->complete)
            throw Error("`train_gpt tokenize` was interrupted while it put its shards into ",
                        folder.string(), "; run it again");
        const fs::path made_with = folder / manifest->tokenizer;
        if (!tokenizer || !fs::exists(made_with) ||
            hash_file(made_with) != manifest->tokenizer_hash)
            continue;
        if (!tokenizer->has_tokens_of(Tokenizer::load(made_with)))
            throw Error("the shards in ", folder.string(), " were made with another tokenizer, ",
                        made_with.string(),
                        ", whose tokens have other ids; use that one, or run "
                        "train_gpt tokenize with this one");
    }
}

}  // namespace train_gpt
