// How many threads a rank gets where several share a machine.
#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "parallel/world.h"

namespace train_gpt {

/// The share of one rank in the cores that it may run on, where ranks that have a core in common share it: at least 1, rounded
/// down. cores[rank][c]: '1' where the rank may run on core c; texts may be of different lengths.
int threads_of_rank(std::span<const std::string> cores, size_t rank);

/// Sets OMP_NUM_THREADS to this rank's share of its machine's cores (and of the time that control groups grant), unless the
/// user has set that, OMP_PROC_BIND or OMP_PLACES. Without it each of several ranks that are bound to no cores would start a
/// thread on every core. The ranks of a machine call it together, before a device is opened. Nothing in a world of one.
void share_cores(const World& world);

}  // namespace train_gpt
