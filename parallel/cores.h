// How many threads a rank gets where several ranks share a machine.
#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "parallel/world.h"

namespace train_gpt {

/// How many threads a rank gets. Ranks that may run on the same core get equal shares of the core.
/// The sum of a rank's shares is rounded down, and is at least 1. cores[rank][c] is '1' if the rank
/// may run on core c; the texts may have different lengths.
int threads_of_rank(std::span<const std::string> cores, size_t rank);

/// Sets OMP_NUM_THREADS to this rank's share of its machine's cores, and of the CPU time that
/// control groups grant. Without it, each rank that is not bound to cores would start a thread on
/// every core. Does nothing if the user has set OMP_NUM_THREADS, OMP_PROC_BIND or OMP_PLACES, or in
/// a world of one. The ranks of a machine call it together, before a device is opened.
void share_cores(const World& world);

}  // namespace train_gpt
