// A page about what a model computes of a text: one HTML file, which needs no other files and no
// network.
#pragma once
#include <cstddef>
#include <string>

#include "tokenizer/tokenizer.h"
#include "training/look/inside.h"

namespace train_gpt {

constexpr size_t most_look_bytes = 2'000'000;

struct LookPage {
    const Inside& inside;
    const Tokenizer& tokenizer;
    std::string name;   // of the model
    std::string model;  // what it is, in a sentence
    std::string note;   // shown at the top, as a sentence; may be empty
};

/// The page, of less than most_look_bytes unless the model's norms and routes alone take more. All
/// texts are escaped.
std::string look_page(const LookPage& look);

}  // namespace train_gpt
