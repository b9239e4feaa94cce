// This process as one of the ranks that a launcher started: what goes wrong on one of them ends
// all.
#pragma once
#include <functional>
#include <string>

#include "base/error.h"
#include "device/device.h"
#include "parallel/communicator.h"
#include "parallel/world.h"

namespace train_gpt {

/// An error that the watchdog has printed.
class ReportedError : public Error {
  public:
    using Error::Error;
};

/// Joins the world and does `work`; gives its result, or 1 after a SharedError, which the first
/// rank prints. Another exception passes through in a world of one; else it is printed with rank
/// and host, and ends all ranks.
int run_as_rank(const std::function<int(const World&)>& work);

/// Does `work` on this rank's device with the group of all ranks, while a watchdog sees to it that
/// no rank waits for one that is gone. To be called within run_as_rank(). Throws ReportedError for
/// what the watchdog has printed.
int run_watched(const World& world, const std::string& wanted_device, double timeout_seconds,
                const std::function<int(const Device&, Communicator&)>& work);

}  // namespace train_gpt
