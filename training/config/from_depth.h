// A configuration from one number, the depth: width, heads, tokens, batch and rates follow from
// published rules.
#pragma once
#include <string>
#include <vector>

#include "training/config/config.h"

namespace train_gpt {

constexpr int most_depth = 256;

/// A value of the configuration, and where it comes from.
struct DepthRule {
    std::string key, value /* as JSON */, rule, source;
};

/// A Llama of so many layers, and how to train it. With L layers, P parameters in matrix products
/// outside of the vocabulary, and D tokens:
///
///   width     64 · L                              nanochat
///   heads     of 128 where that divides the width, else of 64
///   D         20 · P                              Hoffmann et al. 2022, arXiv 2203.15556
///   batch     0.58 · D^0.571 tokens, as the nearest power of two
///                                                 Li et al. 2025 (Step Law), arXiv 2503.04715
///   rate      1.79 · P^-0.713 · D^0.307           the same
///   decay     linear, to 0                        Bergsma et al. 2025, arXiv 2502.15938
///
/// rules: a row for each key that is set.
Config config_from_depth(int depth, std::vector<DepthRule>& rules);

/// The configuration as JSON, with the keys that the rules set, and a description.
std::string depth_config_text(int depth);
/// Each of these values with its rule and source, as a table.
std::string depth_rules_text(int depth);

}  // namespace train_gpt
