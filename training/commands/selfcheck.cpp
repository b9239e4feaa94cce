#include "training/selfcheck.h"

#include "training/commands/commands.h"
#include "training/rank_process.h"

namespace train_gpt::commands {

int selfcheck(const CommandLine& line) {
    constexpr double timeout_seconds = 60;  // no measurement takes that long
    return run_as_rank([&](const World& world) {
        return run_watched(world,
                           {.device = line.device,
                            .timeout_seconds = timeout_seconds,
                            .mesh = line.selfcheck.mesh},
                           [&](const Device& device, const Mesh& mesh) {
                               return train_gpt::selfcheck(line.selfcheck, device, mesh);
                           });
    });
}

}  // namespace train_gpt::commands
