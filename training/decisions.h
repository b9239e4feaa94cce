// What a run decides by itself before its first step: from the available memory, by measuring, or
// by keeping earlier decisions. Machines may differ, so the first rank decides for all.
#pragma once
#include <cstdint>
#include <filesystem>

#include "device/device.h"
#include "model/stage.h"
#include "parallel/mesh.h"
#include "parallel/world.h"
#include "training/config/config.h"
#include "training/files/kept_choices.h"
#include "training/trainer.h"

namespace train_gpt {

/// The choices of the newest whole checkpoint in a run's folder; nothing for a new run.
Choices kept_choices(const std::filesystem::path& run_dir);

/// The memory that a rank may take, if it shares the machine with so many (on a GPU: its own).
uint64_t memory_for_a_rank(const Device& device, int local_ranks);

/// The decisions that the plan of memory needs.
struct Decisions {
    DType dtype = DType::fp32;
    Recompute recompute = Recompute::none;
    int micro_batch = 0;
    Choices kept;  // of the newest whole checkpoint, if there is one
};
/// Before it looks how much memory is available, it does the mesh's first collectives
/// (parallel/axes/first_collectives.h). All ranks call it.
Decisions decide(const Config& config, const DecoderSpec& spec, const Device& device,
                 const Mesh& mesh);

/// Chooses among kernels with alternatives: as in `decided.kept` if that was on the same platform,
/// else by timing them on every path of a step. An operation and its shape have one choice in the
/// whole run: the first rank's, or of the first rank that has them. All ranks call it before they
/// set weights. Returns all of the run's choices.
Choices choose_kernels(Trainer& trainer, const Decisions& decided, const World& world);

}  // namespace train_gpt
