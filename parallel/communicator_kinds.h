// The kinds of groups that open_communicator() chooses from. In a build without NCCL,
// open_nccl_communicator() throws Error.
#pragma once
#include <memory>
#include <optional>

#include "parallel/communicator.h"

namespace train_gpt {

/// A group of one rank: nothing moves, except from `in` to `out`.
std::unique_ptr<Communicator> open_group_of_one(Activity& activity);

/// All ranks, for buffers in host memory. `node` is for tests: ranks that pass the same number form
/// a node, even if all of them share memory.
std::unique_ptr<Communicator> open_cpu_communicator(const World& world, Activity& activity,
                                                    std::optional<int> node = {},
                                                    const CollectiveSettings& settings = {});

/// All ranks, each with its own GPU.
std::unique_ptr<Communicator> open_nccl_communicator(const World& world, const Device& device,
                                                     Activity& activity,
                                                     const CollectiveSettings& settings);

}  // namespace train_gpt
