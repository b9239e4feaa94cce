// The command `verify`: compares data and checkpoints with the hashes in their manifests, at full
// speed.
#pragma once
#include <cstdio>
#include <string>

namespace train_gpt {

/// Prints a table of files with their bytes and results: "ok", "damaged", "no hash" (no hash is
/// recorded) or "missing". `what` is one of these:
///   a folder that `tokenize` has made, or its data.json;
///   a glob of token shards, or a folder of token shards;
///   a checkpoint;
///   a model's folder;
///   a run's folder, which stands for all its checkpoints.
/// Returns true if nothing was damaged or missing. Throws Error if `what` is none of these.
bool verify(const std::string& what, std::FILE* out);

}  // namespace train_gpt
