// The folder in which Hugging Face's tools keep a GPT-2:
//
//   config.json                     GPT2Config
//   model.safetensors               weights under Hugging Face's names and layouts (Conv1D: linear weights are [in, out]),
//   model-RRRRR-of-WWWWW.safetensors, model.safetensors.index.json    or several files and where each tensor is
//   tokenizer.json, tokenizer_config.json    where there is a tokenizer; or vocab.json and merges.txt
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"
#include "training/stored_model.h"

namespace train_gpt {

/// Whether the folder holds weights as Hugging Face names them.
bool is_model_folder(const std::filesystem::path& directory);

/// Shape of the model, from config.json. Throws Error for other architectures, and for variants of GPT-2 that compute
/// something else with the same weights.
GPTShape read_model_shape(const std::filesystem::path& directory);

/// Opens a folder (fp32, bf16 or fp16; one file or several; names with and without "transformer."). All that can be known
/// without reading the weights is checked: Error for a file that is missing or damaged, a tensor that is missing, in two
/// files, of another shape or unknown; also for a head (lm_head.weight) that is not wte.
StoredModel open_model_folder(const std::filesystem::path& directory);

/// Throws Error naming what differs when a folder's model is not the one wanted.
void require_same_model(const std::filesystem::path& directory, const GPTShape& found,
                        const GPTShape& wanted);

/// The compute dtype of what a folder holds: bf16 for bf16, else fp32.
DType read_model_dtype(const std::filesystem::path& directory);

/// Weights of a folder into a store of the same shape.
void load_weights(const std::filesystem::path& directory, ParameterStore& parameters);

/// Writes config.json and the weights in `dtype` into a folder; returns the names of the files. Where the weights take more
/// than max_file_bytes (0: no limit) they are cut into several files, tensors being kept whole.
std::vector<std::string> write_model(const std::filesystem::path& directory,
                                     const StoredModel& model, StoredType dtype,
                                     uint64_t max_file_bytes = 0);

/// Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer needs, into a folder; returns their names.
std::vector<std::string> write_tokenizer(const std::filesystem::path& directory,
                                         const Tokenizer& tokenizer, int n_ctx);

/// The tokenizer of a folder, where it has one.
std::optional<Tokenizer> read_folder_tokenizer(const std::filesystem::path& directory);

/// Copies the tokenizer of one folder, file by file, into another.
void copy_tokenizer(const std::filesystem::path& from, const std::filesystem::path& to, int n_ctx);

}  // namespace train_gpt
