// Runs this process as one of the ranks that a launcher started: a failure on one rank ends all
// ranks.
#pragma once
#include <functional>
#include <string>

#include "device/device.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"
#include "parallel/world.h"

namespace train_gpt {

/// Joins the world and runs `work`. Returns the result of `work`, or 1 after a SharedError, which
/// the first rank prints. A ReportedError passes through. In a world of one, other exceptions pass
/// through, too. With several ranks, another exception is printed with rank and host, and ends all
/// ranks.
int run_as_rank(const std::function<int(const World&)>& work);

struct RankOptions {
    std::string device = "auto";  // as for device_of_rank()
    double timeout_seconds = 300;
    CollectiveSettings collectives = {};
    MeshSizes mesh = {};
};

/// Runs `work` on this rank's device with the mesh of all ranks, while a watchdog makes sure that
/// no rank waits for a rank that is gone. Must be called within run_as_rank(). Returns the result
/// of `work`, or 1 after a SharedError, which the first rank prints. Throws ReportedError for a
/// failure that the watchdog has printed.
int run_watched(const World& world, const RankOptions& options,
                const std::function<int(const Device&, const Mesh&)>& work);

}  // namespace train_gpt
