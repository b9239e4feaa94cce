// What a run's history says of the run's files, and whether they still agree.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/verify.h"
#include "training/files/history_chain.h"

namespace train_gpt {

/// The last line that records the checkpoint of a step.
struct CheckpointRecord {
    int64_t line = 0;
    std::string manifest;  // the SHA-256 of its manifest.json
    bool saved = false;    // by this run; false: the run found it when it started
};
/// By step.
using CheckpointRecords = std::map<int64_t, CheckpointRecord>;
CheckpointRecords checkpoint_records(const HistoryChain& history);

/// Says that the checkpoint of a start names a line that the history before it does not have. Empty
/// if it has. The checkpoints that replays, and runs with schedule.decay_from, begin with are
/// another run's, whose history is elsewhere.
std::string foreign_checkpoint(const Json& start, const HistoryChain& before);

/// The first start of the run whose checkpoint differs from what the history records for its
/// step, or is foreign (foreign_checkpoint()). Nothing if there is none.
std::optional<HistoryBreak> broken_start(const HistoryChain& history);

/// What is wrong with a checkpoint's manifest.json, by the history: a sentence. Empty if nothing
/// is. The history may have no record of checkpoints that older versions wrote.
std::string checkpoint_trouble(const std::filesystem::path& checkpoint,
                               const HistoryChain& history);

/// The last start in the history; null if there is none.
const HistoryLine* last_start(const HistoryChain& history);

/// What is wrong with config.json, manifest.json and choices.json in the run's folder. Empty if the
/// last start, and what was recorded after it, has them as they are.
std::string run_files_trouble(const std::filesystem::path& run_dir, const HistoryChain& history);

/// The data of the last start up to a line (0: of all) as recorded: the lists "train" and "val" of
/// manifest.json. Null if they are not recorded.
Json recorded_data_of(const HistoryChain& history, int64_t line = 0);
/// The files in such lists, each once, with the sizes and hashes in them. Relative paths are the
/// last start's, unless they lead to a file from here.
std::vector<RecordedFile> data_files_of(const std::filesystem::path& run_dir,
                                        const HistoryChain& history);

}  // namespace train_gpt
