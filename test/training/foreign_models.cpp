#include "test/training/foreign_models.h"

#include <cmath>
#include <cstring>
#include <span>

#include "base/half.h"
#include "model/families/gpt2.h"
#include "test/catch.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/text.h"

namespace train_gpt::foreign_models {

const char* safetensors_name(StoredType type) {
    return type == StoredType::fp32 ? "F32" : type == StoredType::bf16 ? "BF16" : "F16";
}

float rounded(float value, StoredType type) {
    return type == StoredType::fp32   ? value
           : type == StoredType::bf16 ? to_float(bf16(value))
                                      : static_cast<float>(fp16(value));
}

std::string bytes_of(const std::vector<float>& values, StoredType type) {
    std::string bytes(values.size() * size_of(type), '\0');
    for (size_t i = 0; i < values.size(); ++i) {
        const bf16 brain(values[i]);
        const fp16 half(values[i]);
        const void* from = type == StoredType::fp32   ? static_cast<const void*>(&values[i])
                           : type == StoredType::bf16 ? static_cast<const void*>(&brain)
                                                      : &half;
        std::memcpy(bytes.data() + i * size_of(type), from, size_of(type));
    }
    return bytes;
}

Numbers random_numbers(StoredType type) {
    const int n_head = static_cast<int>(random_int(1, 3));
    Numbers model{.spec = gpt2.spec({.n_layer = static_cast<int>(random_int(1, 11)),
                                     .n_head = n_head,
                                     .n_embd = n_head * static_cast<int>(random_int(1, 3)) * 4,
                                     .n_ctx = static_cast<int>(random_int(3, 20)),
                                     .vocab_size = random_int(50, 300)}),
                  .type = type,
                  .values = {}};
    for (const Parameter& p : registry_of(model.spec).parameters) {
        std::vector<float> values =
            random_normal(static_cast<size_t>(p.numel()), p.name.ends_with("bias") ? 1e-6f : 1);
        for (float& value : values) value = rounded(value, type);
        values[0] = -0.0f;
        model.values[p.name] = values;
    }
    return model;
}

std::vector<int64_t> hugging_face_shape(const Parameter& p) {
    return p.reordered() ? std::vector<int64_t>{p.shape[1], p.shape[0]} : p.shape;
}

std::vector<float> hugging_face_values(const Parameter& p, const std::vector<float>& ours) {
    if (!p.reordered()) return ours;
    std::vector<float> theirs;
    for (int64_t in = 0; in < p.shape[1]; ++in)
        for (int64_t out = 0; out < p.shape[0]; ++out)
            theirs.push_back(ours[static_cast<size_t>(out * p.shape[1] + in)]);
    return theirs;
}

Tensors tensors_of(const Numbers& model, const std::string& prefix) {
    Tensors tensors;
    for (const Parameter& p : registry_of(model.spec).parameters)
        tensors.push_back({prefix + p.name, safetensors_name(model.type),
                           bytes_of(hugging_face_values(p, model.values.at(p.name)), model.type),
                           hugging_face_shape(p)});
    return tensors;
}

void write_tensors(const fs::path& path, const Tensors& tensors) {
    std::vector<TensorInfo> infos;
    for (const ForeignTensor& tensor : tensors)
        infos.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    SafetensorsWriter writer(path, infos);
    for (const ForeignTensor& tensor : tensors)
        writer.append(std::as_bytes(std::span(tensor.bytes)));
    writer.commit();
}

Json config_of(const DecoderSpec& spec) {
    return {
        {"model_type", "gpt2"},  {"n_layer", spec.n_layer},   {"n_head", spec.n_head},
        {"n_embd", spec.n_embd}, {"n_positions", spec.n_ctx}, {"vocab_size", spec.vocab_size},
        {"attn_pdrop", 0.1},     {"eos_token_id", 7},         {"reorder_and_upcast_attn", true}};
}

fs::path write_folder(const fs::path& folder, const Numbers& model, const std::string& prefix) {
    fs::create_directories(folder);
    write(folder / "config.json", config_of(model.spec).dump());
    write_tensors(folder / "model.safetensors", tensors_of(model, prefix));
    return folder;
}

fs::path write_shards(const fs::path& folder, const DecoderSpec& spec, const Tensors& tensors,
                      int files) {
    fs::create_directories(folder);
    write(folder / "config.json", config_of(spec).dump());
    std::vector<Tensors> of_file(static_cast<size_t>(files));
    Json weight_map = Json::object();
    for (const ForeignTensor& tensor : tensors) {
        const auto file = static_cast<size_t>(random_int(0, files - 1));
        of_file[file].push_back(tensor);
        weight_map[tensor.name] = "part-" + std::to_string(file) + ".safetensors";
    }
    for (int i = 0; i < files; ++i)
        write_tensors(folder / ("part-" + std::to_string(i) + ".safetensors"),
                      of_file[static_cast<size_t>(i)]);
    write(folder / "model.safetensors.index.json", Json{{"weight_map", weight_map}}.dump());
    return folder;
}

void check_holds(const StoredModel& stored, const Numbers& model) {
    REQUIRE(registry_of(stored.spec).parameters.size() == model.values.size());
    CHECK(stored.spec.n_head == model.spec.n_head);
    for (const Parameter& p : registry_of(model.spec).parameters) {
        CAPTURE(p.name);
        const std::vector<float>& wanted = model.values.at(p.name);
        std::vector<float> values(wanted.size(), NAN);
        stored.read(p, 0, values);
        CHECK(std::memcmp(values.data(), wanted.data(), wanted.size() * sizeof(float)) == 0);
        if (p.reordered()) continue;
        const int64_t first = random_int(0, p.numel() - 1), n = random_int(1, p.numel() - first);
        values.assign(static_cast<size_t>(n), NAN);
        stored.read(p, first, values);
        CHECK(std::memcmp(values.data(), wanted.data() + first,
                          static_cast<size_t>(n) * sizeof(float)) == 0);
    }
}

std::map<std::string, std::string> raw_tensors(const fs::path& folder) {
    std::map<std::string, std::string> raw;
    for (const auto& entry : fs::directory_iterator(folder)) {
        if (entry.path().extension() != ".safetensors") continue;
        const SafetensorsFile file(entry.path());
        for (const TensorInfo& info : file.tensors()) {
            const auto data = file.data(info);
            raw[info.name] = info.dtype + Json(info.shape).dump() +
                             std::string(reinterpret_cast<const char*>(data.data()), data.size());
        }
    }
    return raw;
}

std::map<std::string, std::string> files_of(const fs::path& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(folder))
        files[entry.path().filename().string()] = read(entry.path());
    return files;
}

std::string llmc_bytes(const Numbers& model, int64_t padded) {
    const DecoderSpec& spec = model.spec;
    std::vector<int32_t> header(256, 0);
    header[0] = 20240326;
    header[1] = model.type == StoredType::fp32 ? 3 : 5;
    header[2] = spec.n_ctx;
    header[3] = static_cast<int32_t>(spec.vocab_size);
    header[4] = spec.n_layer;
    header[5] = spec.n_head;
    header[6] = spec.n_embd;
    header[7] = static_cast<int32_t>(padded);
    std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
    const auto add = [&](const std::string& name) {
        bytes += bytes_of(model.values.at(name), model.type);
    };
    add("wte.weight");
    bytes.append(
        static_cast<size_t>((padded - spec.vocab_size) * spec.n_embd) * size_of(model.type), '\0');
    add("wpe.weight");
    for (const char* part :
         {"ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias",
          "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight",
          "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"})
        for (int layer = 0; layer < spec.n_layer; ++layer)
            add("h." + std::to_string(layer) + "." + part);
    add("ln_f.weight");
    add("ln_f.bias");
    return bytes;
}

Numbers save_bf16_checkpoint(const fs::path& run, const Tokenizer* tokenizer) {
    Numbers masters = random_numbers(StoredType::fp32);
    TinyModel model(masters.spec, 1, 2, DType::bf16);
    for (int i = 0; i < model.count(); ++i) {
        model.parameters->state.set(i, masters.values.at(model.parameter(i).name));
        for (const auto moment : {"m", "v"}) model.set_state(moment, i, 0);
    }
    save_checkpoint(run, {1, Config{}, masters.spec, *model.parameters, tokenizer});
    return masters;
}

Numbers rounded(Numbers model, StoredType type) {
    for (auto& [name, values] : model.values)
        for (float& value : values) value = rounded(value, type);
    model.type = type;
    return model;
}

}  // namespace train_gpt::foreign_models
