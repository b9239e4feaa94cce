#include "training/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <type_traits>

#include <nlohmann/json.hpp>

#include "kernels/error.h"
#include "kernels/file.h"
#include "parallel/together.h"
#include "training/safetensors.h"
#include "training/version.h"

namespace train_gpt {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

constexpr int format_version = 1;
constexpr const char* hugging_face_prefix = "transformer.";

std::string step_name(int64_t step) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
    return name;
}

/// The step in "step-00000123", or −1. Steps of more than eight digits have longer names.
int64_t step_of_name(const std::string& name) {
    if (name.size() < 13 || name.size() > 21 || name.compare(0, 5, "step-") != 0) return -1;
    if (name.find_first_not_of("0123456789", 5) != std::string::npos) return -1;
    return std::stoll(name.substr(5));
}

/// The folders step-NNNNNNNN of a run, whole or not, newest first.
std::vector<fs::path> step_folders(const fs::path& run_dir) {
    std::vector<std::pair<int64_t, fs::path>> found;
    std::error_code code;
    for (fs::directory_iterator entry(run_dir, code), end; !code && entry != end;
         entry.increment(code))
        if (const int64_t step = step_of_name(entry->path().filename().string()); step >= 0)
            found.emplace_back(-step, entry->path());
    if (code && code != std::errc::no_such_file_or_directory)
        throw Error("cannot read the run folder ", run_dir.string(), ": ", code.message());
    std::sort(found.begin(), found.end());
    std::vector<fs::path> folders;
    for (auto& [step, path] : found) folders.push_back(std::move(path));
    return folders;
}

Json read_json(const fs::path& path) {
    const MappedFile file(path);
    try {
        return Json::parse(file.text());
    } catch (const Json::exception& error) {
        throw Error(path.string(), " is not valid JSON (", error.what(), "); restore the file");
    }
}

template <class T>
T field(const Json& json, const char* key, const fs::path& path) {
    try {
        const Json& value = json.at(key);
        // The library would take 2.5, true and numbers that do not fit for integers.
        if (!std::is_integral_v<T> || std::is_same_v<T, bool> || value.is_number_integer())
            return value.get<T>();
    } catch (const Json::exception&) {
    }
    throw Error(path.string(), " has no valid \"", key,
                "\"; is this the folder of a GPT-2 model or checkpoint?");
}

/// The value of a key that may be missing or null.
template <class T>
T optional_field(const Json& json, const char* key, T fallback, const fs::path& path) {
    if (!json.contains(key) || json[key].is_null()) return fallback;
    return field<T>(json, key, path);
}

/// out[c, r] = in[r, c] for rows × cols elements; rows of `in` are in_stride apart, those of `out` follow each other.
void transpose(const float* in, int64_t in_stride, float* out, int64_t rows, int64_t cols) {
    constexpr int64_t tile = 32;
#pragma omp parallel for schedule(static)
    for (int64_t r0 = 0; r0 < rows; r0 += tile)
        for (int64_t c0 = 0; c0 < cols; c0 += tile)
            for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r)
                for (int64_t c = c0; c < std::min(cols, c0 + tile); ++c)
                    out[c * rows + r] = in[r * in_stride + c];
}

std::vector<int64_t> hugging_face_shape(const Parameter& p) {
    return p.transposed ? std::vector<int64_t>{p.shape[1], p.shape[0]} : p.shape;
}

bool is_optimizer_file(const std::string& name) {
    return name.starts_with("optimizer-") && name.ends_with(".safetensors");
}

void write_weights(const fs::path& path, const ParameterStore& parameters, Activity& activity) {
    const bool rounded = parameters.dtype() == DType::bf16;
    std::vector<TensorInfo> tensors;
    for (const Parameter& p : parameters.parameters())
        tensors.push_back({.name = hugging_face_prefix + p.name,
                           .dtype = rounded ? "BF16" : "F32",
                           .shape = hugging_face_shape(p)});
    SafetensorsWriter writer(path, std::move(tensors));
    // In pieces of rows, so that a checkpoint needs no more memory than its largest transposed tensor.
    constexpr int64_t piece_elements = 1 << 18;
    std::vector<float> values, whole;
    std::vector<bf16> halves;
    for (int i = 0; i < static_cast<int>(parameters.parameters().size()); ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        if (p.transposed) {
            whole.resize(static_cast<size_t>(p.numel()));
            parameters.read_weights(i, 0, whole);
        }
        const int64_t rows = hugging_face_shape(p)[0], cols = p.numel() / rows;
        const int64_t rows_at_once = std::max<int64_t>(1, piece_elements / cols);
        for (int64_t first = 0; first < rows; first += rows_at_once) {
            const int64_t n = std::min(rows_at_once, rows - first);
            values.resize(static_cast<size_t>(n * cols));
            if (p.transposed)
                transpose(whole.data() + first, rows, values.data(), cols, n);
            else
                parameters.read_weights(i, first * cols, values);
            if (!std::all_of(values.begin(), values.end(),
                             [](float v) { return std::isfinite(v); }))
                throw Error("the weights hold numbers that are not finite (first in ", p.name,
                            "); a checkpoint of them is of no use");
            halves.resize(rounded ? values.size() : 0);
            std::transform(values.begin(), values.begin() + std::ssize(halves), halves.begin(),
                           [](float v) { return bf16(v); });
            activity.pulse();
            writer.append(rounded ? std::as_bytes(std::span(halves))
                                  : std::as_bytes(std::span(values)));
        }
    }
    writer.commit();
}

struct SavedState {
    const char* prefix;  // of the names in an optimizer file
    ParameterStore::State state;
};
constexpr SavedState saved_states[] = {{"master/", ParameterStore::State::master},
                                       {"m/", ParameterStore::State::moment1},
                                       {"v/", ParameterStore::State::moment2}};
constexpr const char* range_prefix = "range/";

/// The logical elements of a piece.
Range logical_range(const Parameter& p, const ParameterStore::Piece& piece) {
    return intersection(piece.range, {0, p.numel()});
}

/// The name of a range of a tensor in an optimizer file.
std::string range_key(const Parameter& p, const Range& range) {
    return range == Range{0, p.numel()} ? p.name
                                        : concat(p.name, "[", range.first, ":", range.end(), "]");
}

void write_optimizer(const fs::path& path, const ParameterStore& parameters, Activity& activity) {
    // Consecutive pieces of a tensor become one range.
    struct Saved {
        int parameter;
        Range range;
        std::vector<const ParameterStore::Piece*> pieces;
    };
    std::vector<Saved> ranges;
    for (const ParameterStore::Piece& piece : parameters.pieces()) {
        const Range range =
            logical_range(parameters.parameters()[static_cast<size_t>(piece.parameter)], piece);
        if (range.n == 0) continue;  // padding
        if (!ranges.empty() && ranges.back().parameter == piece.parameter &&
            ranges.back().range.end() == range.first)
            ranges.back().range.n += range.n;
        else
            ranges.push_back({piece.parameter, range, {}});
        ranges.back().pieces.push_back(&piece);
    }
    const auto parameter = [&](const Saved& saved) -> const Parameter& {
        return parameters.parameters()[static_cast<size_t>(saved.parameter)];
    };
    std::vector<TensorInfo> tensors;
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    for (const SavedState& state : saved_states)
        for (const Saved& saved : ranges)
            tensors.push_back({.name = state.prefix + range_key(parameter(saved), saved.range),
                               .dtype = "F32",
                               .shape = {saved.range.n}});
    for (const Saved& saved : ranges)
        metadata[range_prefix + range_key(parameter(saved), saved.range)] =
            concat(saved.range.first, "-", saved.range.end());
    SafetensorsWriter writer(path, std::move(tensors), metadata);
    std::vector<float> copied;
    for (const SavedState& state : saved_states)
        for (const Saved& saved : ranges)
            for (const ParameterStore::Piece* piece : saved.pieces) {
                activity.pulse();
                const auto n = static_cast<size_t>(logical_range(parameter(saved), *piece).n);
                writer.append(
                    std::as_bytes(parameters.host_view(*piece, state.state, copied).first(n)));
            }
    writer.commit();
}

Json hugging_face_config(const GPTShape& shape, DType dtype, const Tokenizer* tokenizer) {
    const auto end_of_text = tokenizer ? tokenizer->end_of_text() : std::nullopt;
    const Json end = end_of_text ? Json(*end_of_text) : Json(nullptr);
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"vocab_size", shape.vocab_size},
            {"n_positions", shape.n_ctx},
            {"n_ctx", shape.n_ctx},
            {"n_embd", shape.n_embd},
            {"n_layer", shape.n_layer},
            {"n_head", shape.n_head},
            {"n_inner", nullptr},
            {"activation_function", "gelu_new"},
            {"layer_norm_epsilon", 1e-5},
            {"initializer_range", 0.02},
            {"resid_pdrop", 0.0},
            {"embd_pdrop", 0.0},
            {"attn_pdrop", 0.0},
            {"scale_attn_weights", true},
            {"tie_word_embeddings", true},
            {"bos_token_id", end},
            {"eos_token_id", end},
            {"use_cache", true},
            {"torch_dtype", dtype == DType::bf16 ? "bfloat16" : "float32"}};
}

}  // namespace

fs::path save_checkpoint(const fs::path& run_dir, const CheckpointContents& contents,
                         const World& world) {
    const fs::path final_path = run_dir / step_name(contents.step);
    const fs::path directory = run_dir / (step_name(contents.step) + ".tmp");
    const ParameterStore& parameters = contents.parameters;
    const bool root = world.rank() == 0;
    try {
        first_for_all(world, [&] {
            fs::remove_all(directory);
            make_directory(directory);
            return "";
        });
        const std::vector<std::string> entries = together(world, [&] {
            std::vector<fs::path> files;
            const auto add = [&](const std::string& name) {
                return files.emplace_back(directory / name);
            };
            // Where every rank has all of the optimizer's state, one file of it is enough.
            const int shards = parameters.sharding().zero == 0 ? 1 : world.size();
            if (world.rank() < shards) {
                char name[64];
                std::snprintf(name, sizeof name, "optimizer-%05d-of-%05d.safetensors", world.rank(),
                              shards);
                write_optimizer(add(name), parameters, world.activity());
            }
            if (root) {
                write_weights(add("model.safetensors"), parameters, world.activity());
                write_file(
                    add("config.json"),
                    hugging_face_config(contents.shape, parameters.dtype(), contents.tokenizer)
                            .dump(2) +
                        "\n");
                write_file(add("train_gpt.json"), to_json(contents.config));
                write_choices(directory, contents.choices);
                add("choices.json");
                if (contents.tokenizer) contents.tokenizer->save(add("tokenizer.json"));
            }
            Json hashes = Json::object();
            for (const fs::path& file : files)
                hashes[file.filename().string()] = {{"bytes", fs::file_size(file)},
                                                    {"xxh3", hash_file(file)}};
            return hashes.dump();
        });
        first_for_all(world, [&] {
            Json manifest = {{"format", "train_gpt checkpoint"},
                             {"format_version", format_version},
                             {"program", version()},
                             {"step", contents.step},
                             {"files", Json::object()}};
            for (const std::string& entry : entries) manifest["files"].update(Json::parse(entry));
            write_file(directory / "manifest.json", manifest.dump(2) + "\n");
            sync_directory(directory);

            // A checkpoint of the same step (the run was resumed from an older one) gives way.
            fs::remove_all(final_path);
            fs::rename(directory, final_path);
            sync_directory(run_dir);
            return "";
        });
    } catch (const fs::filesystem_error& error) {
        std::error_code ignored;
        if (root) fs::remove_all(directory, ignored);
        throw Error("cannot write the checkpoint ", final_path.string(), ": ",
                    error.code().message());
    } catch (...) {
        std::error_code ignored;
        if (root) fs::remove_all(directory, ignored);
        throw;
    }
    return final_path;
}

std::vector<fs::path> list_checkpoints(const fs::path& run_dir) {
    std::vector<fs::path> found = step_folders(run_dir);
    std::erase_if(found, [](const fs::path& path) { return !fs::exists(path / "manifest.json"); });
    return found;
}

void prune_checkpoints(const fs::path& run_dir, int keep) {
    std::error_code ignored;
    std::vector<fs::path> doomed;
    for (fs::directory_iterator entry(run_dir, ignored), end; entry != end;
         entry.increment(ignored))
        if (entry->path().extension() == ".tmp" && step_of_name(entry->path().stem().string()) >= 0)
            doomed.push_back(entry->path());
    const auto checkpoints = list_checkpoints(run_dir);
    for (size_t i = static_cast<size_t>(keep); keep > 0 && i < checkpoints.size(); ++i) {
        // Without its manifest it is no checkpoint any more, whatever interrupts the rest.
        fs::remove(checkpoints[i] / "manifest.json", ignored);
        doomed.push_back(checkpoints[i]);
    }
    for (const fs::path& path : doomed) fs::remove_all(path, ignored);
}

std::optional<fs::path> recover_newest_checkpoint(
    const fs::path& run_dir, const std::function<void(const std::string&)>& warn) {
    std::vector<fs::path> damaged;
    for (const fs::path& checkpoint : step_folders(run_dir)) {
        try {
            verify_checkpoint(checkpoint, Verify::everything);
        } catch (const Error& error) {
            warn(concat(error.what(), "; trying the checkpoint before it"));
            damaged.push_back(checkpoint);
            continue;
        }
        for (const fs::path& path : damaged) {
            std::error_code code;
            fs::path aside = path;
            aside += ".damaged";
            fs::remove_all(aside, code);
            fs::rename(path, aside, code);
            if (code)
                throw Error("cannot move ", path.string(), " out of the way: ", code.message(),
                            "; move it yourself");
        }
        return checkpoint;
    }
    if (damaged.empty()) return {};
    throw Error(
        "none of the ", damaged.size(), " checkpoints in ", run_dir.string(),
        " is whole; restore one of them from a copy, or choose another run_dir to start afresh");
}

fs::path find_checkpoint(const fs::path& path) {
    if (!fs::exists(path))
        throw Error("there is no checkpoint at ", path.string(), "; check the path");
    if (fs::exists(path / "model.safetensors")) return path;
    const auto checkpoints = list_checkpoints(path);
    if (checkpoints.empty())
        throw Error(
            path.string(),
            " holds no complete checkpoint (no model.safetensors and no step-NNNNNNNN folder)",
            "; name a run's folder or one of its checkpoints");
    return checkpoints.front();
}

void verify_checkpoint(const fs::path& checkpoint, Verify what) {
    const char* advice = ": the checkpoint is damaged; restore it from a copy or use another one";
    const fs::path path = checkpoint / "manifest.json";
    if (!fs::exists(path)) throw Error(checkpoint.string(), " has no manifest.json", advice);
    const Json manifest = read_json(path);
    if (field<int64_t>(manifest, "format_version", path) > format_version)
        throw Error(checkpoint.string(), " was written by a newer version of this program (",
                    optional_field<std::string>(manifest, "program", "unknown", path),
                    "); use that version, or a newer one");
    const int64_t named = step_of_name(checkpoint.filename().string());
    if (const int64_t step = field<int64_t>(manifest, "step", path);
        step < 0 || (named >= 0 && named != step))
        throw Error(path.string(), " speaks of step ", step, advice);
    const auto files = field<std::map<std::string, Json>>(manifest, "files", path);
    for (const char* name : {"config.json", "model.safetensors", "train_gpt.json"})
        if (!files.count(name)) throw Error(path.string(), " does not list ", name, advice);
    for (const auto& [name, recorded] : files) {
        const fs::path file = checkpoint / name;
        if (what == Verify::model && is_optimizer_file(name)) continue;
        if (what == Verify::choices && name != "choices.json") continue;
        std::error_code code;
        const uintmax_t bytes = fs::is_regular_file(file) ? fs::file_size(file, code) : 0;
        if (code || !fs::is_regular_file(file))
            throw Error(checkpoint.string(), " lacks its file ", name, advice);
        if (bytes != field<uint64_t>(recorded, "bytes", path))
            throw Error(file.string(), " has ", bytes, " bytes instead of ",
                        recorded["bytes"].dump(), advice);
        if (hash_file(file) != field<std::string>(recorded, "xxh3", path))
            throw Error(file.string(), " differs from its hash in manifest.json", advice);
    }
}

int64_t checkpoint_step(const fs::path& checkpoint) {
    return field<int64_t>(read_json(checkpoint / "manifest.json"), "step",
                          checkpoint / "manifest.json");
}

Config checkpoint_config(const fs::path& checkpoint) {
    return load_config(checkpoint / "train_gpt.json", {});
}

void load_training_state(const fs::path& checkpoint, ParameterStore& parameters) {
    std::vector<float> values;
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(checkpoint))
        if (is_optimizer_file(entry.path().filename().string())) files.push_back(entry.path());
    std::vector<int64_t> covered(parameters.parameters().size(), 0);
    for (const fs::path& path : files) {
        const SafetensorsFile file(path);
        for (const auto& [entry, text] : file.metadata()) {
            if (!entry.starts_with(range_prefix)) continue;
            const std::string key = entry.substr(std::strlen(range_prefix)),
                              name = key.substr(0, key.find('['));
            const int i = parameters.index_of(name);
            if (i < 0)
                throw Error(path.string(), " has a tensor ", name, " that this model has not");
            const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
            long long first = -1, end = -1;
            if (std::sscanf(text.c_str(), "%lld-%lld", &first, &end) != 2 || first < 0 ||
                first > end || end > p.numel())
                throw Error(path.string(), " has the impossible range \"", text, "\" for ", name,
                            ", a tensor of ", p.numel(), " elements");
            const Range saved{first, end - first};
            const std::vector<int64_t> shape{saved.n};
            for (const SavedState& state : saved_states) {
                const TensorInfo& tensor = file.at(state.prefix + key, shape);
                for (const ParameterStore::Piece& piece : parameters.pieces_of(i)) {
                    const Range wanted = intersection(piece.range, saved);
                    if (wanted.n == 0) continue;
                    values.resize(static_cast<size_t>(wanted.n));
                    file.read_floats(tensor, values.data(), wanted.first - saved.first, wanted.n);
                    parameters.write(state.state, i, wanted.first, values);
                }
            }
            covered[static_cast<size_t>(i)] += saved.n;
        }
    }
    for (size_t i = 0; i < covered.size(); ++i) {
        const Parameter& p = parameters.parameters()[i];
        if (covered[i] != p.numel())
            throw Error("the optimizer files of ", checkpoint.string(), " hold ", covered[i],
                        " of the ", p.numel(), " elements of ", p.name, ": one of them is missing");
    }
    parameters.clear_padding();
}

GPTShape read_model_shape(const fs::path& directory) {
    const fs::path path = directory / "config.json";
    const Json json = read_json(path);
    if (field<std::string>(json, "model_type", path) != "gpt2")
        throw Error(path.string(), " has model_type = ", json["model_type"].dump(),
                    "; only \"gpt2\" is supported");
    const auto activation =
        optional_field<std::string>(json, "activation_function", "gelu_new", path);
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
        throw Error(path.string(), " has activation_function = \"", activation,
                    "\"; only \"gelu_new\" (tanh approximation) is supported");
    const auto size = [&](const char* key, int64_t most) {
        const int64_t value = field<int64_t>(json, key, path);
        if (value < 1 || value > most)
            throw Error(path.string(), " has ", key, " = ", value, "; it must lie between 1 and ",
                        most);
        return static_cast<int>(value);
    };
    const GPTShape shape{
        .n_layer = size("n_layer", 10000),
        .n_head = size("n_head", 10000),
        .n_embd = size("n_embd", 1 << 20),
        .n_ctx = size(json.contains("n_positions") ? "n_positions" : "n_ctx", 1 << 24),
        .vocab_size = size("vocab_size", 1 << 24)};
    if (shape.n_embd % shape.n_head != 0 || shape.head_size() > 256)
        throw Error(path.string(), " has n_embd = ", shape.n_embd, " and n_head = ", shape.n_head,
                    "; heads must divide channels and be at most 256 wide");
    // What would make the same weights another function.
    const auto only = [&](const char* key, auto supported) {
        if (optional_field(json, key, supported, path) != supported)
            throw Error(path.string(), " has ", key, " = ", json[key].dump(), "; only ",
                        Json(supported).dump(), " is supported");
    };
    only("n_inner", int64_t{4} * shape.n_embd);
    only("layer_norm_epsilon", 1e-5);
    only("scale_attn_weights", true);
    only("scale_attn_by_inverse_layer_idx", false);
    only("tie_word_embeddings", true);
    only("add_cross_attention", false);
    return shape;
}

void require_same_model(const fs::path& checkpoint, const GPTShape& found, const GPTShape& wanted) {
    const auto require = [&](const char* key, int64_t have, int64_t want) {
        if (have != want)
            throw Error("the model in ", checkpoint.string(), " has ", key, " = ", have,
                        ", but the configuration says ", want,
                        "; change the configuration back, or start afresh with another run_dir");
    };
    require("n_layer", found.n_layer, wanted.n_layer);
    require("n_head", found.n_head, wanted.n_head);
    require("n_embd", found.n_embd, wanted.n_embd);
    require("n_ctx", found.n_ctx, wanted.n_ctx);
    require("vocab_size", found.vocab_size, wanted.vocab_size);
}

DType read_model_dtype(const fs::path& directory) {
    const SafetensorsFile file(directory / "model.safetensors");
    return !file.tensors().empty() && file.tensors().front().dtype == "BF16" ? DType::bf16
                                                                             : DType::fp32;
}

void load_weights(const fs::path& directory, ParameterStore& parameters) {
    const SafetensorsFile file(directory / "model.safetensors");
    std::vector<float> values, transposed;
    for (int i = 0; i < static_cast<int>(parameters.parameters().size()); ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        // save_pretrained writes the prefix, the published gpt2 files have none.
        const bool prefixed = file.find(hugging_face_prefix + p.name) != nullptr;
        const TensorInfo& info =
            file.at(prefixed ? hugging_face_prefix + p.name : p.name, hugging_face_shape(p));
        values.resize(static_cast<size_t>(p.numel()));
        file.read_floats(info, values.data());
        if (p.transposed) {
            transposed.resize(values.size());
            transpose(values.data(), p.shape[0], transposed.data(), p.shape[1], p.shape[0]);
            std::swap(values, transposed);
        }
        parameters.set(i, values);
    }
    parameters.clear_padding();
}

}  // namespace train_gpt
