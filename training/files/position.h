// Where a run is: the tokens that it has read, and its place in the order of its training data.
// Checkpoints keep this position. So a run that resumes may have other steps, data or seeds than
// before.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

/// The tokens that a run has read before each of its steps. The number of tokens in a step may
/// change when the run resumes.
class TokenCount {
  public:
    explicit TokenCount(int64_t per_step = 1) : parts_{{0, 0, per_step}} {}

    /// Steps count from 0.
    int64_t before(int64_t step) const;
    /// `step` and all later steps have per_step tokens from now on.
    void change(int64_t step, int64_t per_step);
    /// Tokens of the last steps.
    int64_t per_step() const { return parts_.back().per_step; }
    int64_t of_step(int64_t step) const { return before(step + 1) - before(step); }

    /// Steps of the same size.
    struct Part {
        int64_t first_step, first_token, per_step;
        bool operator==(const Part&) const = default;
    };
    const std::vector<Part>& parts() const { return parts_; }

  private:
    std::vector<Part> parts_;
};

/// An order of training samples: the loader's permutations and mixture, and the token at which the
/// order began. If seed, T or sources change when a run resumes, another order begins at its
/// first sample.
struct DataOrder {
    struct Source {
        std::string content;  // TokenShards::fingerprint
        double weight;
    };

    uint64_t seed = 0;
    int T = 1;                         // tokens of a sample
    std::vector<Source> sources = {};  // empty: an older version did not record them
    int64_t first_token = 0;
    std::map<std::string, int64_t> tokens_before = {};  // taken by earlier orders, by content

    /// Whether both orders take the same shares of the same data.
    bool has_sources_of(const DataOrder& other) const;
    /// The tokens that each source has given to this order when the run has read `tokens`.
    std::vector<int64_t> tokens_of_sources(int64_t tokens) const;

    /// The key from which the loader makes its permutations. Two orders of a run that begin at
    /// different tokens have different keys, even if they have the same seed and data.
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

/// Reads the position of a checkpoint of `step`. `config`: the checkpoint's configuration. A
/// checkpoint of an older version has no position.json; all steps of its run had the batch of
/// `config`. Throws Error if the file is damaged.
RunPosition read_position(const std::filesystem::path& checkpoint, int64_t step,
                          const Config& config);

}  // namespace train_gpt
