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

/// Repeated text is nearly as good as new text for up to so many passes: Muennighoff et al. 2023,
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
    /// What the run has read of each source after it has read `tokens` in total. `order` must have
    /// the sources of this object.
    std::vector<SourceUse> after(const DataOrder& order, int64_t tokens) const;

  private:
    TrainSources sources_;
    DataOrder order_;
    std::vector<int64_t> epochs_;  // tokens of one pass over each source; 0: synthetic
    int64_t epoch_tokens_ = 0;
};

/// How a model with this vocabulary uses a configuration's data. Returns nothing if the data are
/// not there or cannot be read.
std::optional<DataUse> data_use_if_readable(const Config& config, int64_t vocab_size);

/// "0.31 passes"
std::string describe_passes(double passes);
/// "training data, as far as the schedule goes: …", and a note if data are repeated too often.
/// Empty if the only source is synthetic.
std::string describe_use(const std::vector<SourceUse>& planned);
/// A sentence about the sources that are read more than good_passes times; empty if there are none.
std::string note_on_repetition(const std::vector<SourceUse>& planned);

/// The passes over each source that is not synthetic, by name, as history.jsonl has them.
Json passes_json(const std::vector<SourceUse>& planned);
std::vector<SourceUse> passes_of(const Json& json);

}  // namespace train_gpt
