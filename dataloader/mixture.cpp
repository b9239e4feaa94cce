#include "dataloader/mixture.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "dataloader/permutation.h"

namespace train_gpt {

Mixture::Mixture(uint64_t seed, std::vector<double> weights)
    : seed_(seed), weights_(std::move(weights)) {
    if (weights_.empty() || weights_.size() > max_sources)
        throw Error("training data come from 1 to ", max_sources, " sources, not ",
                    weights_.size());
    for (const double weight : weights_)
        if (!(weight > 0) || !std::isfinite(weight))
            throw Error("the weight of a source of training data is ", weight,
                        ", but must be a finite number greater than 0");
    heaviest_ =
        static_cast<size_t>(std::max_element(weights_.begin(), weights_.end()) - weights_.begin());
    // Divides by the largest first, so that the sum cannot overflow.
    const double largest = weights_[heaviest_];
    for (double& weight : weights_) weight /= largest;
    const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    for (double& weight : weights_) weight /= sum;
}

std::vector<int64_t> Mixture::counts_behind(int64_t blocks) const {
    std::vector<int64_t> counts;
    int64_t rest = blocks * block;
    for (const double weight : weights_) {
        counts.push_back(
            static_cast<int64_t>(std::floor(weight * static_cast<double>(blocks * block))));
        rest -= counts.back();
    }
    counts[heaviest_] += rest;
    return counts;
}

std::vector<Mixture::Draw> Mixture::deal(int64_t block_number) const {
    std::vector<int64_t> next = counts_behind(block_number);
    const std::vector<int64_t> end = counts_behind(block_number + 1);
    std::vector<int> turns;
    for (size_t s = 0; s < next.size(); ++s) {
        assert(end[s] >= next[s]);
        turns.insert(turns.end(), static_cast<size_t>(end[s] - next[s]), static_cast<int>(s));
    }
    // Uses a different seed from the permutations of windows.
    const Permutation shuffle(~seed_, static_cast<uint64_t>(block_number), block);
    std::vector<Draw> draws;
    for (int64_t i = 0; i < block; ++i) {
        const int source = turns[static_cast<size_t>(shuffle(i))];
        draws.push_back({source, next[static_cast<size_t>(source)]++});
    }
    return draws;
}

Mixture::Draw Mixture::operator()(int64_t sample) {
    assert(sample >= 0);
    if (weights_.size() == 1) return {0, sample};
    if (const int64_t wanted = sample / block; wanted != dealt_block_) {
        dealt_ = deal(wanted);
        dealt_block_ = wanted;
    }
    return dealt_[static_cast<size_t>(sample % block)];
}

std::vector<int64_t> Mixture::counts_before(int64_t sample) const {
    if (weights_.size() == 1) return {sample};
    std::vector<int64_t> counts = counts_behind(sample / block);
    const std::vector<Draw> draws = deal(sample / block);
    for (int64_t i = 0; i < sample % block; ++i)
        ++counts[static_cast<size_t>(draws[static_cast<size_t>(i)].source)];
    return counts;
}

}  // namespace train_gpt
