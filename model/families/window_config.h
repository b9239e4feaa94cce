// Sliding windows in a config.json of Hugging Face's: in which layers, by sliding_window,
// use_sliding_window, max_window_layers and layer_types.
#pragma once
#include <filesystem>
#include <optional>

#include "base/json_text.h"
#include "model/families/decoder_settings.h"

namespace train_gpt {

/// Which of these keys a family's class in transformers has.
struct WindowKeys {
    enum class Layers : uint8_t {
        none,    // no layer has a window
        all,     // all layers have it, or none
        later,   // by layer_types; else the layers from max_window_layers on
        listed,  // by layer_types
        other,   // by layer_types; else layers 0, 2, …
    };
    Layers layers = Layers::none;
    bool use_key = false;              // there is a window only if use_sliding_window says so
    std::optional<int> fallback = {};  // of files without sliding_window; nothing: no window
};

/// Sets the window and its pattern. Throws Error, which names file and key, where transformers
/// would fail, or where its versions differ.
void read_windows(const WindowKeys& keys, const Json& json, const std::filesystem::path& path,
                  DecoderSettings& settings);

/// Adds the keys to a config.json.
void write_windows(const WindowKeys& keys, const DecoderSpec& spec, Json& json);

/// Whether the class can have windows in the layers that have one.
bool holds_windows(const WindowKeys& keys, const DecoderSpec& spec);

}  // namespace train_gpt
