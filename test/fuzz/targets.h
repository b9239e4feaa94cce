// Readers of files that come from elsewhere, each as a function of any bytes: what libFuzzer calls (fuzz.cpp), and what
// `make test` calls with the seeds (seeds_test.cpp).
#pragma once
#include <cstddef>
#include <span>

namespace train_gpt {

struct FuzzTarget {
    const char* name;  // its seeds are in test/fuzz/seeds/NAME/
    /// Reads a file with these bytes and uses what it holds. Whether the reader took them: one that
    /// refuses throws Error, nothing else, and any broken promise is a std::logic_error.
    bool (*run)(std::span<const std::byte> bytes);
};

std::span<const FuzzTarget> fuzz_targets();

}  // namespace train_gpt
