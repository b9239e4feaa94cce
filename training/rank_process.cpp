#include "training/rank_process.h"

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "parallel/cores.h"
#include "parallel/together.h"
#include "parallel/watchdog/watchdog.h"
#include "training/version.h"

namespace train_gpt {

int run_as_rank(const std::function<int(const World&)>& work) {
    const World world = World::join(version());
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
        const std::vector<std::string>& places = world.places();
        const std::string place = places.empty() ? "" : places[static_cast<size_t>(world.rank())];
        std::fprintf(stderr, "train_gpt: rank %d (%s%shost %s): %s\n", world.rank(), place.c_str(),
                     place.empty() ? "" : ", ", world.host().c_str(), message_of(error).c_str());
        world.abort(1);
    }
}

int run_watched(const World& world, const RankOptions& options,
                const std::function<int(const Device&, const Mesh&)>& work) {
    const Device device = device_of_rank(world, options.device);
    const Mesh mesh(world, options.mesh,
                    open_communicator(world, device, world.activity(), options.collectives));
    Watchdog::Listener listener(world.rank(), world.size());
    const std::string invitation = world.broadcast(listener.invitation());
    Watchdog watchdog(std::move(listener), invitation, world.activity(),
                      {.rank = world.rank(),
                       .size = world.size(),
                       .host = world.host(),
                       .places = world.places(),
                       .timeout_seconds = options.timeout_seconds,
                       .check = [&] { mesh.check(); },
                       .on_failure = [&](const char*) { mesh.abort(); }});
    try {
        return work(device, mesh);
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
