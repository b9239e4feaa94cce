// The command `verify`: compares data, models and checkpoints with the hashes in their manifests,
// and a run with its history, at full speed.
#pragma once
#include <cstdio>

#include "training/commands/verification_options.h"

namespace train_gpt {

/// Prints a table of files with their bytes and results: "ok", "damaged", "no hash" (no hash is
/// recorded) or "missing". `what` is one of these:
///   a folder that `tokenize` has made, or its data.json;
///   a glob of token shards, or a folder of token shards;
///   a checkpoint, which is also compared with its run's history, if it lies in the run's folder;
///   a model's folder, which is also compared with its provenance.json, if it has one;
///   a run's folder: run_verification.h.
/// Returns true if nothing was damaged or missing. Throws Error if `what` is none of these, and
/// UsageError if an option does not apply to it.
bool verify(const VerifyOptions& options, std::FILE* out);

}  // namespace train_gpt
