// What each pipeline rank does in a step, with the times of its parts on a cluster.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/mesh.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "training/config/layout.h"
#include "training/plan/cluster.h"
#include "training/plan/efficiencies.h"

namespace train_gpt {

/// Seconds of one pass of a micro-batch through a unit (a layer, or what is before or after all
/// layers), by what they are spent on.
struct PassTime {
    double products = 0, attention = 0, memory = 0;
    double tensor = 0, context = 0;  // exchanges that the pass waits for
    double offload = 0;              // activations on their way to or from the host

    double sum() const { return products + attention + memory + tensor + context + offload; }
    PassTime& operator+=(const PassTime& other);
    friend PassTime operator*(double factor, PassTime time);
};

struct UnitWork {
    int layer = -1;         // of the model; −1: none
    bool has_head = false;  // the final norm, the head and the loss
    PassTime forward, backward_inputs, backward_weights;
    // Seconds of the data axis's exchanges: weights that are gathered, and gradients that are added
    // up, in each micro-batch that the rule below names, and once in a step
    double gather = 0, reduce_each = 0, reduce_once = 0;
};

struct RankWork {
    std::vector<std::vector<UnitWork>> stages;  // units of each, in the order of the forward pass
    // Seconds after the last gradient
    double sums = 0;       // over all ranks
    double optimizer = 0;  // the update, and the rounding of weights to fp8 once a step
    double muon = 0;       // of these, Newton–Schulz iterations
    double offload = 0;    // state on its way from the host's memory and back
};

/// Weights are gathered before their first use in a step, or with ZeRO-3 before each pass.
/// Gradients are added up after a step's last micro-batch, or with ZeRO-2 and 3 after each.
struct StepWork {
    PipelineSchedule schedule;
    std::vector<RankWork> ranks = {};  // of the pipeline
    bool gathers_each = false;
    double send = 0;              // seconds of a message
    double beside_exchanges = 0;  // what computing loses beside them
    double factor = 1;            // of the whole step, for the cluster's size
};

struct WorkOptions {
    Software software = Software::own;
    /// Products take fp8 operands: the products that fp8_products() names, or all products of
    /// blocks where the configuration has no fp8, as in other programs.
    bool fp8 = false;
    double again = 0;  // share of the forward products that is computed again, beside
                       // memory.recompute
    bool attention_again = false;
    std::optional<Axis> without = {};               // exchanges along this axis take no time
    std::optional<Efficiencies> efficiencies = {};  // nothing: the table's
};

/// config.batch.micro_batch must be given. Times of a rank with the most micro-batches, and of
/// tensor and context rank 0. Throws Error where the cluster has no products of the run's dtype.
StepWork step_work(const RunShape& shape, const Cluster& cluster, const WorkOptions& options = {});

/// Replaces the passes' times in `work` by the times of another micro-batch or recompute level. All
/// else of the shape is as it was for step_work().
void time_passes(StepWork& work, const RunShape& shape, const Cluster& cluster,
                 const WorkOptions& options = {});

}  // namespace train_gpt
