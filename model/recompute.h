// What a training step keeps from a block's forward pass for the block's backward pass.
#pragma once
#include <string>

namespace train_gpt {

/// What the backward pass computes again, so that the forward pass need not keep it.
enum class Recompute {
    none,
    elementwise,  // outputs of norms and activation functions, and rotated queries and keys
    block         // everything but the input of each block and the routes of its experts
};
/// From the level that keeps the most to the level that keeps the least.
inline constexpr Recompute recompute_levels[] = {Recompute::none, Recompute::elementwise,
                                                 Recompute::block};

constexpr const char* name_of(Recompute level) {
    return level == Recompute::block         ? "block"
           : level == Recompute::elementwise ? "elementwise"
                                             : "none";
}

inline Recompute recompute_from(const std::string& name) {
    for (const Recompute level : {Recompute::elementwise, Recompute::block})
        if (name == name_of(level)) return level;
    return Recompute::none;
}

}  // namespace train_gpt
