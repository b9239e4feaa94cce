#include "training/config/presets.h"

#include <algorithm>
#include <cctype>
#include <system_error>

#include "base/error.h"
#include "training/config/nearest_key.h"

namespace train_gpt {

namespace fs = std::filesystem;

std::vector<fs::path> preset_folders() {
    std::vector<fs::path> folders{"configs"};
    std::error_code code;
    const fs::path program = fs::read_symlink("/proc/self/exe", code).parent_path();
    if (!code)
        for (const char* place : {"configs", "../configs", "../share/train_gpt/configs"})
            folders.push_back((program / place).lexically_normal());
    return folders;
}

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const fs::path& folder : preset_folders()) {
        std::error_code code;
        for (fs::directory_iterator entry(folder, code), end; !code && entry != end;
             entry.increment(code))
            if (entry->path().extension() == ".json" && entry->path().stem() != "schema")
                names.push_back(entry->path().stem().string());
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
}

namespace {

/// The presets that a name may stand for: those with it in their names, else the most similar one.
std::vector<std::string> similar_presets(std::string name) {
    for (char& c : name) c = c == '_' ? '-' : static_cast<char>(std::tolower(c));
    const std::vector<std::string> names = preset_names();
    std::vector<std::string> similar;
    for (const std::string& preset : names)
        if (name.size() > 2 && preset.find(name) != std::string::npos) similar.push_back(preset);
    if (const std::string nearest = nearest_name(name, names); similar.empty() && !nearest.empty())
        similar.push_back(nearest);
    return similar;
}

std::string list_of(const std::vector<std::string>& names) {
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
    return list;
}

}  // namespace

fs::path find_config(const std::string& name) {
    std::error_code ignored;
    const bool exists = fs::exists(name, ignored);
    if (exists && !fs::is_directory(name, ignored)) return name;
    const fs::path path(name);
    const std::string stem = (path.extension() == ".json" ? path.stem() : path.filename()).string();
    if (!path.has_parent_path())
        for (const fs::path& folder : preset_folders())
            if (const fs::path preset = folder / (stem + ".json");
                stem != "schema" && fs::is_regular_file(preset, ignored))
                return preset;
    if (exists) return name;  // a folder, of which reading says what is wrong
    if (name.empty())
        throw Error("the name of the configuration is empty; name a file or a preset");
    const std::vector<std::string> all = preset_names(), similar = similar_presets(stem);
    throw Error(
        path.has_parent_path()
            ? concat("cannot read ", name, ": No such file or directory; check the path")
            : concat("there is neither a file nor a preset called ", name),
        similar.size() == 1      ? concat("; the nearest preset is ", similar.front())
        : !similar.empty()       ? concat("; presets like it are ", list_of(similar))
        : path.has_parent_path() ? ""
        : all.empty()
            ? "; no presets were found in configs/, beside the program, or where make install "
              "puts them"
            : concat("; the presets are ", list_of(all)));
}

}  // namespace train_gpt
