// What a run's history records about a start of the run: who started which program, where, and on
// what.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "training/files/history_chain.h"

namespace train_gpt {

struct RunStart;

/// The event "start" of a run whose folder has its config.json, manifest.json and choices.json.
/// hosts: of all ranks. `before`: the history so far. Hashing the program takes about 3 ms a
/// megabyte.
Json start_event(const RunStart& start, std::vector<std::string> hosts, const HistoryChain& before);

/// What the manifest.json of a run's folder says of its data: {"sha256", "train", "val"}. Without
/// the lists if `before` has them already, for the same hash. Empty if the file cannot be read.
Json data_of_run(const std::filesystem::path& run_dir, const std::vector<Json>& before);

/// The SHA-256 of those files of a run's folder that its start has written.
Json hashes_of_run(const std::filesystem::path& run_dir);

/// What has changed between two starts, in the order of the second: a list of
/// {"what": "configuration.optimizer.learning_rate", "before": …, "now": …}. Null: it was, or is,
/// not there.
Json changes_between(const Json& before, const Json& now);

}  // namespace train_gpt
