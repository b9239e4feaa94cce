// How a run is divided so that it fits into memory and is fast: what the configuration leaves open.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "device/device.h"
#include "device/memory.h"
#include "training/config/layout.h"
#include "training/files/kept_choices.h"

namespace train_gpt {

/// The bytes of memory that a rank of the mesh may take. On the CPU, local_ranks ranks share the
/// machine's memory. On a GPU, the rank has what is free, except 256 MiB for each axis of the mesh
/// after the first one (replicas and shards are two): NCCL may choose an algorithm that it has not
/// connected (parallel/first_collectives.h).
uint64_t memory_for_a_rank(const Device& device, const MeshLayout& mesh, int local_ranks = 1);

/// What the time of a step depends on, beside the run's shape.
struct Speeds {
    double flops = 0;  // per second, of products of large matrices
    double link = 0;   // bytes per second that a rank sends along the data axis
    /// Between a GPU and its host, bytes per second in each direction; and the host's memory that a
    /// rank may take for it. 0: nothing is offloaded unless memory.offload says so.
    double host = 0;
    uint64_t host_memory = 0;
};

/// `speeds` with what is needed to weigh offloading, where memory.offload is "auto" and the device
/// a GPU: the speed of products, and 25 GB/s to the host, which is assumed (PCIe 4 with 16 lanes).
/// The ranks of a machine share half of the memory that it has free.
Speeds with_host(Speeds speeds, const RunShape& shape, const Device& device, int local_ranks);

/// Whether speeds decide: parallel.zero is "auto", and several ranks share the state.
bool weighs_speeds(const RunShape& shape);
/// Speeds for a plan, if they decide. The speed of products is measured here. The speed of the link
/// is assumed: 300 GB/s for up to 8 GPUs (NVLink), 40 GB/s for more (a network of 400 Gb/s for
/// each), 5 GB/s for CPUs.
Speeds planned_speeds(const RunShape& shape, const Device& device);

/// How a step is divided.
struct Fit {
    int micro_batch = 0;  // sequences
    Recompute recompute = Recompute::none;
    int zero = 1;
    Offload offload = {};
    uint64_t bytes = 0;       // the memory that each rank takes
    uint64_t host_bytes = 0;  // what is offloaded of it
};

/// batch.micro_batch, memory.recompute and parallel.zero as given. If they are 0 and "auto",
/// they are chosen for speed among the micro-batches that divide a step and feed all ranks, and
/// among the stages 1 to 3, so that they fit into `available` bytes: the busiest rank must finish
/// earliest. The estimate of its time:
///
///   micro-batch of n tokens   the time of n + 64 tokens (n + 1,024 on a GPU), × 1.04 if
///                             element-wise results are recomputed, × 1.33 if blocks are
///   token                     its FLOPs / (0.5 · speeds.flops)
///   weights and gradients     the bytes that state_bytes() counts / speeds.link, on a GPU without
///                             85 % of what is hidden. As much is hidden as 80 % of a micro-batch,
///                             or with stages 2 and 3, which send in every one, of the step
///   offloaded state           its bytes / speeds.host
///   offloaded activations     their bytes twice / speeds.host, without what is hidden: 80 % of the
///                             step
///
/// Weights and gradients are taken only where the stage is "auto"; without speeds, the first stage that fits
/// is chosen. If memory.offload is "auto", something is offloaded only where nothing fits
/// otherwise, and only with speeds.host. A chosen micro-batch has at most 4,096 tokens (65,536 on a GPU), beyond which nothing
/// is gained, or one sequence where that is longer. If nothing fits: the choice that needs the
/// least memory. Throws Error where a step cannot feed all ranks; the message says what can.
Fit fit_into(uint64_t available, const RunShape& shape, const Device& device,
             const Speeds& speeds = {});

/// The choices of `kept` for what the configuration leaves open, if they still divide a step, feed
/// all ranks and fit. What `kept` lacks is chosen, unless that needs speeds.
std::optional<Fit> kept_fit(const Choices& kept, uint64_t available, const RunShape& shape,
                            const Device& device, const Speeds& speeds = {});
/// The choices that depend on memory, and only these, for a run that starts or resumes here. They
/// come from kept_fit() if it has a fit, else from fit_into().
Choices choose_by_memory(const Choices& kept, uint64_t available, const RunShape& shape,
                         const Device& device, const Speeds& speeds = {});
/// The shape with these choices.
RunShape with_choices(const RunShape& shape, const Fit& fit);

/// Whether a run with this shape, in which all else is decided, writes checkpoints in the background:
/// as checkpoint.async says. If it is "auto", the copy of the state must fit: on a CPU into
/// `available` beside all else, on a GPU into half of the host's free memory, which the machine's
/// local_ranks share.
bool saves_in_background(const RunShape& shape, const Device& device, uint64_t available,
                         int local_ranks);

/// The smallest change that makes the configuration fit into `available` bytes on each rank, as a
/// sentence; if none does, the least memory that it would need.
std::string change_that_fits(const RunShape& shape, const Device& device, uint64_t available);

/// Allocates the memory of a run's plan. If there is not enough, the Error says what takes how
/// much and what would fit.
Arena allocate(const Arena& plan, const RunShape& shape);

}  // namespace train_gpt
