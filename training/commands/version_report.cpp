#include "training/commands/version_report.h"

#include "base/error.h"
#include "base/version.h"
#include "dataloader/decompress.h"
#include "device/device.h"
#include "parallel/world.h"

namespace train_gpt {

std::string version_report() {
    return concat("train_gpt ", version(), "\n", "built with ",
#ifdef __VERSION__
                  "gcc-compatible compiler ", __VERSION__,
#else
                  "an unknown compiler",
#endif
                  ", ",
#ifdef NDEBUG
                  "release",
#else
                  "with assertions",
#endif
                  "\n", describe_devices(), "MPI     ", World::describe_library(), "\n",
                  describe_decompressors());
}

}  // namespace train_gpt
