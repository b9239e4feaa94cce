// Where a run is: the tokens that it has read, and its place in the order of its training data.
// Checkpoints keep it, so that a run that resumes may have other steps, data or seeds than before.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// The tokens that a run has read before each of its steps. Their number in a step may change when
/// the run resumes.
class TokenCount {
  public:
    explicit TokenCount(int64_t per_step = 1) : parts_{{0, 0, per_step}} {}

    /// Steps count from 0.
    int64_t before(int64_t step) const;
    /// Steps from this one on have so many tokens; what was said of them before is dropped.
    void change(int64_t step, int64_t per_step);
    /// Tokens of the last steps.
    int64_t per_step() const { return parts_.back().per_step; }

    /// Steps of the same size.
    struct Part {
        int64_t first_step, first_token, per_step;
        bool operator==(const Part&) const = default;
    };
    const std::vector<Part>& parts() const { return parts_; }

  private:
    std::vector<Part> parts_;
};

/// An order of training samples: the loader's permutations and mixture, and where it began. If what
/// it depends on changes when a run resumes, another one begins at its first sample.
struct DataOrder {
    struct Source {
        std::string content;  // TokenShards::fingerprint
        double weight;
    };

    uint64_t seed = 0;
    int T = 1;                         // tokens of a sample
    std::vector<Source> sources = {};  // empty: not recorded, by older versions
    int64_t first_token = 0;
    std::map<std::string, int64_t> tokens_before = {};  // that earlier orders took, by content

    /// Whether both take the same shares of the same data.
    bool has_sources_of(const DataOrder& other) const;
    /// The tokens that each source has given to this order when the run has read `tokens`.
    std::vector<int64_t> tokens_of_sources(int64_t tokens) const;

    /// For the loader. An order that does not begin with the run is a new one even if seed and data
    /// are those of an earlier order.
    uint64_t key() const { return seed + 0x9e3779b97f4a7c15 * static_cast<uint64_t>(first_token); }
    /// The number of the sample that begins after so many tokens of the run.
    int64_t sample_after(int64_t tokens) const { return (tokens - first_token) / T; }
};

struct RunPosition {
    int64_t step = 0;
    TokenCount tokens = TokenCount(1);
    DataOrder order = {};
};

/// Writes position.json into a checkpoint's folder.
void write_position(const std::filesystem::path& checkpoint, const RunPosition& position);

/// The position of a checkpoint of `step`. Checkpoints of older versions have no position.json: all
/// their steps had the batch of `config`, which is their own. Throws Error if it is damaged.
RunPosition read_position(const std::filesystem::path& checkpoint, int64_t step,
                          const Config& config);

}  // namespace train_gpt
