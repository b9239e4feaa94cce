// The attention of all heads as text, small enough for a page.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "training/look/inside.h"

namespace train_gpt {

/// A weight w has level round(63·√w), so that small weights are told apart too. Levels below the
/// floor count as 0.
constexpr int attention_levels = 63;

/// Levels as letters of A … Z, a … z, 0 … 9, - and _; several zeros are "." and letter n for n + 1
/// zeros.
std::string packed_levels(std::span<const unsigned char> levels, int floor);

struct AttentionText {
    /// For each layer and each of its heads in `heads`: packed_levels() of the rows of all tokens,
    /// one after the other. Row t has the sink's share, if the layer has sinks, then the weights of
    /// tokens 0 … t.
    std::vector<std::vector<std::string>> layers;
    int every = 1;  // heads 0, every, 2·every, … are there
    int floor = 1;  // of levels
};

/// The attention of all layers in at most `most_bytes` where possible: small weights become 0
/// first, then every second head is left out, and so on.
AttentionText attention_text(const Inside& inside, size_t most_bytes);

}  // namespace train_gpt
