// `verify` of a run: its history, and the run's files, checkpoints and data by what the history
// records.
#pragma once
#include <cstdio>
#include <filesystem>

#include "base/json_text.h"
#include "training/commands/verification_options.h"
#include "training/commands/verification_table.h"

namespace train_gpt {

/// Whether a folder is a run's: it has a history or checkpoints.
bool is_run_folder(const std::filesystem::path& folder);

/// Verifies a run's folder: the chain of its history; its configuration; all its checkpoints; the
/// tokenizer and the data of its last start. Prints what the newest checkpoint was made from.
/// Returns that, and what was found about the history, for --json.
Json verify_run(const std::filesystem::path& run_dir, const VerifyOptions& options,
                VerificationTable& table);

/// Verifies a checkpoint. If it lies in a run's folder with a history: by this history, too, and
/// prints what the checkpoint was made from.
Json verify_one_checkpoint(const std::filesystem::path& checkpoint, VerificationTable& table);

}  // namespace train_gpt
