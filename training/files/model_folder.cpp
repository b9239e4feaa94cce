#include "training/files/model_folder.h"

#include <algorithm>
#include <cassert>
#include <cctype>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/file.h"
#include "base/json_file.h"
#include "model/families/expert_config.h"
#include "model/families/family.h"
#include "training/files/matrix_layout.h"
#include "training/files/safetensors.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* weights_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";
constexpr const char* generation_config_name = "generation_config.json";
constexpr const char* tokenizer_config_name = "tokenizer_config.json";
constexpr const char* tokenizer_files[] = {
    "tokenizer.json",    "vocab.json",          "merges.txt",         "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", tokenizer_config_name};

/// The shape of a tensor as files hold it.
std::vector<int64_t> shape_in_files(const Parameter& p, const StoredTensor& stored) {
    std::vector<int64_t> shape;
    if (stored.stacked > 0) shape.push_back(stored.stacked);
    const int64_t rows = stored.matrix_rows();
    if (stored.transposed)
        shape.insert(shape.end(), {p.cols(), rows});
    else
        shape.push_back(rows);
    if (p.shape.size() > 1 && !stored.transposed) shape.push_back(p.cols());
    return shape;
}

Json config_json(const StoredModel& model, StoredType dtype) {
    Json config = model.spec.family->config(model.spec);
    config.update(parse_json(model.tokens.config));
    config["torch_dtype"] = names_of(dtype).torch;
    return config;
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
    std::string prefix;  // which names may have or lack
    std::vector<std::unique_ptr<SafetensorsFile>> files;
    std::map<std::string, Place> places;

    /// Null if there is none. Some programs save a tied tensor once, under the other's name.
    const Place* find(const Parameter& p, const StoredTensor& stored) const {
        if (const auto found = places.find(stored.name); found != places.end())
            return &found->second;
        for (const std::string& alias : p.aliases)
            if (const auto found = places.find(alias); found != places.end()) return &found->second;
        return nullptr;
    }

    /// The tensors that hold the parameter here.
    const std::vector<StoredTensor>& stored(const Parameter& p) const {
        const bool other = !p.or_stored.empty() && places.contains(p.or_stored[0].name);
        return other ? p.or_stored : p.stored;
    }

    /// Throws Error if files hold the parameter in both of its layouts.
    void require_one_layout(const Parameter& p) const {
        if (p.or_stored.empty() || !places.contains(p.or_stored[0].name)) return;
        for (const StoredTensor& stored : p.stored)
            if (const auto other = places.find(stored.name); other != places.end())
                throw Error(other->second.file->path().string(), " holds ", quoted(stored.name),
                            ", but ", quoted(p.or_stored[0].name), " in ",
                            places.at(p.or_stored[0].name).file->path().string(),
                            " has the same experts in one tensor; remove one of them");
    }

    void add(const fs::path& path, const std::function<void(const TensorInfo&)>& check) {
        const auto& file = files.emplace_back(std::make_unique<SafetensorsFile>(path));
        for (const TensorInfo& info : file->tensors()) {
            check(info);
            const std::string plain =
                info.name.starts_with(prefix) ? info.name.substr(prefix.size()) : info.name;
            const auto [at, is_new] = places.try_emplace(plain, Place{file.get(), &info});
            if (!is_new)
                throw Error(path.string(), " holds ", quoted(info.name), ", which ",
                            at->second.file->path().string(), " holds as ",
                            quoted(at->second.info->name), "; remove one of them");
        }
    }
};

FolderTensors open_tensors(const fs::path& directory, const Family& family) {
    FolderTensors tensors{.prefix = family.prefix, .files = {}, .places = {}};
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
                  const FolderTensors::Place& embedding) {
    constexpr int64_t piece = 1 << 18;
    const int64_t n = embedding.info->numel();
    bool equal = head.info->shape == embedding.info->shape;
    std::vector<float> a, b;
    for (int64_t first = 0; equal && first < n; first += piece) {
        a.resize(static_cast<size_t>(std::min(piece, n - first)));
        b.resize(a.size());
        head.file->read_floats(*head.info, a.data(), first, std::ssize(a));
        embedding.file->read_floats(*embedding.info, b.data(), first, std::ssize(b));
        equal = a == b;
    }
    if (!equal)
        throw Error(directory.string(), " has a separate output head: ", head.info->name,
                    " differs from ", embedding.info->name,
                    ", although by its config.json they are one; the files do not belong "
                    "together");
}

}  // namespace

bool is_model_folder(const fs::path& directory) {
    return fs::exists(directory / weights_name) || fs::exists(directory / index_name);
}

DecoderSpec read_model_spec(const fs::path& directory) {
    const fs::path path = directory / "config.json";
    const Json json = read_json(path);
    refuse_unsupported_parts(json, path);
    return family_of(field<std::string>(json, "model_type", path), path.string())
        .read_config(json, path);
}

StoredModel open_model_folder(const fs::path& directory) {
    return open_model_folder(directory, read_model_spec(directory));
}

StoredModel open_model_folder(const fs::path& directory, const DecoderSpec& spec) {
    const Family& family = *spec.family;
    auto tensors = std::make_shared<const FolderTensors>(open_tensors(directory, family));

    for (const auto& [name, at] : tensors->places)
        if (name.ends_with("_blocks") || name.ends_with("_scales"))
            throw Error(at.file->path().string(), " holds MXFP4 weights (", at.info->name,
                        "); weights must be fp32, bf16 or fp16: load the model in transformers "
                        "with quantization_config=Mxfp4Config(dequantize=True) and save it");

    std::set<std::string> known, dtypes;
    std::vector<std::string> missing, unexpected;
    for (const Parameter& p : registry_of(spec).parameters) {
        tensors->require_one_layout(p);
        known.insert(p.aliases.begin(), p.aliases.end());
        for (const StoredTensor& stored : tensors->stored(p)) {
            known.insert(stored.name);
            const FolderTensors::Place* at = tensors->find(p, stored);
            if (!at) {
                missing.push_back(stored.name);
                continue;
            }
            at->file->at(at->info->name, shape_in_files(p, stored));
            if (std::ranges::none_of(stored_type_names, [&](const StoredTypeNames& names) {
                    return at->info->dtype == names.safetensors;
                }))
                throw Error(at->file->path().string(), ": tensor ", quoted(at->info->name),
                            " is of dtype ", at->info->dtype,
                            "; only F32, BF16 and F16 are supported");
            dtypes.insert(at->info->dtype);
            for (const std::string& alias : p.aliases)
                if (const auto other = tensors->places.find(alias);
                    other != tensors->places.end() && &other->second != at)
                    require_tied(directory, other->second, *at);
        }
    }
    for (const auto& [name, at] : tensors->places)
        if (!known.contains(name) && !family.is_buffer(name)) unexpected.push_back(at.info->name);
    if (!missing.empty())
        throw Error(directory.string(),
                    " is missing tensors that its config.json needs: ", listed(missing),
                    "; restore the files, or the config.json that belongs to them");
    if (!unexpected.empty())
        throw Error(directory.string(), " has tensors that ", with_article(family),
                    " with its config.json does not have: ", listed(unexpected), "; only ",
                    family.title, " language models are supported");

    StoredModel model{
        .spec = spec, .dtype = StoredType::fp32, .tokens = read_token_ids(directory), .read = {}};
    if (dtypes.size() == 1)  // fp32 holds the values of the others exactly
        for (const StoredTypeNames& names : stored_type_names)
            if (dtypes.contains(names.safetensors)) model.dtype = names.type;
    model.read = [tensors](const Parameter& p, int64_t first, std::span<float> values) {
        const Range wanted{first, std::ssize(values)};
        int64_t begin = 0;  // of the rows that a stored tensor holds, in elements
        for (const StoredTensor& stored : tensors->stored(p)) {
            const Range held{begin, stored.rows * p.cols()}, part = intersection(held, wanted);
            begin = held.end();
            if (part.n == 0) continue;
            const FolderTensors::Place& at = *tensors->find(p, stored);
            float* out = values.data() + (part.first - first);
            if (!stored.reordered()) {
                at.file->read_floats(*at.info, out, part.first - held.first, part.n);
                continue;
            }
            const int64_t rows = stored.matrix_rows(), n = rows * p.cols();
            assert((part.first - held.first) % n == 0 && part.n % n == 0);
            const MatrixLayout layout{rows, p.cols(), stored.transposed, stored.interleaved};
            std::vector<float> theirs(static_cast<size_t>(n));
            for (int64_t done = 0; done < part.n; done += n) {
                at.file->read_floats(*at.info, theirs.data(), part.first - held.first + done, n);
                matrix_from_file(layout, theirs.data(), out + done);
            }
        }
    };
    return model;
}

std::vector<std::string> write_model(const fs::path& directory, const StoredModel& model,
                                     StoredType dtype, uint64_t max_file_bytes) {
    write_file(directory / "config.json", to_text(config_json(model, dtype), 2) + "\n");

    // Tensors fill one file after the other; a tensor that no longer fits begins the next file.
    struct Written {
        const Parameter* parameter;
        const StoredTensor* stored;
        Range rows;  // of the parameter
    };
    const Registry registry = registry_of(model.spec);
    const std::string prefix = model.spec.family->prefix;
    std::vector<std::vector<Written>> files(1);
    uint64_t total = 0, of_file = 0;
    for (const Parameter& p : registry.parameters) {
        int64_t row = 0;
        for (const StoredTensor& stored : p.stored) {
            const uint64_t bytes = static_cast<uint64_t>(stored.rows * p.cols()) * size_of(dtype);
            if (max_file_bytes > 0 && of_file > 0 && of_file + bytes > max_file_bytes) {
                files.emplace_back();
                of_file = 0;
            }
            files.back().push_back({&p, &stored, {row, stored.rows}});
            row += stored.rows;
            of_file += bytes;
            total += bytes;
        }
    }

    std::vector<std::string> written{"config.json"};
    if (!model.tokens.generation.empty()) {
        write_file(directory / generation_config_name, model.tokens.generation);
        written.emplace_back(generation_config_name);
    }
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
        for (const Written& w : files[i]) {
            tensors.push_back({.name = prefix + w.stored->name,
                               .dtype = names_of(dtype).safetensors,
                               .shape = shape_in_files(*w.parameter, *w.stored)});
            weight_map[tensors.back().name] = name;
        }
        SafetensorsWriter writer(directory / name, std::move(tensors));
        for (const Written& w : files[i])
            write_parameter(model, *w.parameter, w.rows, dtype, *w.stored,
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

/// Without this file AutoTokenizer uses the class of the model's kind, which splits text as that
/// model does, whatever tokenizer.json says.
void write_tokenizer_config(const fs::path& path, const Tokenizer& tokenizer, int n_ctx) {
    Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                   {"model_max_length", n_ctx},
                   {"clean_up_tokenization_spaces", false}};
    const auto set = [&](const char* key, std::optional<uint32_t> id) {
        if (id) config[key] = std::string(tokenizer.token_bytes(*id));
    };
    set("bos_token", tokenizer.document_boundary());
    set("eos_token", tokenizer.end_of_text());
    set("unk_token", tokenizer.end_of_text());
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
