// Work outside of steps that fails on all ranks when it fails on one, so that no rank waits for one
// that is gone.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "parallel/world.h"

namespace train_gpt {

/// An error that every rank knows about, so that one of them printing it is enough.
class SharedError : public Error {
  public:
    using Error::Error;
};

/// Every rank runs `work`; returns the texts of all of them, by rank. In a world of one its
/// exceptions pass through; otherwise they become a SharedError on all ranks, which names the first
/// rank that failed.
std::vector<std::string> together(const World& world, const std::function<std::string()>& work);

/// The first rank runs `work`; all ranks get its text. Errors as in together().
std::string first_for_all(const World& world, const std::function<std::string()>& work);

/// Throws SharedError if a fact (name → value) differs between ranks; it names each such fact,
/// with its values and the ranks that have them.
void require_same(const World& world, const std::map<std::string, std::string>& facts);

}  // namespace train_gpt
