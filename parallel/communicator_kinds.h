// The kinds of groups that open_communicator() chooses from. Those of MPI and NCCL throw Error where the build has none.
#pragma once
#include <memory>
#include <optional>

#include "parallel/communicator.h"

namespace train_gpt {

/// A rank alone: nothing moves, except from `in` to `out`.
std::unique_ptr<Communicator> open_group_of_one(Activity& activity);

/// All ranks, for buffers in the host's memory. `node` is for tests: ranks that give the same number take themselves for one
/// node's, although more of them share memory.
std::unique_ptr<Communicator> open_mpi_communicator(const World& world, Activity& activity,
                                                    std::optional<int> node = {});

/// All ranks, each with a GPU of its own.
std::unique_ptr<Communicator> open_nccl_communicator(const World& world, const Device& device,
                                                     Activity& activity);

}  // namespace train_gpt
