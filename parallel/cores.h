// How many threads a rank gets where several ranks share a machine.
#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "parallel/world.h"

namespace train_gpt {

/// One rank's share of the cores that it may run on, where ranks that have a core in common share
/// it; rounded down, at least 1. cores[rank][c]: '1' where the rank may run on core c; the texts
/// may have different lengths.
int threads_of_rank(std::span<const std::string> cores, size_t rank);

/// Sets OMP_NUM_THREADS to this rank's share of its machine's cores (and of the CPU time that
/// control groups grant), unless the user has set that, OMP_PROC_BIND or OMP_PLACES. Otherwise each
/// of several ranks that are not bound to cores would start a thread on every core. The ranks of a
/// machine call it together, before a device is opened. Does nothing in a world of one.
void share_cores(const World& world);

}  // namespace train_gpt
