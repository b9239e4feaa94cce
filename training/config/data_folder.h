// Folders that `train_gpt tokenize` wrote, named where shards belong.
#pragma once
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// What --data FOLDER stands for, as overrides: data.train, data.val (empty if the folder has no
/// validation shards) and tokenizer.path. Throws Error, which says what the folder lacks.
std::vector<std::string> data_overrides(const std::string& folder);

/// The validation shards that `eval --data` names: a glob, or a folder with val_*.bin.
std::string validation_glob(const std::string& data);

/// Throws Error where a configuration names a folder instead of shards; it says which shards the
/// folder has. file: the configuration's.
void require_no_folders(const Config& config, const std::string& file);

}  // namespace train_gpt
