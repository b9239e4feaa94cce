// A run whose weights are set and whose first step has not begun.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/attention/engine.h"
#include "training/config/config.h"
#include "training/files/checkpoint.h"
#include "training/files/kept_choices.h"
#include "training/files/token_ids.h"
#include "training/run_data.h"
#include "training/schedule.h"
#include "training/trainer.h"

namespace train_gpt {

/// What a run was given, has read and has decided. All of it outlives the run.
struct RunStart {
    const Config& given;   // as the run's folder keeps it: batch.micro_batch may be 0
    const Config& config;  // with what was decided: micro-batch, ZeRO, sums, when it saves
    const RunData& data;
    const Schedule& schedule;
    const Mesh& mesh;
    Trainer& trainer;
    const Arena& plan;    // of this rank's memory
    const Choices& kept;  // Decisions::kept
    const Choices& choices;
    const AttentionUse& attention;
    const TokenIds& tokens;  // of the checkpoints
    double link = 0;         // Decisions::link
    double peak_flops = 0;   // per second, as measured on this rank's device
    bool resumes = false;
    bool replays = false;  // steps of another run: without evaluations, samples and checkpoints

    bool on_first_rank() const { return mesh.world().rank() == 0; }
    int ranks() const { return mesh.world().size(); }
    int64_t first_step() const { return schedule.start().step; }
    int64_t steps_left() const { return std::max<int64_t>(0, schedule.steps() - first_step()); }
    /// The step that the run's files resume from; nothing for a new run.
    std::optional<int64_t> resume_step() const {
        return resumes ? std::optional(first_step()) : std::nullopt;
    }
    /// The configuration as config.json has it.
    Config recorded() const;
    /// What every checkpoint of the run says about it, for a checkpoint at this step.
    CheckpointContents contents(int64_t step) const;
    /// Where the training data begin, and in which order they are read.
    LoaderOptions loading() const;
    /// What the whole run reads of its training data.
    std::vector<SourceUse> planned_use() const;
    /// A step's micro-batches on all ranks; steps count from 0.
    int micro_batches_of(int64_t step) const;
};

}  // namespace train_gpt
