// Readers of files that come from elsewhere, each as a function of arbitrary bytes: libFuzzer calls
// them (fuzz.cpp), and `make test` calls them with the seeds (seeds_test.cpp).
#pragma once
#include <cstddef>
#include <span>

namespace train_gpt {

struct FuzzTarget {
    const char* name;  // its seeds are in test/fuzz/seeds/NAME/
    /// Reads a file with these bytes and uses its content. Returns true if the reader accepts it,
    /// false if it throws Error. A reader throws nothing else, and any broken promise is a
    /// std::logic_error.
    bool (*run)(std::span<const std::byte> bytes);
};

std::span<const FuzzTarget> fuzz_targets();

}  // namespace train_gpt
