// How much of its training data a run reads, and how often.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "dataloader/loader.h"
#include "training/config/config_keys.h"
#include "training/files/position.h"

namespace train_gpt {

/// What a run has read of a source of training data, or will have.
struct SourceUse {
    std::string name;
    int64_t tokens = 0;
    double passes = 0;  // over the source; NaN for synthetic data, which have no end
};

/// Up to so many passes, repeated text is nearly as good as new text: Muennighoff et al. 2023,
/// "Scaling data-constrained language models", arXiv 2305.16264.
constexpr double good_passes = 4;

class DataUse {
  public:
    /// Throws Error if a source holds no sample.
    DataUse(const Config& config, const std::vector<TrainSource>& sources);

    /// The tokens of one pass over all sources.
    int64_t epoch_tokens() const { return epoch_tokens_; }
    /// The first order of a run with these data.
    const DataOrder& order() const { return order_; }
    /// What the run has read of each source after `tokens` in all. The order has these sources.
    std::vector<SourceUse> after(const DataOrder& order, int64_t tokens) const;

  private:
    TrainSources sources_;
    DataOrder order_;
    std::vector<int64_t> epochs_;  // tokens of one pass over each source; 0: synthetic
    int64_t epoch_tokens_ = 0;
};

/// The use of a configuration's data by a model with this vocabulary; nothing if the data are not
/// here or cannot be read.
std::optional<DataUse> data_use_if_readable(const Config& config, int64_t vocab_size);

/// "0.31 passes"
std::string describe_passes(double passes);
/// "training data, as far as the schedule goes: …", and a note if they are repeated too often; empty
/// for synthetic data.
std::string describe_use(const std::vector<SourceUse>& planned);
/// A sentence about the sources that are read more often than good_passes; empty if none is.
std::string note_on_repetition(const std::vector<SourceUse>& planned);

/// As history.jsonl has it: passes over each source that is not synthetic, by name.
Json passes_json(const std::vector<SourceUse>& planned);
std::vector<SourceUse> passes_of(const Json& json);

}  // namespace train_gpt
