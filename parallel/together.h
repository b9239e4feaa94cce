// Work outside of steps that fails on all ranks if it fails on one rank, so that no rank waits for
// a rank that has failed.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "parallel/world.h"

namespace train_gpt {

/// An error that every rank knows about: one rank prints it for all.
class SharedError : public Error {
  public:
    using Error::Error;
};

/// Every rank runs `work`. Returns the texts of all ranks, by rank. Throws SharedError on all ranks
/// if `work` throws on one of them; the message names the first rank that failed. In a world of
/// one, exceptions of `work` pass through.
std::vector<std::string> together(const World& world, const std::function<std::string()>& work);

/// The first rank runs `work`. Returns the first rank's text on all ranks. Throws as together().
std::string first_for_all(const World& world, const std::function<std::string()>& work);

/// Throws SharedError if a fact (name → value) differs between ranks. The message lists each such
/// fact, its values, and the ranks with each value.
void require_same(const World& world, const std::map<std::string, std::string>& facts);

}  // namespace train_gpt
