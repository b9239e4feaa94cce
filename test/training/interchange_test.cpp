// Models in and out: Hugging Face's folders, llm.c's files, the commands import and export. Tests
// write what the program reads, and read what it writes, with their own code (foreign_models.h).
#include "training/files/interchange.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "base/half.h"
#include "base/json_file.h"
#include "model/families/family.h"
#include "test/catch.h"
#include "test/file_difference.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/text.h"
#include "test/training/foreign_models.h"
#include "training/files/llmc_model.h"
#include "training/files/model_folder.h"
#include "training/files/safetensors.h"
#include "training/files/same_model.h"

using namespace train_gpt;
using namespace train_gpt::foreign_models;

TEST_CASE("every half survives a float, and floats become the nearest half, ties even",
          "[interchange]") {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        fp16 half;
        half.bits = static_cast<uint16_t>(bits);
        const float value = static_cast<float>(half);
        if ((bits & 0x7c00u) == 0x7c00u && (bits & 0x3ffu))
            REQUIRE((std::isnan(value) && std::isnan(static_cast<float>(fp16(value)))));
        else
            REQUIRE(fp16(value).bits == bits);
    }
    const auto value_of = [](int bits) {  // also one beyond the largest: 65536
        return bits == 0x7c00 ? 65536.0
                              : std::ldexp((bits & 0x3ff) + (bits >> 10 ? 1024 : 0),
                                           (bits >> 10 ? bits >> 10 : 1) - 25);
    };
    for (int i = 0; i < 100000; ++i) {
        const int lower = static_cast<int>(random_int(0, 0x7bff));
        const double a = value_of(lower), b = value_of(lower + 1), middle = (a + b) / 2;
        const float tie = static_cast<float>(middle);
        REQUIRE(double{tie} == middle);
        const int even = lower + (lower & 1);
        const float sign = random_int(0, 1) ? 1.0f : -1.0f;
        const int sign_bit = sign < 0 ? 0x8000 : 0;
        CAPTURE(lower, sign);
        REQUIRE(fp16(sign * tie).bits == (even | sign_bit));
        REQUIRE(fp16(sign * std::nextafter(tie, 0.0f)).bits == (lower | sign_bit));
        REQUIRE(fp16(sign * std::nextafter(tie, 1e6f)).bits == ((lower + 1) | sign_bit));
    }
}

TEST_CASE("a Hugging Face folder is read exactly: any dtype, prefix, number of files",
          "[interchange]") {
    for (StoredType type : stored_types)
        for (const std::string prefix : {"", "transformer."})
            for (int files : {1, static_cast<int>(random_int(2, 5))}) {
                CAPTURE(name_of(type), prefix, files);
                const TemporaryDirectory directory;
                const Numbers model = random_numbers(type);
                Tensors tensors = tensors_of(model, prefix);
                // What older versions write besides the weights
                tensors.push_back({prefix + "h.0.attn.bias", "BOOL", "x", {1, 1, 1, 1}});
                tensors.push_back({prefix + "h.0.attn.masked_bias", "F32", "abcd", {}});
                const auto wte = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) {
                    return t.name == prefix + "wte.weight";
                });
                switch (random_int(0, 2)) {
                    case 0:
                        tensors.push_back({"lm_head.weight", wte->dtype, wte->bytes, wte->shape});
                        break;
                    case 1:
                        wte->name = "lm_head.weight";  // alone
                }
                std::shuffle(tensors.begin(), tensors.end(), test_rng());
                const fs::path folder =
                    write_shards(directory / "model", model.spec, tensors, files);
                CHECK(find_checkpoint(folder) == folder);
                const StoredModel stored = open_model_folder(folder);
                CHECK(stored.dtype == type);
                CHECK(ends_of_text(stored.tokens) == std::vector<int64_t>{7});
                check_holds(stored, model);
            }
    // Of several dtypes the one that holds all
    const TemporaryDirectory directory;
    const Numbers model = random_numbers(StoredType::bf16);
    Tensors tensors = tensors_of(model, "");
    const Parameter wte = registry_of(model.spec).parameters[0];
    tensors[0].dtype = "F32";
    tensors[0].bytes =
        bytes_of(hugging_face_values(wte, model.values.at(wte.name)), StoredType::fp32);
    const StoredModel mixed =
        open_model_folder(write_shards(directory / "mixed", model.spec, tensors, 2));
    CHECK(mixed.dtype == StoredType::fp32);
    check_holds(mixed, model);
}

TEST_CASE("a tensor that files hold as several is written and read by rows", "[interchange]") {
    // A family like GPT-2 whose files hold q, k and v apart.
    static Family family = gpt2;
    family.registry = [](const DecoderSpec& spec) {
        Registry registry = gpt2.registry(spec);
        for (const BlockParameters& block : registry.blocks)
            for (const int i : {block.qkv_w, block.qkv_b}) {
                Parameter& p = registry.parameters[static_cast<size_t>(i)];
                const StoredTensor whole = p.stored[0];
                p.stored.clear();
                for (size_t part = 0; part < 3; ++part)
                    p.stored.push_back({.name = std::string(1, "qkv"[part]) + "." + whole.name,
                                        .rows = p.split->sections[part],
                                        .transposed = whole.transposed});
            }
        return registry;
    };
    for (const StoredType type : stored_types) {
        const TemporaryDirectory directory;
        Numbers model = random_numbers(type);
        model.spec.family = &family;
        model.spec.n_kv_head = 1;  // sections of different sizes
        const Registry registry = registry_of(model.spec);
        for (const Parameter& p : registry.parameters) {
            std::vector<float> values = random_normal(static_cast<size_t>(p.numel()));
            for (float& value : values) value = rounded(value, type);
            model.values[p.name] = values;
        }
        StoredModel stored{.spec = model.spec, .dtype = type, .read = {}};
        stored.read = [&](const Parameter& p, int64_t first, std::span<float> values) {
            std::copy_n(model.values.at(p.name).begin() + first, values.size(), values.begin());
        };
        write_model(fs::path(directory.path()), stored, type, random_int(0, 1) * 4000);
        const StoredModel found = open_model_folder(fs::path(directory.path()), model.spec);
        check_holds(found, model);

        // One of the tensors, by its own name
        const SafetensorsFile file = [&] {
            for (const auto& entry : fs::directory_iterator(directory.path()))
                if (entry.path().extension() == ".safetensors") {
                    SafetensorsFile one(entry.path());
                    if (one.find("transformer.k.h.0.attn.c_attn.bias")) return one;
                }
            throw Error("no file holds the tensor");
        }();
        const TensorInfo& info = file.at("transformer.k.h.0.attn.c_attn.bias");
        std::vector<float> values(static_cast<size_t>(info.numel()));
        file.read_floats(info, values.data());
        const Parameter& bias = registry.parameters[static_cast<size_t>(registry.blocks[0].qkv_b)];
        const std::vector<float>& all = model.values.at(bias.name);
        const auto first = all.begin() + bias.split->sections[0];
        CHECK(values == std::vector<float>(first, first + bias.split->sections[1]));
    }
}

TEST_CASE("a folder whose tensors are not its model's is refused with their names",
          "[interchange]") {
    const Numbers model = random_numbers(StoredType::fp32);
    const Tensors good = tensors_of(model, "transformer.");
    const auto refused = [&](const std::function<void(Tensors&)>& spoil) {
        const TemporaryDirectory directory;
        Tensors tensors = good;
        spoil(tensors);
        std::string message;
        for (int files : {1, 2}) {
            const fs::path folder = write_shards(directory / "model", model.spec, tensors, files);
            if (files == 1) {
                fs::rename(folder / "part-0.safetensors", folder / "model.safetensors");
                fs::remove(folder / "model.safetensors.index.json");
            } else {
                fs::remove(folder / "model.safetensors");
            }
            message = error_of([&] { open_model_folder(folder); });
            CHECK(contains(message, folder.string()));
            CHECK(error_of([&] { import_model({folder, directory / "out", ""}); }) == message);
            CHECK_FALSE(fs::exists(directory / "out"));
        }
        return message;
    };
    const auto at = static_cast<size_t>(random_int(0, std::ssize(good) - 1));
    CHECK(contains(refused([&](Tensors& t) { t.erase(t.begin() + static_cast<int64_t>(at)); }),
                   good[at].name.substr(12)));
    CHECK(contains(refused([&](Tensors& t) { t[at].name += "s"; }), "is missing tensors"));
    CHECK(contains(refused([&](Tensors& t) { t.resize(3); }), " more"));
    CHECK(contains(refused([&](Tensors& t) {
                       t.push_back({"h.99.ln_1.weight", "F32", "abcd", {1}});
                   }),
                   "h.99.ln_1.weight"));
    CHECK(contains(refused([&](Tensors& t) {
                       t.push_back({"score.weight", "F32", "abcd", {1}});
                   }),
                   "score.weight"));
    CHECK(contains(refused([&](Tensors& t) {
                       t[at].shape = {1};
                       t[at].bytes.resize(4);
                   }),
                   good[at].name));
    CHECK(contains(refused([&](Tensors& t) { t[at].dtype = "I32"; }), "I32"));
    CHECK(contains(refused([&](Tensors& t) {
                       t.push_back(good[at]);
                       t.back().name = good[at].name.substr(12);
                   }),
                   good[at].name.substr(12)));
    // A head of its own
    CHECK(contains(refused([&](Tensors& t) {
                       t.push_back(good[0]);
                       REQUIRE(good[0].name == "transformer.wte.weight");
                       t.back().name = "lm_head.weight";
                       const auto byte = static_cast<size_t>(
                           random_int(0, std::ssize(t.back().bytes) / 4 - 1) * 4 + 2);
                       t.back().bytes[byte] ^= 0x40;
                   }),
                   "lm_head.weight"));
    CHECK(contains(refused([&](Tensors& t) {
                       t.push_back({"lm_head.weight", "F32", "abcd", {1, 1}});
                   }),
                   "lm_head.weight"));
}

TEST_CASE("an index that does not fit its files is refused", "[interchange]") {
    const TemporaryDirectory directory;
    const Numbers model = random_numbers(StoredType::bf16);
    const fs::path folder =
        write_shards(directory / "model", model.spec, tensors_of(model, "transformer."), 3);
    const fs::path index = folder / "model.safetensors.index.json";
    const Json good = Json::parse(read(index));
    const std::string wte = "transformer.wte.weight", home = good["weight_map"][wte];
    const std::string other =
        home == "part-0.safetensors" ? "part-1.safetensors" : "part-0.safetensors";
    const auto refused = [&](const std::function<void(Json&)>& spoil) {
        Json json = good;
        spoil(json);
        write(index, json.dump());
        return error_of([&] { open_model_folder(folder); });
    };
    CHECK(refused([](Json&) {}).empty());
    CHECK(contains(refused([&](Json& j) { j["weight_map"][wte] = other; }), wte));
    CHECK(contains(refused([&](Json& j) { j["weight_map"].erase(wte); }), wte));
    CHECK(contains(refused([&](Json& j) { j["weight_map"]["more"] = other; }), "more"));
    CHECK(contains(refused([&](Json& j) { j["weight_map"][wte] = "gone.safetensors"; }),
                   "gone.safetensors"));
    for (const char* name : {"../part-0.safetensors", "/etc/passwd", "", "."})
        CHECK(contains(refused([&](Json& j) { j["weight_map"][wte] = name; }), "not the name"));
    CHECK(contains(refused([&](Json& j) { j["weight_map"][wte] = 3; }), "weight_map"));
    CHECK(contains(refused([&](Json& j) { j.erase("weight_map"); }), "weight_map"));
    CHECK(contains(refused([&](Json& j) { j = Json::array(); }), "weight_map"));
    write(index, "{");
    CHECK(contains(error_of([&] { open_model_folder(folder); }), "not valid JSON"));

    // A tensor in two files
    write(index, good.dump());
    Tensors both;
    const SafetensorsFile second(folder / other);
    for (const TensorInfo& info : second.tensors()) {
        const auto data = second.data(info);
        both.push_back({info.name, info.dtype,
                        std::string(reinterpret_cast<const char*>(data.data()), data.size()),
                        info.shape});
    }
    both.push_back(tensors_of(model, "transformer.")[0]);
    write_tensors(folder / other, both);
    const std::string message = error_of([&] { open_model_folder(folder); });
    CHECK(contains(message, wte));
    CHECK(contains(message, other));
}

TEST_CASE("import and export keep every bit, in any dtype and number of files", "[interchange]") {
    for (StoredType type : stored_types) {
        const TemporaryDirectory directory;
        const Numbers model = random_numbers(type);
        const fs::path source =
            write_folder(directory / "source", model, random_int(0, 1) ? "" : "transformer.");
        const uint64_t limit = static_cast<uint64_t>(random_int(1, 20000));
        CAPTURE(name_of(type), limit);
        import_model({source, directory / "a", ""});
        check_holds(open_model_folder(directory / "a"), model);
        export_model({.checkpoint = directory / "a",
                      .out = directory / "b",
                      .dtype = {},
                      .max_file_bytes = limit});
        import_model({directory / "b", directory / "c", ""});
        CHECK(files_of(directory / "a") == files_of(directory / "c"));
        CHECK(raw_tensors(directory / "a") == raw_tensors(directory / "b"));
        const Json config = Json::parse(read(directory / "b/config.json"));
        CHECK(config["eos_token_id"] == 7);
        CHECK(config["torch_dtype"] == (type == StoredType::fp32   ? "float32"
                                        : type == StoredType::bf16 ? "bfloat16"
                                                                   : "float16"));

        // Exported without the prefix the numbers are those of the source, byte for byte.
        std::map<std::string, std::string> wanted;
        for (auto& [name, bytes] : raw_tensors(source))
            wanted[(name.starts_with("transformer.") ? "" : "transformer.") + name] = bytes;
        CHECK(raw_tensors(directory / "b") == wanted);

        // Files are as large as allowed and no larger, but for a tensor that is.
        const Json index = fs::exists(directory / "b/model.safetensors.index.json")
                               ? Json::parse(read(directory / "b/model.safetensors.index.json"))
                               : Json();
        uint64_t total = 0;
        std::set<std::string> named;
        for (const auto& entry : fs::directory_iterator(directory / "b")) {
            if (entry.path().extension() != ".safetensors") continue;
            const std::string name = entry.path().filename().string();
            named.insert(name);
            const SafetensorsFile file(entry.path());
            uint64_t bytes = 0;
            for (const TensorInfo& info : file.tensors()) {
                bytes += info.end - info.begin;
                if (!index.is_null()) CHECK(index["weight_map"][info.name] == name);
            }
            CHECK((bytes <= limit || file.tensors().size() == 1));
            total += bytes;
        }
        if (index.is_null()) {
            CHECK(named == std::set<std::string>{"model.safetensors"});
        } else {
            CHECK(index["metadata"]["total_size"] == total);
            CHECK(index["weight_map"].size() == model.values.size());
            char last[64];
            std::snprintf(last, sizeof last, "model-%05zu-of-%05zu.safetensors", named.size(),
                          named.size());
            CHECK(named.contains(last));
        }
    }
}

TEST_CASE("frequencies that older versions of transformers saved are no weights", "[interchange]") {
    for (const char* family : {"llama", "qwen2", "qwen3", "mistral"})
        for (const std::string name :
             {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
              "model.layers.0.self_attn.inv_freq", "model.layers.0.rotary_emb.inv_freq.weight"}) {
            const TemporaryDirectory directory;
            const fs::path fixture = concat("test/fixtures/", family, "-tiny");
            fs::copy(fixture / "config.json", directory / "config.json");
            Tensors tensors{{name, "F32", std::string(16, '\1'), {4}}};
            const SafetensorsFile file(fixture / "model.safetensors");
            for (const TensorInfo& info : file.tensors()) {
                const auto data = file.data(info);
                tensors.push_back({info.name,
                                   info.dtype,
                                   {reinterpret_cast<const char*>(data.data()), data.size()},
                                   info.shape});
            }
            write_tensors(directory / "model.safetensors", tensors);
            const std::string error = error_of([&] { (void)open_model_folder(directory.path()); });
            CAPTURE(family, name, error);
            if (name.ends_with(".rotary_emb.inv_freq"))
                CHECK(error == "");
            else
                CHECK(contains(error, name));
        }
}

TEST_CASE("folders that transformers wrote come back bit for bit, whatever the family",
          "[interchange]") {
    for (const char* family : {"gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe",
                               "qwen3_moe", "olmoe", "gpt_oss"}) {
        const TemporaryDirectory directory;
        const fs::path fixture = concat("test/fixtures/", family, "-tiny"),
                       source = directory / "source";
        fs::create_directory(source);
        for (const char* name : {"config.json", "model.safetensors"})
            fs::copy(fixture / name, source / name);
        const uint64_t limit = static_cast<uint64_t>(random_int(1, 40000));
        CAPTURE(family, limit);
        import_model({source, directory / "imported", ""});
        export_model({.checkpoint = directory / "imported",
                      .out = directory / "exported",
                      .dtype = {},
                      .max_file_bytes = limit});
        CHECK(fs::exists(directory / "exported/model.safetensors.index.json"));
        const DecoderSpec spec = read_model_spec(directory / "exported");
        std::map<std::string, std::string> wanted;  // files may leave GPT-2's prefix out
        for (auto& [name, bytes] : raw_tensors(source))
            wanted[(name.starts_with(spec.family->prefix) ? "" : spec.family->prefix) + name] =
                bytes;
        CHECK(wanted.size() == raw_tensors(source).size());
        CHECK(raw_tensors(directory / "imported") == wanted);
        CHECK(raw_tensors(directory / "exported") == wanted);
        CHECK(spec == read_model_spec(source));
        CHECK(spec.family->model_type == std::string(family));

        const auto as_llmc = [&] {
            export_model({.checkpoint = source,
                          .out = directory / "model.bin",
                          .format = Format::llmc,
                          .dtype = {}});
        };
        if (spec.family == &gpt2) {
            as_llmc();
        } else {
            const std::string error = error_of(as_llmc);
            CHECK(contains(error, "llm.c's model files hold GPT-2"));
            CHECK(contains(error, with_article(*spec.family)));
        }
        CHECK(fs::exists(directory / "model.bin") == (spec.family == &gpt2));
    }
}

namespace {

constexpr const char* mixtures[] = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"};

/// A model of random weights in a family's fixture's shape, as a folder holds it.
struct RandomModel {
    StoredModel model;
    std::map<std::string, std::vector<float>> values;  // in our layout

    explicit RandomModel(const DecoderSpec& spec) : model{.spec = spec, .read = {}} {
        for (const Parameter& p : registry_of(spec).parameters)
            values[p.name] = random_normal(static_cast<size_t>(p.numel()));
        model.read = [this](const Parameter& p, int64_t first, std::span<float> out) {
            std::copy_n(values.at(p.name).begin() + first, out.size(), out.begin());
        };
    }
    RandomModel(const RandomModel&) = delete;
};

DecoderSpec fixture_spec(const std::string& family) {
    return read_model_spec(concat("test/fixtures/", family, "-tiny"));
}

std::vector<float> floats(const SafetensorsFile& file, const std::string& name) {
    const TensorInfo& info = file.at(name);
    std::vector<float> values(static_cast<size_t>(info.numel()));
    file.read_floats(info, values.data());
    return values;
}

}  // namespace

TEST_CASE("experts are in files where transformers has them, element by element", "[interchange]") {
    for (const std::string family : mixtures) {
        const TemporaryDirectory directory;
        const RandomModel random(fixture_spec(family));
        const DecoderSpec& spec = random.model.spec;
        write_model(fs::path(directory.path()), random.model, StoredType::fp32);
        const SafetensorsFile file(directory / "model.safetensors");
        const Registry registry = registry_of(spec);
        const int64_t E = spec.experts.n_expert, F = spec.experts.n_ff, C = spec.n_embd;
        for (int layer = 0; layer < spec.n_layer; ++layer) {
            if (!spec.has_experts(layer)) continue;
            CAPTURE(family, layer);
            const BlockParameters& block = registry.blocks[static_cast<size_t>(layer)];
            const auto ours = [&](int i) -> const std::vector<float>& {
                return random.values.at(registry.parameters[static_cast<size_t>(i)].name);
            };
            const std::string mlp = concat("model.layers.", layer,
                                           family == "mixtral" ? ".block_sparse_moe." : ".mlp.");
            const char* router = family == "gpt_oss" ? "router" : "gate";
            CHECK(floats(file, concat(mlp, router, ".weight")) == ours(block.router_w));
            const auto up = [&](int64_t e, int64_t row, int64_t c) {
                return ours(block.up_w)[static_cast<size_t>((e * 2 * F + row) * C + c)];
            };
            const auto down = [&](int64_t e, int64_t c, int64_t f) {
                return ours(block.down_w)[static_cast<size_t>((e * C + c) * F + f)];
            };
            if (family != "gpt_oss") {
                const auto same = [&](int64_t e, const char* part, int64_t rows, int64_t cols,
                                      const auto& of) {
                    const std::vector<float> theirs =
                        floats(file, concat(mlp, "experts.", e, ".", part, ".weight"));
                    int64_t wrong = 0;
                    for (int64_t r = 0; r < rows; ++r)
                        for (int64_t c = 0; c < cols; ++c)
                            wrong += theirs[static_cast<size_t>(r * cols + c)] != of(r, c);
                    CAPTURE(e, part);
                    CHECK(wrong == 0);
                };
                const bool numbered = family == "mixtral";
                for (int64_t e = 0; e < E; ++e) {
                    same(e, numbered ? "w1" : "gate_proj", F, C,
                         [&](int64_t r, int64_t c) { return up(e, r, c); });
                    same(e, numbered ? "w3" : "up_proj", F, C,
                         [&](int64_t r, int64_t c) { return up(e, F + r, c); });
                    same(e, numbered ? "w2" : "down_proj", C, F,
                         [&](int64_t r, int64_t c) { return down(e, r, c); });
                }
                continue;
            }
            CHECK(file.at(mlp + "experts.gate_up_proj").shape == std::vector{E, C, 2 * F});
            CHECK(file.at(mlp + "experts.down_proj").shape == std::vector{E, F, C});
            CHECK(file.at(mlp + "experts.gate_up_proj_bias").shape == std::vector{E, 2 * F});
            CHECK(floats(file, mlp + "experts.down_proj_bias") == ours(block.down_b));
            const std::vector<float> gate_up = floats(file, mlp + "experts.gate_up_proj"),
                                     bias = floats(file, mlp + "experts.gate_up_proj_bias"),
                                     theirs = floats(file, mlp + "experts.down_proj");
            int64_t wrong = 0;
            for (int64_t e = 0; e < E; ++e)
                for (int64_t f = 0; f < F; ++f)
                    for (int64_t half = 0; half < 2; ++half) {
                        wrong += bias[static_cast<size_t>((e * F + f) * 2 + half)] !=
                                 ours(block.up_b)[static_cast<size_t>((e * 2 + half) * F + f)];
                        for (int64_t c = 0; c < C; ++c)
                            wrong +=
                                gate_up[static_cast<size_t>(((e * C + c) * F + f) * 2 + half)] !=
                                up(e, half * F + f, c);
                    }
            CHECK(wrong == 0);
            for (int64_t e = 0; e < E; ++e)
                for (int64_t f = 0; f < F; ++f)
                    for (int64_t c = 0; c < C; ++c)
                        wrong += theirs[static_cast<size_t>((e * F + f) * C + c)] != down(e, c, f);
            CHECK(wrong == 0);
        }

        // They come back, whole or by matrices.
        const StoredModel back = open_model_folder(fs::path(directory.path()));
        CHECK(back.spec == spec);
        for (const Parameter& p : registry.parameters) {
            CAPTURE(family, p.name);
            const std::vector<float>& wanted = random.values.at(p.name);
            std::vector<float> values(wanted.size(), NAN);
            back.read(p, 0, values);
            CHECK(values == wanted);
            const int64_t matrix = p.stored[0].matrix_rows() * p.cols(),
                          first = p.reordered() ? matrix * random_int(0, p.numel() / matrix - 1)
                                                : random_int(0, p.numel() - 1),
                          n = p.reordered() ? matrix : random_int(1, p.numel() - first);
            values.assign(static_cast<size_t>(n), NAN);
            back.read(p, first, values);
            CHECK(std::equal(values.begin(), values.end(), wanted.begin() + first));
        }
    }
}

TEST_CASE("a folder may hold a layer's experts in one tensor, as transformers 5 does in memory",
          "[interchange]") {
    for (const std::string family : {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}) {
        const TemporaryDirectory directory;
        const RandomModel random(fixture_spec(family));
        const DecoderSpec& spec = random.model.spec;
        fs::copy(concat("test/fixtures/", family, "-tiny/config.json"), directory / "config.json");
        Tensors tensors;
        const int64_t E = spec.experts.n_expert, F = spec.experts.n_ff, C = spec.n_embd;
        const auto write = [&] {
            fs::remove(directory / "model.safetensors");
            write_tensors(directory / "model.safetensors", tensors);
            return open_model_folder(fs::path(directory.path()));
        };
        for (const Parameter& p : registry_of(spec).parameters) {
            const std::vector<float>& values = random.values.at(p.name);
            std::string name = p.name;
            const std::string mlp = ".block_sparse_moe.";
            if (const auto at = name.find(mlp); at != name.npos)
                name.replace(at, mlp.size(), ".mlp.");
            if (p.stored.size() == 1) {
                tensors.push_back({name, "F32", bytes_of(values, StoredType::fp32), p.shape});
            } else if (!contains(name, ".experts.")) {  // q, k and v; gate and up
                auto at = values.begin();
                for (const StoredTensor& stored : p.stored) {
                    const auto end = at + stored.rows * p.cols();
                    auto shape = p.shape;
                    shape[0] = stored.rows;
                    tensors.push_back(
                        {stored.name, "F32", bytes_of({at, end}, StoredType::fp32), shape});
                    at = end;
                }
            } else {
                const bool is_up = contains(name, "gate_up");
                tensors.push_back({name.substr(0, name.size() - std::strlen(".weight")),
                                   "F32",
                                   bytes_of(values, StoredType::fp32),
                                   {E, is_up ? 2 * F : C, is_up ? C : F}});
            }
        }
        CAPTURE(family);
        const StoredModel found = write();
        for (const Parameter& p : registry_of(spec).parameters) {
            std::vector<float> values(static_cast<size_t>(p.numel()), NAN);
            found.read(p, 0, values);
            CAPTURE(p.name);
            CHECK(values == random.values.at(p.name));
        }
        // So are experts that are there twice.
        const std::string mlp = family == "mixtral" ? "block_sparse_moe.experts.0.w1.weight"
                                                    : "mlp.experts.0.gate_proj.weight";
        const int layer = static_cast<int>(expert_layers(spec).back());
        const std::string twice = concat("model.layers.", layer, ".", mlp);
        tensors.push_back(
            {twice, "F32", std::string(static_cast<size_t>(4 * F * C), '\0'), {F, C}});
        const std::string error = error_of(write);
        CHECK(contains(error, concat("holds \"", twice, "\", but \"model.layers.", layer,
                                     ".mlp.experts.gate_up_proj\"")));
        CHECK(contains(error, "has the same experts in one tensor; remove one of them"));
        tensors.pop_back();
        // Experts of another shape are refused.
        for (ForeignTensor& tensor : tensors)
            if (tensor.name.ends_with("gate_up_proj")) std::swap(tensor.shape[1], tensor.shape[2]);
        if (2 * F != C) CHECK(contains(error_of(write), "gate_up_proj"));
    }
}

TEST_CASE("quantized weights, latent attention and groups of experts are refused by name",
          "[interchange]") {
    const TemporaryDirectory directory;
    const fs::path fixture = "test/fixtures/gpt_oss-tiny";
    const auto refused = [&](const char* key, const Json& value) {
        Json config = read_json(fixture / "config.json");
        config[key] = value;
        fs::remove(directory / "config.json");
        write(directory / "config.json", config.dump());
        return error_of([&] { (void)read_model_spec(directory.path()); });
    };
    CHECK(contains(refused("quantization_config", {{"quant_method", "mxfp4"}}), "Mxfp4Config"));
    CHECK(
        contains(refused("kv_lora_rank", 512), "kv_lora_rank = 512; multi-head latent attention"));
    CHECK(contains(refused("n_group", 8), "n_group = 8; routers that choose groups of experts"));
    CHECK(refused("n_group", 1) == "");
    CHECK(contains(refused("model_type", "deepseek_v3"), "\"gpt_oss\" are supported"));

    fs::remove(directory / "config.json");
    fs::copy(fixture / "config.json", directory / "config.json");
    write_tensors(
        directory / "model.safetensors",
        {{"model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", std::string(8, '\1'), {8}},
         {"model.layers.0.mlp.experts.gate_up_proj_scales", "U8", std::string(4, '\1'), {4}}});
    const std::string error = error_of([&] { (void)open_model_folder(directory.path()); });
    CHECK(contains(error, "MXFP4 weights (model.layers.0.mlp.experts.gate_up_proj_blocks)"));
    CHECK(contains(error, "dequantize=True"));
}

TEST_CASE("an upcycled model has its dense model's MLP in every expert", "[interchange]") {
    for (const std::string family : {"llama", "qwen2", "qwen3", "mistral"})
        for (const bool zero_router : {false, true}) {
            const TemporaryDirectory directory;
            const fs::path source = concat("test/fixtures/", family, "-tiny");
            const int E = static_cast<int>(random_int(2, 7)),
                      k = static_cast<int>(random_int(1, std::min(E, 3)));
            CAPTURE(family, E, k, zero_router);
            const std::string said = import_model({.source = source,
                                                   .out = directory / "out",
                                                   .tokenizer = "",
                                                   .upcycling = {E, k, zero_router}});
            const StoredModel dense = open_model_folder(source),
                              mixture = open_model_folder(fs::path(directory / "out"));
            const ExpertSpec& experts = mixture.spec.experts;
            CHECK(experts == ExpertSpec{.n_expert = E,
                                        .n_expert_per_token = k,
                                        .n_ff = dense.spec.n_ff,
                                        .rule = {.normalise = true}});
            CHECK(mixture.spec.family->model_type == std::string(family == "qwen3"   ? "qwen3_moe"
                                                                 : family == "qwen2" ? "train_gpt"
                                                                                     : "mixtral"));
            CHECK(contains(said, "only train_gpt reads it") == (family == "qwen2"));
            const Registry from = registry_of(dense.spec), to = registry_of(mixture.spec);
            const auto read = [](const StoredModel& model, const Registry& of, int i) {
                const Parameter& p = of.parameters[static_cast<size_t>(i)];
                std::vector<float> values(static_cast<size_t>(p.numel()));
                model.read(p, 0, values);
                return values;
            };
            for (size_t i = 0; i < to.blocks.size(); ++i) {
                const BlockParameters &old = from.blocks[i], &block = to.blocks[i];
                for (const auto member : {&BlockParameters::up_w, &BlockParameters::down_w}) {
                    const std::vector<float> one = read(dense, from, old.*member),
                                             all = read(mixture, to, block.*member);
                    REQUIRE(all.size() == static_cast<size_t>(E) * one.size());
                    for (int e = 0; e < E; ++e)
                        CHECK(
                            std::equal(one.begin(), one.end(), all.begin() + e * std::ssize(one)));
                }
                for (const auto member : {&BlockParameters::norm1_w, &BlockParameters::qkv_w,
                                          &BlockParameters::qkv_b, &BlockParameters::out_w,
                                          &BlockParameters::q_norm_w, &BlockParameters::norm2_w})
                    if (old.*member >= 0)
                        CHECK(read(dense, from, old.*member) == read(mixture, to, block.*member));
                const std::vector<float> router = read(mixture, to, block.router_w);
                CHECK(std::ranges::all_of(router, [](float v) { return v == 0; }) == zero_router);
            }
            CHECK(read(dense, from, from.tokens) == read(mixture, to, to.tokens));
            CHECK(read(dense, from, from.head) == read(mixture, to, to.head));
            CHECK(read(dense, from, from.final_norm_w) == read(mixture, to, to.final_norm_w));
        }
}

TEST_CASE("what cannot be upcycled is refused in a sentence", "[interchange]") {
    const TemporaryDirectory directory;
    const auto refused = [&](const std::string& family, Upcycling how) {
        return error_of([&] {
            import_model({.source = concat("test/fixtures/", family, "-tiny"),
                          .out = directory / "out",
                          .tokenizer = "",
                          .upcycling = how});
        });
    };
    CHECK(contains(refused("gpt2", {4}), "MLP of another kind than SwiGLU (it is a GPT-2)"));
    CHECK(with_article(family_of("olmoe", "")) == "an OLMoE");
    CHECK(with_article(family_of("llama", "")) == "a Llama");
    CHECK(with_article(family_of("train_gpt", "")) == "a model");
    CHECK(contains(refused("mixtral", {4}), "has experts already (n_expert = 5)"));
    CHECK(contains(refused("llama", {4, 5}), "--experts-per-token 5, but --upcycle 4"));
    CHECK_FALSE(fs::exists(directory / "out"));
}

TEST_CASE("a mixture begins with selection biases of 0 where its files have none",
          "[interchange]") {
    for (const std::string family : mixtures) {
        const StoredModel found = open_model_folder(concat("test/fixtures/", family, "-tiny"));
        const StoredModel biased = with_selection_biases(found);
        DecoderSpec expected = found.spec;
        expected.experts.selection_bias = true, expected.family = biased.spec.family;
        CHECK(biased.spec == expected);
        const Registry from = registry_of(found.spec), to = registry_of(biased.spec);
        CHECK(to.parameters.size() ==
              from.parameters.size() + static_cast<size_t>(std::ranges::count_if(
                                           to.blocks, [](const BlockParameters& block) {
                                               return block.selection_bias >= 0;
                                           })));
        int64_t zeros = 0;
        for (const Parameter& p : to.parameters) {
            std::vector<float> values(static_cast<size_t>(p.numel()), NAN);
            biased.read(p, 0, values);
            CHECK(std::ranges::all_of(values, [](float v) { return std::isfinite(v); }));
            zeros += std::ranges::all_of(values, [](float v) { return v == 0; });
        }
        CHECK(zeros == std::ssize(to.parameters) - std::ssize(from.parameters));
    }
}

TEST_CASE("models with other experts than the configuration's are refused by what differs",
          "[interchange]") {
    const auto refused = [](const DecoderSpec& found, const DecoderSpec& wanted) {
        return error_of([&] { require_same_model("a/folder", found, wanted); });
    };
    const DecoderSpec mixture = fixture_spec("qwen3_moe"), dense = fixture_spec("qwen3");
    DecoderSpec of_dense = dense;
    of_dense.experts = mixture.experts;
    CHECK(contains(refused(dense, of_dense),
                   "the model in a/folder has no experts, but the configuration has n_expert = 7; "
                   "make experts of its MLP with `train_gpt import --upcycle 7 a/folder --out"));
    CHECK(contains(refused(of_dense, dense),
                   "has experts (n_expert = 7), but the configuration "
                   "has none"));
    CHECK(refused(mixture, mixture) == "");
    using E = ExpertSpec;
    const auto differs = [&](auto change, const char* said) {
        DecoderSpec wanted = mixture;
        change(wanted.experts);
        const std::string error = refused(mixture, wanted);
        CAPTURE(error);
        CHECK(contains(error, said));
        CHECK(contains(error, "model.init_from"));
    };
    differs([](E& e) { e.n_expert = 8; }, "n_expert = 7, but the configuration has 8");
    differs([](E& e) { e.n_expert_per_token = 1; }, "n_expert_per_token = 3, but");
    differs([](E& e) { e.n_ff = 11; }, "n_ff_expert = 10, but");
    differs([](E& e) { e.n_ff_shared = 11; }, "n_ff_shared = 0, but");
    differs([](E& e) { e.rule.normalise = false; }, "router_normalise = on, but");
    differs([](E& e) { e.rule.score = RouterScore::sigmoid; }, "router = softmax, but");
    differs([](E& e) { e.selection_bias = true; }, "no selection biases, but");
    DecoderSpec wanted = mixture;
    wanted.dense_layers = {1};
    CHECK(
        contains(refused(mixture, wanted), "an MLP in layer 0, but the configuration has experts"));
    wanted = mixture;
    wanted.window = 5;
    CHECK(contains(refused(mixture, wanted), "window = 0, but"));
    wanted = mixture;
    wanted.sinks = true;
    CHECK(contains(refused(mixture, wanted), "sinks = off, but the configuration has on"));
    wanted = mixture;
    wanted.clamped = ClampedSwiglu{};
    CHECK(contains(refused(wanted, mixture), "clamped_swiglu = on, but the configuration has off"));
}

TEST_CASE("a tensor is stored in its own dtype, or refused", "[interchange]") {
    for (const DType dtype : {DType::fp32, DType::bf16})
        CHECK(std::string(name_of(stored_type_of(dtype))) == name_of(dtype));
    for (const DType dtype : {DType::int32, DType::fp64})
        CHECK_THROWS_AS(stored_type_of(dtype), Error);
}

TEST_CASE("export rounds to nearest, and names a tensor that a dtype cannot hold",
          "[interchange]") {
    const TemporaryDirectory directory;
    Numbers model = random_numbers(StoredType::fp32);
    write_folder(directory / "source", model, "");
    for (StoredType type : stored_types) {
        const fs::path out = directory / name_of(type);
        export_model({.checkpoint = directory / "source", .out = out, .dtype = type});
        check_holds(open_model_folder(out), rounded(model, type));
        // Widening is exact.
        export_model({.checkpoint = out, .out = directory / "wide", .dtype = StoredType::fp32});
        check_holds(open_model_folder(directory / "wide"), rounded(model, type));
        fs::remove_all(directory / "wide");
    }
    auto bad = model.values.begin();
    std::advance(bad, random_int(0, std::ssize(model.values) - 1));
    const auto at = static_cast<size_t>(random_int(0, std::ssize(bad->second) - 1));
    const auto refused = [&](float value, StoredType type) {
        const TemporaryDirectory place;
        bad->second[at] = value;
        write_folder(place / "source", model, "");
        const std::string message = error_of([&] {
            export_model({.checkpoint = place / "source", .out = place / "out", .dtype = type});
        });
        CAPTURE(message, value, bad->first);
        CHECK(fs::exists(place / "out") == message.empty());
        CHECK_FALSE(fs::exists(place / "out.tmp"));
        return contains(message, bad->first);
    };
    CHECK_FALSE(refused(65504, StoredType::fp16));
    CHECK_FALSE(refused(-65519.9f, StoredType::fp16));
    CHECK(refused(65520, StoredType::fp16));
    CHECK(refused(-1e10f, StoredType::fp16));
    CHECK_FALSE(refused(1e10f, StoredType::bf16));
    CHECK(refused(3.4e38f, StoredType::bf16));
    CHECK_FALSE(refused(3.4e38f, StoredType::fp32));
    for (float number : {INFINITY, -INFINITY, NAN})
        for (StoredType type : stored_types) CHECK(refused(number, type));
}

TEST_CASE("a bf16 checkpoint is exported from its fp32 masters where it has them",
          "[interchange]") {
    const TemporaryDirectory directory;
    const Numbers masters = save_bf16_checkpoint(directory / "run", nullptr);
    const fs::path checkpoint = directory / "run/step-00000001",
                   optimizer = checkpoint / "optimizer-00000-of-00001.safetensors";
    const auto exported = [&](StoredType type) {
        fs::remove_all(directory / "out");
        const std::string said = export_model(
            {.checkpoint = directory / "run", .out = directory / "out", .dtype = type});
        CHECK(contains(said, "masters") == (type != StoredType::bf16 && fs::exists(optimizer)));
        return open_model_folder(directory / "out");
    };
    for (StoredType type : stored_types) check_holds(exported(type), rounded(masters, type));

    // Damage of the masters is found, though the weights alone would do for bf16.
    const std::string good = read(optimizer);
    std::string bytes = good;
    bytes[bytes.size() - static_cast<size_t>(random_int(1, 1000))] ^= 1;
    write(optimizer, bytes);
    CHECK(contains(error_of([&] { exported(StoredType::fp32); }), optimizer.string()));
    check_holds(exported(StoredType::bf16), rounded(masters, StoredType::bf16));

    fs::remove(optimizer);
    for (StoredType type : {StoredType::fp32, StoredType::bf16})
        check_holds(exported(type), rounded(masters, StoredType::bf16));

    // Without a manifest, from the files of any number of ranks
    fs::remove(checkpoint / "manifest.json");
    const int ranks = static_cast<int>(random_int(2, 4));
    for (int rank = 0; rank < ranks; ++rank) {
        std::vector<TensorInfo> tensors;
        std::map<std::string, std::string> metadata;
        std::string data;
        for (const auto& [name, values] : masters.values) {
            const int64_t n = std::ssize(values), first = n * rank / ranks,
                          end = n * (rank + 1) / ranks;
            const std::string key =
                name + "[" + std::to_string(first) + ":" + std::to_string(end) + "]";
            tensors.push_back({.name = "master/" + key, .dtype = "F32", .shape = {end - first}});
            metadata["range/" + key] = std::to_string(first) + "-" + std::to_string(end);
            data += bytes_of({values.begin() + first, values.begin() + end}, StoredType::fp32);
        }
        SafetensorsWriter writer(
            checkpoint / ("optimizer-" + std::to_string(rank) + "-of-n.safetensors"), tensors,
            metadata);
        writer.append(std::as_bytes(std::span(data)));
        writer.commit();
    }
    export_model({.checkpoint = checkpoint, .out = directory / "ranks", .dtype = StoredType::fp32});
    check_holds(open_model_folder(directory / "ranks"), masters);
    fs::remove(checkpoint / "optimizer-1-of-n.safetensors");
    CHECK(contains(error_of([&] {
                       export_model({.checkpoint = checkpoint,
                                     .out = directory / "fewer",
                                     .dtype = StoredType::fp32});
                   }),
                   "missing"));
}

TEST_CASE("llm.c's model files are read, and written again byte for byte", "[interchange]") {
    for (StoredType type : {StoredType::fp32, StoredType::bf16}) {
        CAPTURE(name_of(type));
        const TemporaryDirectory directory;
        const Numbers model = random_numbers(type);
        const int64_t padded = (model.spec.vocab_size + 127) / 128 * 128;
        const std::string bytes = llmc_bytes(model, padded);
        write(directory / "model.bin", bytes);
        check_holds(open_llmc_model(directory / "model.bin"), model);
        import_model({directory / "model.bin", directory / "imported", ""});
        check_holds(open_model_folder(directory / "imported"), model);
        export_model({.checkpoint = directory / "imported",
                      .out = directory / "again.bin",
                      .format = Format::llmc,
                      .dtype = {}});
        CHECK(file_difference(directory / "again.bin", directory / "model.bin") == "");

        // Other padding is no part of the model.
        write(directory / "wide.bin", llmc_bytes(model, padded + random_int(1, 100)));
        check_holds(open_llmc_model(directory / "wide.bin"), model);
        write(directory / "narrow.bin", llmc_bytes(model, model.spec.vocab_size));
        check_holds(open_llmc_model(directory / "narrow.bin"), model);
        CHECK(contains(error_of([&] {
                           export_model({.checkpoint = directory / "imported",
                                         .out = directory / "again.bin",
                                         .format = Format::llmc,
                                         .dtype = {}});
                       }),
                       "exists already"));
        CHECK(contains(error_of([&] {
                           export_model({.checkpoint = directory / "imported",
                                         .out = directory / "half.bin",
                                         .format = Format::llmc,
                                         .dtype = StoredType::fp16});
                       }),
                       "fp16"));
        CHECK_FALSE(fs::exists(directory / "half.bin"));
        CHECK_FALSE(fs::exists(directory / "half.bin.tmp"));
    }
}

TEST_CASE("a file that is no whole model file of llm.c is refused", "[interchange]") {
    const TemporaryDirectory directory;
    const std::string path = directory / "model.bin";
    const Numbers model = random_numbers(StoredType::fp32);
    const std::string good = llmc_bytes(model, 384);
    const auto refused = [&](const std::string& bytes) {
        write(path, bytes);
        const std::string message = error_of([&] { import_model({path, directory / "out", ""}); });
        CHECK(contains(message, path));
        CHECK_FALSE(fs::exists(directory / "out"));
        return message;
    };
    for (size_t n : {size_t{0}, size_t{1}, size_t{1023}, size_t{1024}, good.size() - 1,
                     static_cast<size_t>(random_int(1025, std::ssize(good) - 1))})
        refused(good.substr(0, n));
    CHECK(contains(refused(good + "x"), std::to_string(good.size() + 1)));
    const auto with = [&](size_t at, int32_t value) {
        std::string bytes = good;
        std::memcpy(bytes.data() + 4 * at, &value, 4);
        return refused(bytes);
    };
    CHECK(contains(with(0, 20240520), "20240326"));
    for (int32_t version : {0, 1, 2, 4, 6, -3}) CHECK(contains(with(1, version), "version"));
    for (size_t at = 2; at < 8; ++at)
        for (int32_t value : {0, -1, 2147483647, static_cast<int32_t>(random_int(1, 2147483647))}) {
            CAPTURE(at, value);
            with(at, value);
        }
    CHECK(contains(with(7, static_cast<int32_t>(model.spec.vocab_size) - 1), "rows"));
}

TEST_CASE("import and export write to a free place alone, and leave nothing when they fail",
          "[interchange]") {
    const TemporaryDirectory directory;
    const Numbers model = random_numbers(StoredType::fp32);
    const fs::path source = write_folder(directory / "source", model, "");
    const auto result = [&](const std::string& out) {
        return error_of([&] { import_model({source, out, ""}); });
    };
    fs::create_directory(directory / "empty");
    CHECK(result(directory / "empty/").empty());
    CHECK(fs::exists(directory / "empty/model.safetensors"));
    CHECK(contains(result(directory / "empty"), "not empty"));
    CHECK(result(directory / "new/nested").empty());
    write(directory / "file", "x");
    CHECK(contains(result(directory / "file"), "exists already"));
    fs::create_directory_symlink("nowhere", directory / "link");
    CHECK(contains(result(directory / "link"), "exists already"));
    fs::create_directory(directory / "a.tmp");
    write(directory / "a.tmp/mine", "x");
    CHECK(contains(result(directory / "a"), "a.tmp is in the way"));
    CHECK(read(directory / "a.tmp/mine") == "x");
    CHECK(contains(result(directory / "file/below"), directory / "file"));

    std::set<std::string> before, behind;
    for (const auto& entry : fs::directory_iterator(directory.path()))
        before.insert(entry.path().string());
    // A limit on file size fails writes as a full disk does.
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{1000, limit.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    const std::string import_message = result(directory / "full");
    const std::string export_message = error_of([&] {
        export_model({.checkpoint = source,
                      .out = directory / "full.bin",
                      .format = Format::llmc,
                      .dtype = {}});
    });
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::signal(SIGXFSZ, old_handler);
    CHECK(contains(import_message, "model.safetensors"));
    CHECK(contains(export_message, "full.bin"));
    for (const auto& entry : fs::directory_iterator(directory.path()))
        behind.insert(entry.path().string());
    CHECK(behind == before);
}

TEST_CASE("a tokenizer goes with its model", "[interchange]") {
    const TemporaryDirectory directory;
    std::vector<std::string_view> texts{"ab ab abc abc abcd"};
    const Tokenizer tokenizer = Tokenizer::train(texts, 259), other = Tokenizer::train(texts, 258);
    Numbers masters;
    do {
        fs::remove_all(directory / "run");
        masters = save_bf16_checkpoint(directory / "run", &tokenizer);
    } while (masters.spec.vocab_size < 259);
    const fs::path checkpoint = directory / "run/step-00000001";
    verify_checkpoint(checkpoint, Verify::everything);
    const Json config = Json::parse(read(checkpoint / "tokenizer_config.json"));
    CHECK(config["eos_token"] == "<|endoftext|>");
    CHECK(config["model_max_length"] == masters.spec.n_ctx);
    const Json manifest = Json::parse(read(checkpoint / "manifest.json"));
    CHECK(manifest["files"].contains("tokenizer_config.json"));

    // Copied as it is, also what only others read
    write(checkpoint / "special_tokens_map.json", "{\"eos_token\": \"x\"}");
    write(checkpoint / "chat_template.jinja", "{{ messages }}");
    export_model({.checkpoint = checkpoint, .out = directory / "out", .dtype = {}});
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                             "chat_template.jinja"})
        CHECK(read(directory / ("out/" + std::string(name))) == read(checkpoint / name));
    CHECK(Json::parse(read(directory / "out/config.json"))["eos_token_id"] ==
          *tokenizer.end_of_text());
    // Older checkpoints have no tokenizer_config.json.
    fs::remove(directory / "out/tokenizer_config.json");
    import_model({directory / "out", directory / "in", ""});
    CHECK(read(directory / "in/tokenizer_config.json") ==
          read(checkpoint / "tokenizer_config.json"));

    // GPT-2's own form gets the one that says how text is cut.
    fs::remove(directory / "out/special_tokens_map.json");
    const Json model = Json::parse(read(directory / "out/tokenizer.json"))["model"];
    fs::remove(directory / "out/tokenizer.json");
    Json vocab = model["vocab"];
    vocab["<|endoftext|>"] = *tokenizer.end_of_text();
    write(directory / "out/vocab.json", vocab.dump());
    std::string merges = "#version: 0.2\n";
    for (const Json& merge : model["merges"]) merges += merge.get<std::string>() + "\n";
    write(directory / "out/merges.txt", merges);
    import_model({directory / "out", directory / "gpt2", ""});
    CHECK(read(directory / "gpt2/vocab.json") == vocab.dump());
    CHECK(Tokenizer::load(directory / "gpt2/tokenizer.json").has_tokens_of(tokenizer));
    tokenizer.save(directory / "out/tokenizer.json");

    // One that is named replaces the source's.
    other.save(directory / "other.json");
    import_model({directory / "out", directory / "with", directory / "other.json"});
    CHECK(read(directory / "with/tokenizer.json") == read(directory / "other.json"));
    CHECK_FALSE(fs::exists(directory / "with/special_tokens_map.json"));
    CHECK(Json::parse(read(directory / "with/config.json"))["eos_token_id"] ==
          *other.end_of_text());

    // One with more tokens than the model has rows is another model's.
    Numbers small;
    do small = random_numbers(StoredType::fp32);
    while (small.spec.vocab_size >= 258);
    write_folder(directory / "small", small, "");
    CHECK(contains(
        error_of([&] {
            import_model({directory / "small", directory / "no", directory / "other.json"});
        }),
        "258 tokens"));
    CHECK_FALSE(fs::exists(directory / "no"));
}
