// What a step takes on a cluster that need not be here: time, memory, cost, and what bounds it.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "training/plan/cluster.h"
#include "training/plan/plan_target.h"
#include "training/plan/step_simulation.h"

namespace train_gpt {

struct PredictionOptions {
    std::optional<double> price = {};  // of a GPU's hour
};

/// The GPU or the CPU of a cluster, as a target of plans. A build without CUDA counts memory as on
/// a CPU.
PlanTarget target_of(const Cluster& cluster);

/// Whether products of blocks take fp8 inputs.
bool is_fp8(const Config& config);

/// The run's shape on so many ranks of the cluster, with nothing chosen. dtype "auto" is bf16 where
/// the cluster has faster products of bf16. Throws Error where the ranks do not fill whole nodes,
/// or tensor-parallel ranks would be on several nodes.
RunShape shape_on(const Config& config, const Cluster& cluster, int world);

/// The shape with everything that it leaves open chosen, as a run would choose it on the cluster
/// (fit_into()).
RunShape choose_for(const RunShape& shape, const Cluster& cluster);
/// The speeds by which it chooses.
Speeds speeds_on(const Cluster& cluster, const RunShape& shape);

struct Prediction {
    double step_seconds = 0;
    double tokens_per_second = 0;  // of a rank
    double mfu = 0;                // of the dense peak in the run's dtype, with fp8 too
    DType dtype = DType::bf16;     // the dtype of that peak
    double bubble = 0;             // share
    double low = 0, high = 0;      // of step_seconds: nine of ten published rows lie within
    // Seconds of a step: the update, with the rounding of weights to fp8; of it, Muon's iterations;
    // state and activations that are waited for on their way from and to the host's memory
    double optimizer = 0, muon = 0, offload = 0;
    /// How much shorter a step would be if the exchanges along an axis took no time, seconds.
    std::map<std::string, double> exposed;
    /// Shares of a step of the rank that computes the most.
    std::map<std::string, double> shares;
    std::string bound;                            // the largest of these shares
    std::optional<double> gpu_hours, days, cost;  // of the run, if its length is known
    std::map<std::string, uint64_t> memory;       // bytes by purpose, on the rank with the most
    uint64_t memory_available = 0;
    int fp8_pays_from = 0;  // fp8_pays_from(); 0 also for runs without fp8
    bool fp8_pays = false;  // the model is at least so wide
    std::vector<std::string> notes;
};

/// From which width fp8 pays, `from` (fp8_pays_from()), and whether it does for a model of this
/// width, as a sentence. gpu: where.
std::string fp8_note(const std::string& gpu, int from, int width);
/// The sentence for a plan's GPU by its datasheet, or that the GPU is not known there. Empty for a
/// CPU.
std::string fp8_note(const PlanTarget& target, int width);

/// All of the shape must be chosen: micro-batch, recomputation and ZeRO's stage.
Prediction predict(const RunShape& shape, const Cluster& cluster,
                   const PredictionOptions& options = {});

std::string to_text(const Prediction& prediction, const Cluster& cluster);
/// One object, with the keys that docs/planning.md lists.
Json to_json(const Prediction& prediction);

}  // namespace train_gpt
