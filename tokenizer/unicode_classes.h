// The classes of code points that pre-tokenisation distinguishes, as sorted ranges.
//
// Generated tables instead of a Unicode library: the version is fixed, so a text has the same
// tokens on every system, and it is the version that the reference tokenizers are built with.
#pragma once
#include <cstdint>
#include <span>

namespace train_gpt {

struct CodePointRange {
    uint32_t first, last;  // both included
};

std::span<const CodePointRange> letter_ranges();  // \p{L}
std::span<const CodePointRange> number_ranges();  // \p{N}
std::span<const CodePointRange> space_ranges();   // \s

}  // namespace train_gpt
