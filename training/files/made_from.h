// What the model in a checkpoint was made from, by the records of its run.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/json_text.h"
#include "training/files/history_chain.h"

namespace train_gpt {

/// One object:
///
///   checkpoint, step, tokens   the folder; what was trained when it was written
///   manifest, line, history    the SHA-256 of its manifest; the line of the history that records
///                              it; the hash of the line that the manifest names
///   sources                    of training data: name, weight, tokens that were read of each
///   configuration              the last start's, else the checkpoint's
///   starts                     the starts of the run that trained it: "first" and "last" step, and
///                              what the history says of each, such as user, host, version, binary,
///                              mesh, and "changes" since the start before
///   data                       the files of training and validation data, with their hashes
///   tokenizer                  path, sha256
///   evaluations                one for each step, the last one that was made
///   events                     how many spikes, failures and signals the run had until then
///
/// What is not recorded is left out. `history`: of the checkpoint's run; without lines, only the
/// checkpoint's own files are used.
Json made_from(const std::filesystem::path& checkpoint, const HistoryChain& history);

/// The JSON of made_from() for people: lines that end with newlines.
std::string describe_made_from(const Json& made);

/// "steps 1 to 8": what a start has trained.
std::string describe_steps_of(const Json& start);

}  // namespace train_gpt
