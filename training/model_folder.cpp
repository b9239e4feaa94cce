#include "training/model_folder.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>
#include <memory>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/json_file.h"
#include "training/safetensors.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* prefix = "transformer.";
constexpr const char* weights_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";
constexpr const char* tokenizer_config_name = "tokenizer_config.json";
constexpr const char* tokenizer_files[] = {"tokenizer.json",    "vocab.json",
                                           "merges.txt",        "special_tokens_map.json",
                                           "added_tokens.json", tokenizer_config_name};

struct StoredTypeNames {
    StoredType type;
    const char *safetensors, *torch;
};
constexpr StoredTypeNames type_names[] = {{StoredType::fp32, "F32", "float32"},
                                          {StoredType::bf16, "BF16", "bfloat16"},
                                          {StoredType::fp16, "F16", "float16"}};

const StoredTypeNames& names_of(StoredType type) {
    return *std::find_if(std::begin(type_names), std::end(type_names),
                         [&](const StoredTypeNames& names) { return names.type == type; });
}

std::vector<int64_t> hugging_face_shape(const Parameter& p) {
    return p.transposed ? std::vector<int64_t>{p.shape[1], p.shape[0]} : p.shape;
}

Json config_json(const StoredModel& model, StoredType dtype) {
    const Json end = model.end_of_text ? Json(*model.end_of_text) : Json(nullptr);
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"vocab_size", model.shape.vocab_size},
            {"n_positions", model.shape.n_ctx},
            {"n_ctx", model.shape.n_ctx},
            {"n_embd", model.shape.n_embd},
            {"n_layer", model.shape.n_layer},
            {"n_head", model.shape.n_head},
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
            {"torch_dtype", names_of(dtype).torch}};
}

/// Buffers that older versions of transformers saved: masks that follow from the shape.
bool is_mask(const std::string& name) {
    return name.starts_with("h.") &&
           (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

/// "a", "b", "c" and 4 more
std::string listed(const std::vector<std::string>& names) {
    constexpr size_t most = 3;
    std::string text;
    for (size_t i = 0; i < std::min(most, names.size()); ++i)
        text += (i ? ", " : "") + quoted(names[i]);
    return names.size() > most ? concat(text, " and ", names.size() - most, " more") : text;
}

/// The weights in a folder: all its files, and the place of each tensor, by its name without the
/// prefix.
struct FolderTensors {
    struct Place {
        const SafetensorsFile* file;
        const TensorInfo* info;
    };
    std::vector<std::unique_ptr<SafetensorsFile>> files;
    std::map<std::string, Place> places;

    void add(const fs::path& path, const std::function<void(const TensorInfo&)>& check) {
        const auto& file = files.emplace_back(std::make_unique<SafetensorsFile>(path));
        for (const TensorInfo& info : file->tensors()) {
            check(info);
            const std::string plain = info.name.starts_with(prefix)
                                          ? info.name.substr(std::string(prefix).size())
                                          : info.name;
            const auto [at, is_new] = places.try_emplace(plain, Place{file.get(), &info});
            if (!is_new)
                throw Error(path.string(), " holds ", quoted(info.name), ", which ",
                            at->second.file->path().string(), " holds as ",
                            quoted(at->second.info->name), "; one of them must go");
        }
    }
};

FolderTensors open_tensors(const fs::path& directory) {
    FolderTensors tensors;
    if (fs::exists(directory / weights_name)) {
        tensors.add(directory / weights_name, [](const TensorInfo&) {});
        return tensors;
    }
    const fs::path index = directory / index_name;
    const auto weight_map =
        field<std::map<std::string, std::string>>(read_json(index), "weight_map", index);
    std::set<std::string> files;
    for (const auto& [tensor, file] : weight_map) {
        if (file.empty() || file.find('/') != file.npos || file[0] == '.')
            throw Error(index.string(), " places ", quoted(tensor), " in ", quoted(file),
                        ", which is not the name of a file in its folder; restore the index");
        files.insert(file);
    }
    for (const std::string& file : files) {
        if (!fs::exists(directory / file))
            throw Error(index.string(), " names the file ", quoted(file),
                        ", which is not there; copy or download it too");
        tensors.add(directory / file, [&](const TensorInfo& info) {
            const auto expected = weight_map.find(info.name);
            if (expected == weight_map.end() || expected->second != file)
                throw Error((directory / file).string(), " holds the tensor ", quoted(info.name),
                            ", but ", index.string(), " ",
                            expected == weight_map.end()
                                ? "does not list it"
                                : "places it in " + quoted(expected->second),
                            "; the files do not belong together");
        });
    }
    std::vector<std::string> missing;
    for (const auto& [tensor, name] : weight_map)
        if (std::none_of(tensors.files.begin(), tensors.files.end(),
                         [&tensor = tensor](const auto& file) { return file->find(tensor); }))
            missing.push_back(tensor);
    if (!missing.empty())
        throw Error(index.string(), " lists ", listed(missing), ", which ",
                    missing.size() == 1 ? "is" : "are",
                    " not in the file that it names; the files do not belong together");
    return tensors;
}

/// Throws Error unless both tensors hold the same values.
void require_tied(const fs::path& directory, const FolderTensors::Place& head,
                  const FolderTensors::Place& wte) {
    constexpr int64_t piece = 1 << 18;
    const int64_t n = wte.info->numel();
    bool equal = head.info->shape == wte.info->shape;
    std::vector<float> a, b;
    for (int64_t first = 0; equal && first < n; first += piece) {
        a.resize(static_cast<size_t>(std::min(piece, n - first)));
        b.resize(a.size());
        head.file->read_floats(*head.info, a.data(), first, std::ssize(a));
        wte.file->read_floats(*wte.info, b.data(), first, std::ssize(b));
        equal = a == b;
    }
    if (!equal)
        throw Error(directory.string(), " has a separate output head: lm_head.weight differs from ",
                    wte.info->name,
                    "; only models whose head is tied to the embedding are supported");
}

}  // namespace

bool is_model_folder(const fs::path& directory) {
    return fs::exists(directory / weights_name) || fs::exists(directory / index_name);
}

GPTShape read_model_shape(const fs::path& directory) {
    const fs::path path = directory / "config.json";
    const Json json = read_json(path);
    if (field<std::string>(json, "model_type", path) != "gpt2")
        throw Error(path.string(), " has model_type = ", to_text(json["model_type"]),
                    "; only \"gpt2\" is supported");
    const auto activation =
        optional_field<std::string>(json, "activation_function", "gelu_new", path);
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
        throw Error(path.string(), " has activation_function = \"", activation,
                    "\"; only \"gelu_new\" (tanh approximation) is supported");
    const auto size = [&](const char* key) { return field<int64_t>(json, key, path); };
    const GPTShape shape = checked_shape(
        path.string(), size("n_layer"), size("n_head"), size("n_embd"),
        size(json.contains("n_positions") ? "n_positions" : "n_ctx"), size("vocab_size"));
    // Settings with which the same weights compute another function.
    const auto only = [&](const char* key, auto supported) {
        if (optional_field(json, key, supported, path) != supported)
            throw Error(path.string(), " has ", key, " = ", to_text(json[key]), "; only ",
                        to_text(supported), " is supported");
    };
    only("n_inner", int64_t{4} * shape.n_embd);
    only("layer_norm_epsilon", 1e-5);
    only("scale_attn_weights", true);
    only("scale_attn_by_inverse_layer_idx", false);
    only("tie_word_embeddings", true);
    only("add_cross_attention", false);
    return shape;
}

StoredModel open_model_folder(const fs::path& directory) {
    const GPTShape shape = read_model_shape(directory);
    auto tensors = std::make_shared<const FolderTensors>(open_tensors(directory));
    const auto place = [tensors](const std::string& name) {
        auto found = tensors->places.find(name);
        // Some programs save tied tensors once, under the head's name.
        if (found == tensors->places.end() && name == "wte.weight")
            found = tensors->places.find("lm_head.weight");
        return found == tensors->places.end() ? nullptr : &found->second;
    };

    std::set<std::string> known{"lm_head.weight"}, dtypes;
    std::vector<std::string> missing, unexpected;
    for (const Parameter& p : gpt_parameters(shape)) {
        known.insert(p.name);
        const FolderTensors::Place* at = place(p.name);
        if (!at) {
            missing.push_back(p.name);
            continue;
        }
        at->file->at(at->info->name, hugging_face_shape(p));
        if (std::none_of(std::begin(type_names), std::end(type_names),
                         [&](const auto& names) { return at->info->dtype == names.safetensors; }))
            throw Error(at->file->path().string(), ": tensor ", quoted(at->info->name),
                        " is of dtype ", at->info->dtype, "; only F32, BF16 and F16 are supported");
        dtypes.insert(at->info->dtype);
    }
    for (const auto& [name, at] : tensors->places)
        if (!known.contains(name) && !is_mask(name)) unexpected.push_back(at.info->name);
    if (!missing.empty())
        throw Error(directory.string(),
                    " is missing tensors that its config.json needs: ", listed(missing),
                    "; restore the files, or the config.json that belongs to them");
    if (!unexpected.empty())
        throw Error(directory.string(),
                    " has tensors that a GPT-2 with its config.json does not have: ",
                    listed(unexpected), "; only GPT-2 language models are supported");
    const auto *head = place("lm_head.weight"), *wte = place("wte.weight");
    if (head && head != wte) require_tied(directory, *head, *wte);

    StoredModel model{.shape = shape, .dtype = StoredType::fp32, .end_of_text = {}, .read = {}};
    if (dtypes.size() == 1)  // fp32 holds the values of the others exactly
        for (const StoredTypeNames& names : type_names)
            if (dtypes.contains(names.safetensors)) model.dtype = names.type;
    const Json config = read_json(directory / "config.json");
    if (config.contains("eos_token_id") && config["eos_token_id"].is_number_unsigned())
        model.end_of_text = config["eos_token_id"].get<int64_t>();
    model.read = [tensors, place](const Parameter& p, int64_t first, std::span<float> values) {
        const FolderTensors::Place& at = *place(p.name);
        if (!p.transposed) {
            at.file->read_floats(*at.info, values.data(), first, std::ssize(values));
            return;
        }
        std::vector<float> theirs(values.size());
        at.file->read_floats(*at.info, theirs.data());
        transpose(theirs.data(), p.shape[0], values.data(), p.shape[1], p.shape[0]);
    };
    return model;
}

void require_same_model(const fs::path& directory, const GPTShape& found, const GPTShape& wanted) {
    const auto require = [&](const char* key, int64_t have, int64_t want) {
        if (have != want)
            throw Error("the model in ", directory.string(), " has ", key, " = ", have,
                        ", but the configuration says ", want,
                        "; change the configuration, or choose another run_dir or model.init_from");
    };
    require("n_layer", found.n_layer, wanted.n_layer);
    require("n_head", found.n_head, wanted.n_head);
    require("n_embd", found.n_embd, wanted.n_embd);
    require("n_ctx", found.n_ctx, wanted.n_ctx);
    require("vocab_size", found.vocab_size, wanted.vocab_size);
}

DType read_model_dtype(const fs::path& directory) {
    return open_model_folder(directory).dtype == StoredType::bf16 ? DType::bf16 : DType::fp32;
}

void load_weights(const fs::path& directory, ParameterStore& parameters) {
    load_weights(open_model_folder(directory), parameters);
}

std::vector<std::string> write_model(const fs::path& directory, const StoredModel& model,
                                     StoredType dtype, uint64_t max_file_bytes) {
    write_file(directory / "config.json", to_text(config_json(model, dtype), 2) + "\n");

    // Tensors fill one file after the other; a tensor that no longer fits begins the next file.
    const std::vector<Parameter> parameters = gpt_parameters(model.shape);
    std::vector<std::vector<const Parameter*>> files(1);
    uint64_t total = 0, of_file = 0;
    for (const Parameter& p : parameters) {
        const uint64_t bytes = static_cast<uint64_t>(p.numel()) * size_of(dtype);
        if (max_file_bytes > 0 && of_file > 0 && of_file + bytes > max_file_bytes) {
            files.emplace_back();
            of_file = 0;
        }
        files.back().push_back(&p);
        of_file += bytes;
        total += bytes;
    }

    std::vector<std::string> written{"config.json"};
    Json weight_map = Json::object();
    for (size_t i = 0; i < files.size(); ++i) {
        std::string name = weights_name;
        if (files.size() > 1) {
            char numbered[64];
            std::snprintf(numbered, sizeof numbered, "model-%05zu-of-%05zu.safetensors", i + 1,
                          files.size());
            name = numbered;
        }
        std::vector<TensorInfo> tensors;
        for (const Parameter* p : files[i]) {
            tensors.push_back({.name = prefix + p->name,
                               .dtype = names_of(dtype).safetensors,
                               .shape = hugging_face_shape(*p)});
            weight_map[prefix + p->name] = name;
        }
        SafetensorsWriter writer(directory / name, std::move(tensors));
        for (const Parameter* p : files[i])
            write_parameter(model, *p, dtype, p->transposed,
                            [&](std::span<const std::byte> bytes) { writer.append(bytes); });
        writer.commit();
        written.push_back(name);
    }
    if (files.size() > 1) {
        write_file(
            directory / index_name,
            to_text({{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}}, 2) + "\n");
        written.push_back(index_name);
    }
    return written;
}

namespace {

/// Without this file AutoTokenizer uses the class of the model's kind, which splits text as GPT-2
/// does, whatever tokenizer.json says.
void write_tokenizer_config(const fs::path& path, const Tokenizer& tokenizer, int n_ctx) {
    Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                   {"model_max_length", n_ctx},
                   {"clean_up_tokenization_spaces", false}};
    if (const auto end = tokenizer.end_of_text())
        for (const char* key : {"bos_token", "eos_token", "unk_token"})
            config[key] = std::string(tokenizer.token_bytes(*end));
    write_file(path, to_text(config, 2) + "\n");
}

}  // namespace

std::vector<std::string> write_tokenizer(const fs::path& directory, const Tokenizer& tokenizer,
                                         int n_ctx) {
    tokenizer.save(directory / tokenizer_files[0]);
    write_tokenizer_config(directory / tokenizer_config_name, tokenizer, n_ctx);
    return {tokenizer_files[0], tokenizer_config_name};
}

std::optional<Tokenizer> read_folder_tokenizer(const fs::path& directory) {
    if (!fs::exists(directory / "tokenizer.json") && !fs::exists(directory / "vocab.json"))
        return {};
    return Tokenizer::load(directory);
}

void copy_tokenizer(const fs::path& from, const fs::path& to, int n_ctx) {
    for (const char* name : tokenizer_files)
        if (fs::exists(from / name)) write_file(to / name, MappedFile(from / name).text());
    if (fs::exists(to / tokenizer_config_name)) return;
    if (fs::exists(to / tokenizer_files[0])) {
        write_tokenizer_config(to / tokenizer_config_name, Tokenizer::load(from), n_ctx);
    } else {
        write_tokenizer(to, Tokenizer::load(from), n_ctx);
    }
}

}  // namespace train_gpt
