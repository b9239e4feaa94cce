// Runs this process as one of the ranks that a launcher started: a failure on one rank ends all of
// them.
#pragma once
#include <functional>
#include <string>

#include "device/device.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"
#include "parallel/world.h"

namespace train_gpt {

/// Joins the world and runs `work`. Returns its result, or 1 after a SharedError, which the first
/// rank prints. A ReportedError passes through, and so does any other exception in a world of one;
/// with several ranks it is printed with rank and host, and ends all of them.
int run_as_rank(const std::function<int(const World&)>& work);

struct RankOptions {
    std::string device = "auto";  // as for device_of_rank()
    double timeout_seconds = 300;
    CollectiveSettings collectives = {};
    MeshSizes mesh = {};
};

/// Runs `work` on this rank's device with the mesh of all ranks, while a watchdog makes sure that
/// no rank waits for one that is gone. Must be called within run_as_rank(). Throws ReportedError
/// for what the watchdog has printed; returns 1 after a SharedError, which the first rank prints.
int run_watched(const World& world, const RankOptions& options,
                const std::function<int(const Device&, const Mesh&)>& work);

}  // namespace train_gpt
