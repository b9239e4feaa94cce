// What a run reads: tokenizer, training data and evaluation data. All of it is opened and checked
// before anything is planned.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/loader.h"
#include "model/stage.h"
#include "tokenizer/tokenizer.h"
#include "training/config/config.h"
#include "training/data_use.h"
#include "training/run_evaluation.h"
#include "training/watch/shard_watch.h"

namespace train_gpt {

/// Throws Error if a configuration does not set something that a run needs, or names data of
/// known_data.h that has not been made yet, or folders instead of shards. `file`: the configuration's, for error messages.
void require_run_inputs(const Config& config, const std::string& file);

class RunData {
  public:
    /// Opens everything. Throws Error for what is missing or damaged, and where tokenizer, model
    /// and data do not match.
    RunData(const Config& config, const std::string& file);
    RunData(const RunData&) = delete;
    RunData& operator=(const RunData&) = delete;

    /// Null if there is none: the data are token ids that nothing here can turn into text.
    const Tokenizer* tokenizer() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
    /// Of its tokenizer.json; "none" if there is no tokenizer.
    std::string tokenizer_hash() const;
    /// The model, with the tokenizer's vocabulary where the configuration gives none.
    const DecoderSpec& spec() const { return spec_; }
    const std::vector<TrainSource>& sources() const { return sources_; }
    const Evaluations& evaluations() const { return evaluations_; }
    const DataUse& use() const { return *use_; }

    /// What must be the same on all ranks before they begin, for require_same().
    std::map<std::string, std::string> facts(const Config& config, const Device& device) const;
    /// All shards that the run reads, each once.
    std::vector<WatchedShard> shards() const;

  private:
    void open_evaluations(const Config& config, const std::string& file);

    std::optional<Tokenizer> tokenizer_;
    DecoderSpec spec_;
    std::vector<TrainSource> sources_;
    std::shared_ptr<const TokenShards> validation_;  // null: none
    Evaluations evaluations_;
    std::optional<DataUse> use_;
};

}  // namespace train_gpt
