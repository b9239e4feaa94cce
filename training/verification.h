// The command `verify`: data and checkpoints compared with the hashes of their manifests, at once.
#pragma once
#include <cstdio>
#include <string>

namespace train_gpt {

/// Prints a table of files with their bytes and what came of each: "ok", "damaged", "no hash" (nothing recorded one),
/// "missing". `what`: a folder made by `tokenize` or its data.json; a glob of token shards, or a folder of them; a checkpoint;
/// the folder of a model; a run's folder, for all its checkpoints. Returns whether nothing was damaged or missing. Throws Error
/// where there is nothing of these.
bool verify(const std::string& what, std::FILE* out);

}  // namespace train_gpt
