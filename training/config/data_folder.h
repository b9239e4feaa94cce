// For users who name a folder that `train_gpt tokenize` wrote instead of the shards in it.
#pragma once
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// The overrides for which --data FOLDER stands: data.train, data.val (empty if the folder has no
/// validation shards) and tokenizer.path. Throws Error if the folder lacks something; the message
/// says what.
std::vector<std::string> data_overrides(const std::string& folder);

/// The validation shards that `eval --data` names: a glob, or a folder with val_*.bin.
std::string validation_glob(const std::string& data);

/// Throws Error if a configuration names a folder instead of shards. The message says which shards
/// the folder has. file: the configuration's file.
void require_no_folders(const Config& config, const std::string& file);

}  // namespace train_gpt
