// What the tokenizer's tests share: fixtures, random bytes, and byte-pair encoding straight from
// its definition.
#pragma once
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "test/random.h"
#include "tokenizer/bpe.h"
#include "tokenizer/pretokenize.h"

namespace train_gpt {

std::string fixture_path(const std::string& name);

nlohmann::json read_fixture(const std::string& name);

/// Bytes of all values, with stretches of text, white space, digits and multi-byte characters.
std::string random_bytes(size_t about);

/// A random string over the first letters of the alphabet.
std::string random_letters(size_t length, int letters);

/// Looks at every adjacent pair before every step: merges the pair of lowest rank, and of equal
/// ranks the leftmost.
std::vector<uint32_t> naive_merge(std::vector<uint32_t> ids,
                                  const std::function<RankedMerge(uint32_t, uint32_t)>& find);

std::vector<std::string_view> pieces_of(Pattern pattern, std::string_view text);

}  // namespace train_gpt
