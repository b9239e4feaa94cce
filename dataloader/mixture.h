// Mixtures: which source each training sample comes from.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace train_gpt {

/// Deals an endless sequence of samples to sources in proportion to their weights. The result
/// depends only on (seed, weights, sample).
///
/// Samples are dealt in blocks of `block`. After b blocks, source s has received
///
///     c_s(b) = floor(w_s / Σ w · block · b) samples, and the heaviest source the rest,
///
/// so that no source's count is ever off by more than the number of sources. Within a block, the
/// turns are shuffled by a permutation that depends on (seed, b); each source's own samples keep
/// their order.
class Mixture {
  public:
    static constexpr int max_sources = 64;
    /// Large enough for the heaviest of max_sources to make up for the rounding of the others.
    static constexpr int64_t block = int64_t{max_sources} * max_sources;

    /// Takes 1 to max_sources weights, each finite and greater than 0; else throws Error.
    Mixture(uint64_t seed, std::vector<double> weights);

    int sources() const { return static_cast<int>(weights_.size()); }

    struct Draw {
        int source = 0;
        int64_t index = 0;  // counts this source's samples from 0
    };
    /// The draw of a sample, 0 <= sample. Asking for samples in order is fastest.
    Draw operator()(int64_t sample);

    /// How many of the samples [0, sample) come from each source.
    std::vector<int64_t> counts_before(int64_t sample) const;

  private:
    std::vector<int64_t> counts_behind(int64_t blocks) const;
    std::vector<Draw> deal(int64_t block_number) const;

    uint64_t seed_;
    std::vector<double> weights_;  // normalised to a sum of 1
    size_t heaviest_ = 0;
    int64_t dealt_block_ = -1;
    std::vector<Draw> dealt_;  // of that block
};

}  // namespace train_gpt
