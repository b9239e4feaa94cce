#include "training/config/data_folder.h"

#include <filesystem>

#include <glob.h>

#include "base/error.h"
#include "tokenizer/formats.h"
#include "training/config/known_data.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// Whether a glob matches anything.
bool matches(const std::string& pattern) {
    glob_t found{};
    const int result = ::glob(pattern.c_str(), GLOB_TILDE, nullptr, &found);
    ::globfree(&found);
    return result == 0;
}

/// A path as a glob that matches it alone.
std::string glob_of(const fs::path& path) {
    std::string pattern;
    for (const char c : path.string())
        pattern += c == '[' || c == '*' || c == '?' ? concat("[", c, "]") : std::string(1, c);
    return pattern;
}

/// The shards of a split in the folders that a glob matches; empty if there are none.
/// scripts/data.sh puts validation shards that were published apart into valid/.
std::string shards_in(const std::string& folders, const std::string& split) {
    for (const std::string& place : {std::string(), std::string("valid/")})
        for (const char* before : {"", "*_"})  // llm.c's shards begin with the name of the data
            if (const std::string pattern = concat(folders, "/", place, before, split, "_*.bin");
                matches(pattern) && (place.empty() || split == "val"))
                return pattern;
    return "";
}

std::string without_slash(std::string folder) {
    while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
    return folder;
}

constexpr const char* how_to_make_one =
    "; `train_gpt tokenize TEXT --train-vocab 4096 --out FOLDER` makes such a folder";

void require_folder(const std::string& folder) {
    require_made(folder);
    std::error_code ignored;
    if (!fs::exists(folder, ignored))
        throw Error("--data ", folder, ": there is no such folder", how_to_make_one);
    if (!fs::is_directory(folder, ignored))
        throw Error("--data ", folder,
                    " is a file; name the folder that `train_gpt tokenize` wrote",
                    fs::path(folder).has_parent_path()
                        ? concat(", such as ", fs::path(folder).parent_path().string())
                        : "");
}

void refuse_folder(const std::string& given, const std::string& key, const std::string& split,
                   const std::string& where) {
    const std::string pattern = without_slash(given);
    glob_t found{};
    std::error_code ignored;
    const bool is_folder = ::glob(pattern.c_str(), GLOB_TILDE, nullptr, &found) == 0 &&
                           fs::is_directory(found.gl_pathv[0], ignored);
    ::globfree(&found);
    if (!is_folder) return;
    const std::string shards = shards_in(pattern, split), any = concat(pattern, "/*.bin");
    throw Error(where, ": ", key, " = \"", given, "\" is a folder, but shards belong here; ",
                !shards.empty() ? concat("write \"", shards, "\"")
                : matches(any) ? concat("write \"", any, "\", or a pattern for some of these files")
                               : concat("it has no shards (*.bin)", how_to_make_one));
}

}  // namespace

std::vector<std::string> data_overrides(const std::string& given) {
    const std::string folder = without_slash(given);
    require_folder(folder);
    const std::string pattern = glob_of(folder), train = shards_in(pattern, "train");
    if (train.empty())
        throw Error("--data ", given, ": the folder has no training shards (train_*.bin)",
                    shards_in(pattern, "val").empty()
                        ? how_to_make_one
                        : ", only validation shards; set data.train with --set instead");
    const fs::path tokenizer = fs::path(folder) / "tokenizer.json";
    if (!has_tokenizer(folder))
        throw Error("--data ", given,
                    ": the folder has no tokenizer.json; for shards without one, "
                    "use --set 'data.train=",
                    train, "' and set data.val and tokenizer.path too");
    return {"data.train=" + train, "data.val=" + shards_in(pattern, "val"),
            "tokenizer.path=" + (fs::exists(tokenizer) ? tokenizer.string() : folder)};
}

std::string validation_glob(const std::string& data) {
    std::error_code ignored;
    if (!fs::is_directory(data, ignored)) return data;
    const std::string pattern = glob_of(without_slash(data)), val = shards_in(pattern, "val");
    if (!val.empty()) return val;
    const std::string train = shards_in(pattern, "train");
    throw Error("--data ", data, ": the folder has no validation shards (val_*.bin)",
                train.empty() ? how_to_make_one
                              : concat("; --data '", train, "' evaluates on its training shards"));
}

void require_no_folders(const Config& config, const std::string& file) {
    for (const auto& source : config.data.train)
        refuse_folder(source.glob, "data.train", "train", file);
    refuse_folder(config.data.val, "data.val", "val", file);
}

}  // namespace train_gpt
