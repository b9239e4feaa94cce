#include "training/rank_process.h"

#include <cstdio>
#include <exception>
#include <memory>

#include "parallel/cores.h"
#include "parallel/together.h"
#include "parallel/watchdog/watchdog.h"

namespace train_gpt {

int run_as_rank(const std::function<int(const World&)>& work) {
    const World world = World::join();
    try {
        share_cores(world);
        return work(world);
    } catch (const SharedError& error) {
        if (world.rank() == 0) std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 1;
    } catch (const ReportedError&) {
        throw;
    } catch (const std::exception& error) {
        if (world.size() == 1) throw;
        std::fprintf(stderr, "train_gpt: rank %d (host %s): %s\n", world.rank(),
                     world.host().c_str(), message_of(error).c_str());
        world.abort(1);
    }
}

int run_watched(const World& world, const RankOptions& options,
                const std::function<int(const Device&, Communicator&)>& work) {
    const Device device = device_of_rank(world, options.device);
    const std::unique_ptr<Communicator> group =
        open_communicator(world, device, world.activity(), options.collectives);
    Watchdog::Listener listener(world.rank(), world.size());
    const std::string invitation = world.broadcast(listener.invitation());
    Watchdog watchdog(std::move(listener), invitation, world.activity(),
                      {.rank = world.rank(),
                       .size = world.size(),
                       .host = world.host(),
                       .timeout_seconds = options.timeout_seconds,
                       .check = [&] { group->check(); },
                       .on_failure = [&](const char*) { group->abort(); }});
    try {
        return work(device, *group);
    } catch (const SharedError& error) {
        // Printed here and not rethrown: when no exception passes the watchdog, it says goodbye to
        // the other ranks instead of reporting a failure.
        if (world.rank() == 0) std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 1;
    } catch (const std::exception& error) {
        if (watchdog.report(message_of(error))) throw ReportedError(error.what());
        throw;
    }
}

}  // namespace train_gpt
