// Work outside of steps that fails on all ranks when it fails on one, so that none waits for another that is gone.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "parallel/world.h"

namespace train_gpt {

/// An error that every rank knows of: one of them saying it is enough.
class SharedError : public Error {
  public:
    using Error::Error;
};

/// Every rank does `work`; gives the texts that it returned, by rank. In a world of one its exceptions pass through; else
/// they become a SharedError on all ranks, which names the first one that failed.
std::vector<std::string> together(const World& world, const std::function<std::string()>& work);

/// The first rank does `work`; gives its text to all.
std::string first_for_all(const World& world, const std::function<std::string()>& work);

/// Throws SharedError where a fact (name → value) differs between ranks; it names each that does, with its values and the ranks
/// that have them.
void require_same(const World& world, const std::map<std::string, std::string>& facts);

}  // namespace train_gpt
