#include "training/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>

#include <nlohmann/json.hpp>

#include "kernels/error.h"
#include "kernels/file.h"
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

/// The step in "step-00000123", or −1.
int64_t step_of_name(const std::string& name) {
    if (name.size() != 13 || name.compare(0, 5, "step-") != 0) return -1;
    if (name.find_first_not_of("0123456789", 5) != std::string::npos) return -1;
    return std::stoll(name.substr(5));
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
        return json.at(key).get<T>();
    } catch (const Json::exception&) {
        throw Error(path.string(), " has no valid \"", key, "\"; is this the folder of a GPT-2 model or checkpoint?");
    }
}

/// out[c, r] = in[r, c] of a rows × cols matrix.
void transpose(const float* in, float* out, int64_t rows, int64_t cols) {
    constexpr int64_t tile = 32;
#pragma omp parallel for schedule(static)
    for (int64_t r0 = 0; r0 < rows; r0 += tile)
        for (int64_t c0 = 0; c0 < cols; c0 += tile)
            for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r)
                for (int64_t c = c0; c < std::min(cols, c0 + tile); ++c) out[c * rows + r] = in[r * cols + c];
}

std::vector<int64_t> hugging_face_shape(const Parameter& p) {
    return p.transposed ? std::vector<int64_t>{p.shape[1], p.shape[0]} : p.shape;
}

void write_weights(const fs::path& path, const ParameterStore& parameters) {
    const bool rounded = parameters.dtype() == DType::bf16;
    std::vector<TensorInfo> tensors;
    for (const Parameter& p : parameters.parameters())
        tensors.push_back({.name = hugging_face_prefix + p.name,
                           .dtype = rounded ? "BF16" : "F32",
                           .shape = hugging_face_shape(p)});
    SafetensorsWriter writer(path, std::move(tensors));
    std::vector<float> values, transposed;
    std::vector<bf16> halves;
    for (int i = 0; i < static_cast<int>(parameters.parameters().size()); ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        values.resize(static_cast<size_t>(p.numel()));
        parameters.get(i, values);
        if (p.transposed) {
            transposed.resize(values.size());
            transpose(values.data(), transposed.data(), p.shape[0], p.shape[1]);
            std::swap(values, transposed);
        }
        if (rounded) {
            halves.resize(values.size());
            std::transform(values.begin(), values.end(), halves.begin(), [](float v) { return bf16(v); });
            writer.append(std::as_bytes(std::span(halves)));
        } else {
            writer.append(std::as_bytes(std::span(values)));
        }
    }
    writer.commit();
}

void write_optimizer(const fs::path& path, const ParameterStore& parameters) {
    std::vector<TensorInfo> tensors;
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    for (const char* kind : {"master/", "m/", "v/"})
        for (const Parameter& p : parameters.parameters())
            tensors.push_back({.name = kind + p.name, .dtype = "F32", .shape = {p.numel()}});
    for (const Parameter& p : parameters.parameters())
        metadata["range/" + p.name] = "0-" + std::to_string(p.numel());
    SafetensorsWriter writer(path, std::move(tensors), metadata);
    const int count = static_cast<int>(parameters.parameters().size());
    for (auto state : {&ParameterStore::master, &ParameterStore::moment1, &ParameterStore::moment2})
        for (int i = 0; i < count; ++i) {
            const size_t n = static_cast<size_t>(parameters.parameters()[static_cast<size_t>(i)].numel());
            writer.append(std::as_bytes(std::span((parameters.*state)(i), n)));
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

fs::path save_checkpoint(const fs::path& run_dir, int64_t step, const Config& config, const GPTShape& shape,
                         const ParameterStore& parameters, const Tokenizer* tokenizer) {
    const fs::path final_path = run_dir / step_name(step);
    const fs::path directory = run_dir / (step_name(step) + ".tmp");
    fs::remove_all(directory);
    make_directory(directory);
    try {
        write_weights(directory / "model.safetensors", parameters);
        write_optimizer(directory / "optimizer-00000-of-00001.safetensors", parameters);
        write_file(directory / "config.json", hugging_face_config(shape, parameters.dtype(), tokenizer).dump(2) + "\n");
        write_file(directory / "train_gpt.json", to_json(config));
        if (tokenizer) tokenizer->save(directory / "tokenizer.json");

        Json manifest = {{"format", "train_gpt checkpoint"},
                         {"format_version", format_version},
                         {"program", version()},
                         {"step", step},
                         {"files", Json::object()}};
        std::vector<fs::path> files;
        for (const auto& entry : fs::directory_iterator(directory)) files.push_back(entry.path());
        std::sort(files.begin(), files.end());
        for (const fs::path& file : files)
            manifest["files"][file.filename().string()] = {{"bytes", fs::file_size(file)}, {"xxh3", hash_file(file)}};
        write_file(directory / "manifest.json", manifest.dump(2) + "\n");
        sync_directory(directory);

        // A checkpoint of the same step (the run was resumed from an older one) gives way.
        fs::remove_all(final_path);
        fs::rename(directory, final_path);
        sync_directory(run_dir);
    } catch (const fs::filesystem_error& error) {
        std::error_code ignored;
        fs::remove_all(directory, ignored);
        throw Error("cannot write the checkpoint ", final_path.string(), ": ", error.code().message());
    } catch (...) {
        std::error_code ignored;
        fs::remove_all(directory, ignored);
        throw;
    }
    return final_path;
}

std::vector<fs::path> list_checkpoints(const fs::path& run_dir) {
    std::vector<fs::path> found;
    if (!fs::is_directory(run_dir)) return found;
    for (const auto& entry : fs::directory_iterator(run_dir))
        if (step_of_name(entry.path().filename().string()) >= 0 && fs::exists(entry.path() / "manifest.json"))
            found.push_back(entry.path());
    std::sort(found.rbegin(), found.rend());
    return found;
}

void prune_checkpoints(const fs::path& run_dir, int keep) {
    std::error_code ignored;
    std::vector<fs::path> doomed;
    for (const auto& entry : fs::directory_iterator(run_dir)) {
        const std::string name = entry.path().filename().string();
        if (entry.path().extension() == ".tmp" && step_of_name(entry.path().stem().string()) >= 0)
            doomed.push_back(entry.path());
    }
    const auto checkpoints = list_checkpoints(run_dir);
    for (size_t i = static_cast<size_t>(keep); keep > 0 && i < checkpoints.size(); ++i) {
        // Without its manifest it is no checkpoint any more, whatever interrupts the rest.
        fs::remove(checkpoints[i] / "manifest.json", ignored);
        doomed.push_back(checkpoints[i]);
    }
    for (const fs::path& path : doomed) fs::remove_all(path, ignored);
}

fs::path find_checkpoint(const fs::path& path) {
    if (!fs::exists(path)) throw Error("there is no checkpoint at ", path.string(), "; check the path");
    if (fs::exists(path / "model.safetensors")) return path;
    const auto checkpoints = list_checkpoints(path);
    if (checkpoints.empty())
        throw Error(path.string(), " holds no complete checkpoint (no model.safetensors and no step-NNNNNNNN folder)",
                    "; name a run's folder or one of its checkpoints");
    return checkpoints.front();
}

void verify_checkpoint(const fs::path& checkpoint) {
    const fs::path path = checkpoint / "manifest.json";
    const Json manifest = read_json(path);
    if (field<int>(manifest, "format_version", path) > format_version)
        throw Error(checkpoint.string(), " was written by a newer version of this program (",
                    manifest.value("program", "unknown"), "); use that version, or a newer one");
    const Json files = field<Json>(manifest, "files", path);
    for (const auto& [name, recorded] : files.items()) {
        const fs::path file = checkpoint / name;
        if (!fs::exists(file)) throw Error("the checkpoint ", checkpoint.string(), " lacks its file ", name);
        if (fs::file_size(file) != field<uint64_t>(recorded, "bytes", path))
            throw Error(file.string(), " has ", fs::file_size(file), " bytes instead of ",
                        recorded["bytes"].dump(), ": the checkpoint is damaged");
        if (hash_file(file) != field<std::string>(recorded, "xxh3", path))
            throw Error(file.string(), " differs from the hash in manifest.json: the checkpoint is damaged");
    }
}

int64_t checkpoint_step(const fs::path& checkpoint) {
    return field<int64_t>(read_json(checkpoint / "manifest.json"), "step", checkpoint / "manifest.json");
}

Config checkpoint_config(const fs::path& checkpoint) { return load_config(checkpoint / "train_gpt.json", {}); }

void load_training_state(const fs::path& checkpoint, ParameterStore& parameters) {
    std::vector<float> values;
    const auto files = glob_files((checkpoint / "optimizer-*-of-*.safetensors").string());
    const int count = static_cast<int>(parameters.parameters().size());
    std::vector<int64_t> covered(static_cast<size_t>(count), 0);
    for (const fs::path& path : files) {
        const SafetensorsFile file(path);
        for (int i = 0; i < count; ++i) {
            const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
            const auto range = file.metadata().find("range/" + p.name);
            if (range == file.metadata().end()) continue;
            long long first = -1, end = -1;
            if (std::sscanf(range->second.c_str(), "%lld-%lld", &first, &end) != 2 || first < 0 || first > end ||
                end > p.numel())
                throw Error(path.string(), " has the impossible range \"", range->second, "\" for ", p.name,
                            ", a tensor of ", p.numel(), " elements");
            const std::vector<int64_t> shape{end - first};
            file.read_floats(file.at("master/" + p.name, shape), parameters.master(i) + first);
            file.read_floats(file.at("m/" + p.name, shape), parameters.moment1(i) + first);
            file.read_floats(file.at("v/" + p.name, shape), parameters.moment2(i) + first);
            covered[static_cast<size_t>(i)] += end - first;
        }
    }
    for (int i = 0; i < count; ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        if (covered[static_cast<size_t>(i)] != p.numel())
            throw Error("the optimizer files of ", checkpoint.string(), " hold ", covered[static_cast<size_t>(i)],
                        " of the ", p.numel(), " elements of ", p.name, ": one of them is missing");
        values.assign(parameters.master(i), parameters.master(i) + p.numel());
        parameters.set(i, values);
        for (float* moment : {parameters.moment1(i), parameters.moment2(i)})
            std::fill(moment + p.numel(), moment + p.padded_numel(), 0.0f);
    }
}

GPTShape read_model_shape(const fs::path& directory) {
    const fs::path path = directory / "config.json";
    const Json json = read_json(path);
    if (field<std::string>(json, "model_type", path) != "gpt2")
        throw Error(path.string(), " describes a model of type ", json["model_type"].dump(), "; only gpt2 is supported");
    const std::string activation = json.value("activation_function", "gelu_new");
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
        throw Error(path.string(), " asks for the activation function \"", activation,
                    "\"; only gelu_new (tanh approximation) is supported");
    const GPTShape shape{.n_layer = field<int>(json, "n_layer", path),
                         .n_head = field<int>(json, "n_head", path),
                         .n_embd = field<int>(json, "n_embd", path),
                         .n_ctx = json.contains("n_positions") ? field<int>(json, "n_positions", path)
                                                               : field<int>(json, "n_ctx", path),
                         .vocab_size = field<int64_t>(json, "vocab_size", path)};
    const auto in_range = [&](const char* name, int64_t value, int64_t most) {
        if (value < 1 || value > most)
            throw Error(path.string(), " has ", name, " = ", value, "; it must lie between 1 and ", most);
    };
    in_range("n_layer", shape.n_layer, 10000);
    in_range("n_head", shape.n_head, 10000);
    in_range("n_embd", shape.n_embd, 1 << 20);
    in_range("n_positions", shape.n_ctx, 1 << 24);
    in_range("vocab_size", shape.vocab_size, 1 << 24);
    if (shape.n_embd % shape.n_head != 0 || shape.head_size() > 256)
        throw Error(path.string(), " has n_embd = ", shape.n_embd, " and n_head = ", shape.n_head,
                    "; heads must divide channels and be at most 256 wide");
    if (json.contains("n_inner") && !json["n_inner"].is_null() && json["n_inner"] != 4 * shape.n_embd)
        throw Error(path.string(), " has n_inner = ", json["n_inner"].dump(), "; only 4·n_embd is supported");
    if (std::fabs(json.value("layer_norm_epsilon", 1e-5) - 1e-5) > 1e-9)
        throw Error(path.string(), " has layer_norm_epsilon = ", json["layer_norm_epsilon"].dump(),
                    "; only 1e-5 is supported");
    return shape;
}

void require_same_model(const fs::path& checkpoint, const GPTShape& found, const GPTShape& wanted) {
    const auto require = [&](const char* key, int64_t have, int64_t want) {
        if (have != want)
            throw Error("the model in ", checkpoint.string(), " has ", key, " = ", have, ", but the configuration says ",
                        want, "; change the configuration back, or start afresh with another run_dir");
    };
    require("n_layer", found.n_layer, wanted.n_layer);
    require("n_head", found.n_head, wanted.n_head);
    require("n_embd", found.n_embd, wanted.n_embd);
    require("n_ctx", found.n_ctx, wanted.n_ctx);
    require("vocab_size", found.vocab_size, wanted.vocab_size);
}

DType read_model_dtype(const fs::path& directory) {
    const SafetensorsFile file(directory / "model.safetensors");
    return !file.tensors().empty() && file.tensors().front().dtype == "BF16" ? DType::bf16 : DType::fp32;
}

void load_weights(const fs::path& directory, ParameterStore& parameters) {
    const SafetensorsFile file(directory / "model.safetensors");
    std::vector<float> values, transposed;
    for (int i = 0; i < static_cast<int>(parameters.parameters().size()); ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        // save_pretrained writes the prefix, the published gpt2 files have none.
        const bool prefixed = file.find(hugging_face_prefix + p.name) != nullptr;
        const TensorInfo& info = file.at(prefixed ? hugging_face_prefix + p.name : p.name, hugging_face_shape(p));
        values.resize(static_cast<size_t>(p.numel()));
        file.read_floats(info, values.data());
        if (p.transposed) {
            transposed.resize(values.size());
            transpose(values.data(), transposed.data(), p.shape[1], p.shape[0]);
            std::swap(values, transposed);
        }
        parameters.set(i, values);
    }
}

}  // namespace train_gpt
