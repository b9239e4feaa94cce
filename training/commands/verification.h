// The command `verify`: compares data and checkpoints with the hashes in their manifests, at full
// speed.
#pragma once
#include <cstdio>
#include <string>

namespace train_gpt {

/// Prints a table of files with their bytes and the result for each: "ok", "damaged", "no hash"
/// (none is recorded), "missing". `what`: a folder made by `tokenize` or its data.json; a glob of
/// token shards, or a folder of them; a checkpoint; the folder of a model; a run's folder, for all
/// its checkpoints. Returns whether nothing was damaged or missing. Throws Error if `what` is
/// none of these.
bool verify(const std::string& what, std::FILE* out);

}  // namespace train_gpt
