// What a run decides by itself before its first step. It decides by the available memory or by
// measuring, or it keeps earlier decisions. Machines may differ, so the first rank decides for all.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "device/device.h"
#include "kernels/attention/engine.h"
#include "model/stage.h"
#include "parallel/mesh.h"
#include "parallel/world.h"
#include "training/config/config.h"
#include "training/files/kept_choices.h"
#include "training/trainer.h"
#include "training/watch/progress.h"

namespace train_gpt {

/// The choices in the newest checkpoint of a run whose choices.json is undamaged; of the checkpoint
/// that schedule.decay_from names, for a run that begins with it. Empty choices if there is no such
/// checkpoint.
Choices kept_choices(const Config& config);

/// The decisions that the plan of memory needs.
struct Decisions {
    DType dtype = DType::fp32;
    Recompute recompute = Recompute::none;
    int micro_batch = 0;
    int zero = 1;
    Offload offload = {};  // none on a CPU, whose memory is the host's
    GradientSums sums = GradientSums::exact;
    bool saves_in_background = false;
    // Where choices were weighed by them: bytes per second along the data axis, FLOP/s of products.
    double link = 0, peak_flops = 0;
    double host_link = 0;  // bytes per second to the host, if offloading was weighed
    Choices kept;          // given choices, else kept_choices()
};
/// The configuration of a run with these kept choices: where parallel.sums is "auto", sums are as
/// they were before, if that is possible.
Config with_kept_sums(Config config, const Choices& kept);

/// Makes these decisions. All ranks call it. Throws Error where a rank's GPU cannot do what
/// precision.fp8 asks for. Does the mesh's first collectives (parallel/first_collectives.h) before
/// it looks how much memory is available. choices_of: a run or a checkpoint whose choices are taken
/// instead of the run's own; empty: none.
Decisions decide(const Config& config, const DecoderSpec& spec, const Device& device,
                 const Mesh& mesh, const std::string& choices_of = "");

/// Chooses among kernels that have alternatives, and returns all of the run's choices. If
/// `decided.kept` is from the same platform, its choices are taken. Other kernels are timed on
/// every path of a step. An operation with its shape has the same choice on all ranks: the choice
/// of the first rank on which this operation and shape occur. All ranks call it before they set
/// weights.
Choices choose_kernels(Trainer& trainer, const Decisions& decided, const World& world);

/// attention_use() of this rank, with `same_bits` of all ranks. All ranks call it.
AttentionUse attention_of_ranks(const Stream& stream, const World& world);

/// Says what fp8_refusals() has on any rank, each refusal once. All ranks call it.
void note_fp8_refusals(const Stream& stream, const World& world, Progress& progress);

/// require_host_memory() of every rank: where one throws, all do. All ranks call it.
void require_host_memory_on_ranks(const Arena& plan, const RunShape& shape, const Mesh& mesh);

}  // namespace train_gpt
