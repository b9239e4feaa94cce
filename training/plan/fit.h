// How a run is divided so that it fits into memory and is fast: what the configuration leaves open.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "device/device.h"
#include "device/memory.h"
#include "device/processor.h"
#include "training/config/layout.h"
#include "training/files/kept_choices.h"
#include "training/plan/memory_plan.h"
#include "training/plan/step_time.h"

namespace train_gpt {

/// The memory that a rank of the mesh may take. local_ranks ranks share the machine's memory, of
/// which seven eighths may be pinned for GPUs. A rank may take what is free on its GPU, less what
/// memory_of_a_gpu() keeps. unlimited_memory of a machine that does not say how much it has.
DeviceAndHost memory_for_a_rank(const Device& device, const MeshLayout& mesh, int local_ranks = 1);
/// An equal share of the machine's available memory; unlimited_memory where its memory_total is 0.
uint64_t host_memory_of_a_rank(const CpuInfo& machine, int local_ranks);
/// How many of a GPU's free bytes a rank of the mesh may take: all but 256 MiB for each axis of the
/// mesh after the first one (replicas and shards are two). NCCL may choose an algorithm that it has
/// not connected (parallel/first_collectives.h), which takes memory.
uint64_t memory_of_a_gpu(uint64_t free, const MeshLayout& mesh);

/// Whether the speed of the link decides: parallel.zero is "auto", and several ranks share the
/// state.
bool weighs_link(const RunShape& shape);
/// Whether the speed of copies to the host decides: memory.offload is "auto", the device is a GPU,
/// and without offloading the run does not fit or computes something again.
bool weighs_host(const DeviceAndHost& available, const RunShape& shape, const Device& device);
/// The speeds that decide: the host link's only where weighs_host(), the rate of products only
/// where the host link's or the link's does. So a plan for another machine weighs what a run there
/// would.
Speeds deciding_speeds(Speeds known, const DeviceAndHost& available, const RunShape& shape,
                       const Device& device);
/// Fills in the speeds that decide by measuring: of products, and of copies to the host.
Speeds measured_here(Speeds speeds, const DeviceAndHost& available, const RunShape& shape,
                     const Device& device);
/// Bytes per second that a rank sends along the data axis, where nothing is measured: 300 GB/s for
/// up to 8 GPUs (NVLink), 40 GB/s for more (a network of 400 Gb/s for each), 5 GB/s for CPUs.
double assumed_link(const RunShape& shape, const Device& device);

/// How a step is divided.
struct Fit {
    int micro_batch = 0;  // sequences
    Recompute recompute = Recompute::none;
    int zero = 1;
    Offload offload = {};
    DeviceAndHost memory = {};  // the most that a rank takes
    int64_t offloaded = 0;      // bytes of state and activations in the host's memory, of a rank
};

/// batch.micro_batch, memory.recompute and parallel.zero as given. If they are 0 and "auto", they
/// are chosen for speed among the micro-batches that divide a step and feed all ranks, and among
/// the stages 1 to 3, so that they fit into `available` memory: the busiest rank must finish
/// earliest, by StepTime's estimate.
///
/// The estimate counts weights and gradients only where the stage is "auto". Without speeds the
/// first stage that fits is chosen. A chosen micro-batch has at most 4,096 tokens (65,536 on a
/// GPU), beyond which nothing is gained, or one sequence where that is longer.
///
/// If memory.offload is "auto", four ways are compared: nothing, activations, the optimizer, both.
/// Each way has the choices that it would have if it were given. A GPU takes the fastest
/// way that fits, where the optimizer and activations count as 5 % each. Without speeds it takes
/// the first way that fits.
///
/// If nothing fits: the choice that needs the least memory among the choices that fit into the
/// host's memory. Throws Error where a step cannot feed all ranks; the message says what can.
Fit fit_into(const DeviceAndHost& available, const RunShape& shape, const Device& device,
             const Speeds& speeds = {});

/// Which kept choices a run takes again. All, if they still divide a step, feed all ranks and fit.
/// All but the offload, if only another offload fits. Otherwise none.
Choices usable_choices(const Choices& kept, const DeviceAndHost& available, const RunShape& shape,
                       const Device& device);
/// The shape with these choices where the configuration leaves them open. What is not chosen stays
/// open.
RunShape with_kept(const RunShape& shape, const Choices& kept);
/// The choices that depend on memory, and only these, for a run that starts or resumes here:
/// usable_choices(), and what they leave open by fit_into().
Choices choose_by_memory(const Choices& kept, const DeviceAndHost& available, const RunShape& shape,
                         const Device& device, const Speeds& speeds = {});
/// The shape with these choices.
RunShape with_choices(const RunShape& shape, const Fit& fit);

/// Whether a run with this shape, in which all else is decided, writes checkpoints in the
/// background: as checkpoint.async says. If it is "auto", the copy of the state must fit: on a CPU
/// beside all else, on a GPU into half of the host's memory.
bool saves_in_background(const RunShape& shape, const Device& device,
                         const DeviceAndHost& available);

}  // namespace train_gpt
