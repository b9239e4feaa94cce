// The ranks of a run. One process drives one device; a launcher starts several, nothing starts one.
#pragma once

namespace train_gpt {

struct World {
    int rank = 0, size = 1;
};

/// The world this process belongs to. This version trains in a world of one: under a launcher that
/// started more ranks it throws Error, so that they do not train the same model side by side
/// without knowing.
World join_world();

}  // namespace train_gpt
