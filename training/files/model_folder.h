// The folder in which Hugging Face's tools keep a model:
//
//   config.json                              the family and its extents, and ids of tokens
//   generation_config.json                   how to generate text, if the model has such a file
//   model.safetensors                        weights under Hugging Face's names and layouts
//                                            (model/families)
//   model-RRRRR-of-WWWWW.safetensors,        instead of model.safetensors: several files, and an
//   model.safetensors.index.json             index that says in which file each tensor is
//   tokenizer.json, tokenizer_config.json    the tokenizer, if there is one
//   vocab.json, merges.txt                   instead of tokenizer.json
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"
#include "training/files/stored_model.h"

namespace train_gpt {

/// Whether the folder holds weights as Hugging Face names them.
bool is_model_folder(const std::filesystem::path& directory);

/// The model, from config.json. Throws Error for an unknown family, and for a variant of a known
/// family that computes something else with the same weights.
DecoderSpec read_model_spec(const std::filesystem::path& directory);

/// Opens a folder: fp32, bf16 or fp16, one file or several, names with or without the family's
/// prefix. Checks everything that can be known without reading the weights. Throws Error if
///   a file is missing or damaged;
///   a tensor is missing, unknown, in two files or of another shape;
///   the two copies of a tied tensor differ.
StoredModel open_model_folder(const std::filesystem::path& directory);
StoredModel open_model_folder(const std::filesystem::path& directory, const DecoderSpec& spec);

/// Writes config.json, generation_config.json and the weights in `dtype` into a folder. Returns the
/// names of the files. Weights of more than max_file_bytes (0: no limit) are split over several
/// files; each tensor stays in one file.
std::vector<std::string> write_model(const std::filesystem::path& directory,
                                     const StoredModel& model, StoredType dtype,
                                     uint64_t max_file_bytes = 0);

/// Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer needs, into a folder.
/// Returns the names of the files.
std::vector<std::string> write_tokenizer(const std::filesystem::path& directory,
                                         const Tokenizer& tokenizer, int n_ctx);

/// The tokenizer of a folder; nothing if the folder has no tokenizer.
std::optional<Tokenizer> read_folder_tokenizer(const std::filesystem::path& directory);

/// Copies the tokenizer of one folder, file by file, into another.
void copy_tokenizer(const std::filesystem::path& from, const std::filesystem::path& to, int n_ctx);

}  // namespace train_gpt
