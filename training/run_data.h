// What a run reads: tokenizer, training data and evaluation data. All of these are opened and
// checked before anything is planned.
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

/// Throws Error if a configuration does not set something that a run needs, if it names data of
/// known_data.h that have not been made yet, or if it names folders instead of shards. `file`: the
/// configuration's file, for error messages.
void require_run_inputs(const Config& config, const std::string& file);

class RunData {
  public:
    /// Opens everything. Throws Error if something is missing or damaged, or if tokenizer, model
    /// and data do not match.
    RunData(const Config& config, const std::string& file);
    RunData(const RunData&) = delete;
    RunData& operator=(const RunData&) = delete;

    /// Null if there is no tokenizer: the data then are token ids that nothing can turn into text.
    const Tokenizer* tokenizer() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
    /// The hash of the tokenizer's tokenizer.json; "none" if there is no tokenizer.
    std::string tokenizer_hash() const;
    /// The model. If the configuration gives no size of the vocabulary, it is the tokenizer's.
    const DecoderSpec& spec() const { return spec_; }
    const std::vector<TrainSource>& sources() const { return sources_; }
    const Evaluations& evaluations() const { return evaluations_; }
    const DataUse& use() const { return *use_; }

    /// Facts for require_same(): they must be the same on all ranks before the run begins.
    std::map<std::string, std::string> facts(const Config& config, const Device& device) const;
    /// All shards that the run reads, each once.
    std::vector<WatchedShard> shards() const;

  private:
    void open_evaluations(const Config& config, const std::string& file);

    std::optional<Tokenizer> tokenizer_;
    DecoderSpec spec_;
    std::vector<TrainSource> sources_;
    std::shared_ptr<const TokenShards> validation_;  // null: no validation data
    Evaluations evaluations_;
    std::optional<DataUse> use_;
};

}  // namespace train_gpt
