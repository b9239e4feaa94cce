#include "model/families/window_config.h"

#include <string>

#include "base/error.h"
#include "model/families/config_file.h"

namespace train_gpt {

namespace {

using Layers = WindowKeys::Layers;

constexpr const char *short_type = "sliding_attention", *long_type = "full_attention";

/// S and L for the entries of layer_types; empty if there is no such key.
std::string listed_layers(const Json& json, const std::filesystem::path& path, int64_t n_layer) {
    const Json types = optional_field(json, "layer_types", Json::array(), path);
    std::string pattern;
    for (const Json& type : types) {
        if (type != short_type && type != long_type)
            throw Error(path.string(), " has layers of the type ", to_text(type), "; only \"",
                        long_type, "\" and \"", short_type, "\" are supported");
        pattern += type == short_type ? 'S' : 'L';
    }
    if (!pattern.empty() && std::ssize(pattern) != n_layer)
        throw Error(path.string(), " has layer_types for ", pattern.size(),
                    " layers, but num_hidden_layers = ", n_layer,
                    "; list the type of each layer, or remove layer_types");
    return pattern;
}

/// The window in the layers that have one; 0: there is none.
int read_window(const WindowKeys& keys, const ConfigFile& file, const Json& json) {
    if (keys.layers == Layers::none) {
        file.only("use_sliding_window", false);
        return 0;
    }
    if (keys.use_key && !file.flag("use_sliding_window", false)) return 0;
    const int window = json.contains("sliding_window")
                           ? static_cast<int>(file.optional_size("sliding_window"))
                           : keys.fallback.value_or(0);
    if (window > 0) file.only("use_sliding_window", true);  // a class without the key ignores it
    return window;
}

std::string layers_without_list(const WindowKeys& keys, const ConfigFile& file,
                                const std::filesystem::path& path, int64_t n_layer) {
    constexpr int64_t transformers_layers = 28;  // of files without max_window_layers
    std::string pattern(static_cast<size_t>(n_layer), 'S');
    const int64_t first = file.whole_number("max_window_layers", transformers_layers);
    if (keys.layers == Layers::later)
        std::fill_n(pattern.begin(), std::clamp<int64_t>(first, 0, n_layer), 'L');
    if (keys.layers == Layers::other)
        for (size_t i = 1; i < pattern.size(); i += 2) pattern[i] = 'L';
    if (keys.layers == Layers::listed)
        throw Error(path.string(),
                    " has use_sliding_window = true without layer_types, which versions of "
                    "transformers read differently; add layer_types");
    if (keys.layers == Layers::all && keys.use_key && file.whole_number("max_window_layers", 0) > 0)
        throw Error(path.string(), " has max_window_layers = ", first,
                    " beside use_sliding_window = true, which versions of transformers read "
                    "differently; set it to 0, so that all layers have the window");
    return pattern;
}

}  // namespace

void read_windows(const WindowKeys& keys, const Json& json, const std::filesystem::path& path,
                  DecoderSettings& settings) {
    const ConfigFile file(json, path);
    const std::string listed = listed_layers(json, path, settings.n_layer);
    settings.window = read_window(keys, file, json);
    const bool is_listed = keys.layers != Layers::none && keys.layers != Layers::all;
    if (listed.empty() || !is_listed) {
        const bool wanted = *settings.window > 0;
        if (wanted)
            settings.window_pattern = layers_without_list(keys, file, path, settings.n_layer);
        if (listed.find(wanted ? 'L' : 'S') != listed.npos)
            throw Error(path.string(), " has layers of the type \"",
                        wanted ? long_type : short_type, "\" among its layer_types, but ",
                        wanted ? "its class gives all layers the window" : "no sliding_window",
                        "; remove layer_types, or correct it");
        return;
    }
    settings.window_pattern = listed;
    if (*settings.window == 0 && listed.find('S') != listed.npos)
        throw Error(path.string(), " has layers of the type \"", short_type,
                    "\" among its layer_types, but ",
                    keys.use_key && !file.flag("use_sliding_window", false)
                        ? "use_sliding_window = false"
                        : "sliding_window = null",
                    "; set the window's size, or correct layer_types");
}

void write_windows(const WindowKeys& keys, const DecoderSpec& spec, Json& json) {
    if (keys.layers == Layers::none) return;
    const bool any = spec.window > 0;
    if (keys.use_key) json["use_sliding_window"] = any;
    if (keys.layers == Layers::all) {
        if (!keys.use_key || any) json["sliding_window"] = any ? Json(spec.window) : Json(nullptr);
        if (keys.use_key && any) json["max_window_layers"] = 0;
        return;
    }
    if (!any && keys.use_key) return;
    json["sliding_window"] = any ? spec.window : keys.fallback.value_or(1);
    Json types = Json::array();
    std::string pattern;
    for (int i = 0; i < spec.n_layer; ++i) {
        types.push_back(spec.has_window(i) ? short_type : long_type);
        pattern += spec.has_window(i) ? 'S' : 'L';
    }
    json["layer_types"] = types;
    // Versions of transformers without layer_types read this.
    if (const size_t first = pattern.find('S');
        keys.layers == Layers::later && pattern.find('L', first) == pattern.npos)
        json["max_window_layers"] = first;
}

bool holds_windows(const WindowKeys& keys, const DecoderSpec& spec) {
    if (spec.window == 0) return true;
    if (keys.layers == Layers::none) return false;
    if (keys.layers != Layers::all) return true;
    for (int i = 0; i < spec.n_layer; ++i)
        if (!spec.has_window(i)) return false;
    return true;
}

}  // namespace train_gpt
