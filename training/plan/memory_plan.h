// The memory of a run, counted by the code that later takes it.
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "device/memory.h"
#include "model/stage.h"
#include "training/config/layout.h"

namespace train_gpt {

/// As an amount of memory that is available: nobody knows how much there is.
inline constexpr uint64_t unlimited_memory = std::numeric_limits<uint64_t>::max();

/// Bytes of memory: of the device, and of the host beside a GPU.
struct DeviceAndHost {
    uint64_t device = 0, host = 0;

    /// Whether so much is there.
    bool fits(const DeviceAndHost& available) const {
        return device <= available.device && host <= available.host;
    }
};

/// Memory of a rank, counted by a Trainer over a counting arena; without `rank`, of the rank whose
/// stage of the pipeline needs the most.
Arena plan_memory(const RunShape& shape, const Device& device, std::optional<int> rank = {});
/// The bytes of a rank of each place on the pipeline axis.
std::vector<DeviceAndHost> memory_of_stages(const RunShape& shape, const Device& device);
/// The most that a rank needs of each.
DeviceAndHost most_memory(const RunShape& shape, const Device& device);

/// Allocates the memory of a plan. Throws Error if there is not enough memory; the message says
/// what takes how much.
Arena allocate(const Arena& plan);

/// "staging", "offloaded" and "saving" are in host memory where the device is a GPU.
std::string label_of(Purpose purpose, const Device& device);
/// Memory by purpose, one line each, and the total.
std::string memory_table(const Arena& plan);

}  // namespace train_gpt
