// What is said where a run does not fit into memory: a change with which it fits.
#pragma once
#include <string>

#include "device/memory.h"
#include "training/config/layout.h"
#include "training/plan/memory_plan.h"

namespace train_gpt {

/// The smallest change that makes the configuration fit into `available` memory of each rank, as a
/// sentence; if none does, the least memory that it would need.
std::string change_that_fits(const RunShape& shape, const Device& device,
                             const DeviceAndHost& available);

/// Throws Error if a rank's plan pins more of the host's memory than is `available` to it; the
/// message says what fits, and with how many of the host's local_ranks. No rank may have allocated
/// yet.
void require_host_memory(const Arena& plan, const RunShape& shape, const DeviceAndHost& available,
                         int local_ranks);
/// Allocates the memory of a run's plan. If there is not enough, the Error says what takes how
/// much and what would fit. local_ranks: of this host.
Arena allocate_or_advise(const Arena& plan, const RunShape& shape, int local_ranks = 1);

}  // namespace train_gpt
