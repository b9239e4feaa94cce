// Models of other programs for the tests of import and export. The tests write and read them with
// their own code.
#pragma once
#include <cstring>
#include <filesystem>
#include <map>

#include <nlohmann/json.hpp>

#include "base/half.h"
#include "model/families/family.h"
#include "test/catch.h"
#include "test/file_difference.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/interchange.h"
#include "training/files/llmc_model.h"
#include "training/files/model_folder.h"
#include "training/files/safetensors.h"

namespace train_gpt::foreign_models {

namespace fs = std::filesystem;

using Json = nlohmann::ordered_json;
using Format = ExportOptions::Format;

constexpr StoredType stored_types[] = {StoredType::fp32, StoredType::bf16, StoredType::fp16};

const char* safetensors_name(StoredType type);

float rounded(float value, StoredType type);

std::string bytes_of(const std::vector<float>& values, StoredType type);

/// A model as plain numbers: of each parameter the logical elements, in this project's layout.
struct Numbers {
    DecoderSpec spec;
    StoredType type;
    std::map<std::string, std::vector<float>> values;
};

Numbers random_numbers(StoredType type);

std::vector<int64_t> hugging_face_shape(const Parameter& p);

/// Elements in Hugging Face's order.
std::vector<float> hugging_face_values(const Parameter& p, const std::vector<float>& ours);

struct ForeignTensor {
    std::string name, dtype, bytes;
    std::vector<int64_t> shape;
};
using Tensors = std::vector<ForeignTensor>;

Tensors tensors_of(const Numbers& model, const std::string& prefix);

void write_tensors(const fs::path& path, const Tensors& tensors);

Json config_of(const DecoderSpec& spec);

/// A folder of one file as Hugging Face has it.
fs::path write_folder(const fs::path& folder, const Numbers& model, const std::string& prefix);

/// The same, its tensors spread over several files.
fs::path write_shards(const fs::path& folder, const DecoderSpec& spec, const Tensors& tensors,
                      int files);

void check_holds(const StoredModel& stored, const Numbers& model);

/// Name, shape, dtype and bytes of all tensors of a folder.
std::map<std::string, std::string> raw_tensors(const fs::path& folder);

std::map<std::string, std::string> files_of(const fs::path& folder);

/// A model file of llm.c by its description; the last argument: rows of wte.
std::string llmc_bytes(const Numbers& model, int64_t padded);

/// A checkpoint of a bf16 run with random masters and a tokenizer; returns the masters.
Numbers save_bf16_checkpoint(const fs::path& run, const Tokenizer* tokenizer);

Numbers rounded(Numbers model, StoredType type);

}  // namespace train_gpt::foreign_models
