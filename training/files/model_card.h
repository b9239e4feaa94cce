// What an exported model says of itself: README.md, the model card that Hugging Face shows, and
// provenance.json, by which `verify` compares the model with its run.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "dataloader/verify.h"
#include "training/files/stored_model.h"

namespace train_gpt {

constexpr const char* provenance_file = "provenance.json";

/// The card in Markdown, from made_from() alone. What the records do not have is left out. Names of
/// users and hosts are left out, too.
std::string model_card(const Json& made, const DecoderSpec& spec, StoredType dtype);

/// Writes both files into the folder of a model that was exported from a checkpoint of a run. The
/// history comes from the checkpoint's run, if the checkpoint lies in its folder. Nothing is
/// written for a model that is not a checkpoint.
///
/// provenance.json: the program, the checkpoint's step and the SHA-256 of its manifest, "history"
/// (the hash of the line of the history that the manifest names), and size and hash of each file.
void write_model_card(const std::filesystem::path& folder, const std::filesystem::path& checkpoint,
                      const DecoderSpec& spec, StoredType dtype);

/// The files of an exported model, as its provenance.json has them.
std::vector<RecordedFile> exported_files(const std::filesystem::path& folder);
/// What does not agree between an exported model's provenance.json and the history of a run; empty
/// if the model is from a checkpoint that the history records.
std::string export_trouble(const std::filesystem::path& folder,
                           const std::filesystem::path& run_dir);

/// The hash of a line of its run's history that a checkpoint's manifest names; empty if it has
/// none.
std::string history_of(const std::filesystem::path& checkpoint);

}  // namespace train_gpt
