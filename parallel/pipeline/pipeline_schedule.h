// Pipeline schedules as data: for each pipeline rank, the list of what the rank computes, sends and
// receives in a step. One interpreter (model/pipeline.h) executes the lists, and
// pipeline_simulation.h computes how long they take.
#pragma once
#include <cstdint>
#include <vector>

namespace train_gpt {

/// The order in which the micro-batches of a step pass through the stages, there and back:
///
///   gpipe               all forwards, then all backwards; Huang et al. 2018, arXiv 1811.06965
///   one_f_one_b         1F1B: rank r computes p − r − 1 forwards, then forwards and backwards in
///                       turn; Narayanan et al. 2021, arXiv 2104.04473
///   interleaved         1F1B with v stages on each rank: stage s is on rank s mod p
///   zero_bubble         ZB-H1: 1F1B in which the two halves of backward are apart: the half for
///                       weights comes later; Qi et al. 2024, arXiv 2401.10241
///
/// With the names
///
///   p, v, m   ranks, stages on each rank, micro-batches
///   F         the time of a rank's forward for one micro-batch
///   I, W      the times of the two halves of its backward: gradients of inputs, and of weights
///   B         I + W
///
/// and transfers that take no time:
///
///   schedule            idle time of a rank     most micro-batches in flight on rank r
///   gpipe               (p − 1)(F + B)          m
///   one_f_one_b         (p − 1)(F + B)          p − r
///   interleaved         (p − 1)(F + B)/v        p + (p − 1 − 2r)/v, in whole stages
///   zero_bubble         (p − 1)(F + I − W)      p; of these, r + 1 wait for W
///
/// The idle time of zero_bubble needs m ≥ p. If W is not the least of F, I and W, the least of
/// these three times takes the place of W in (p − 1)(F + I − W).
enum class PipelineKind : uint8_t { gpipe, one_f_one_b, interleaved, zero_bubble };

/// The kind's word in configurations: "gpipe", "1f1b", "interleaved", "zero_bubble".
const char* name_of(PipelineKind kind);

/// Whether a rank holds the activations of all micro-batches of a step at a time. Schedules of
/// other kinds hold a number that depends on the ranks and stages.
bool holds_all_micro_batches(PipelineKind kind);

/// The idle time of a rank by the formulas above, in micro-batches (F + B), if F, I and W are the
/// same. With fewer micro-batches than ranks, zero_bubble idles longer.
double idle_micro_batches(PipelineKind kind, int ranks, int stages_per_rank);

/// The pipeline rank that computes a stage: with several stages on each rank they take turns.
inline int rank_of_stage(int stage, int ranks) { return stage % ranks; }

struct PipelineShape {
    PipelineKind kind = PipelineKind::one_f_one_b;
    int ranks = 1;            // p
    int stages_per_rank = 1;  // v; more than 1 only if interleaved
    int micro_batches = 1;    // m of this pipeline; other pipelines of the run may have more

    bool operator==(const PipelineShape&) const = default;
};

enum class PipelineWork : uint8_t {
    forward,
    backward,            // both halves
    backward_inputs,     // the half for which the stage before waits
    backward_weights,    // the other half
    send_activation,     // the output of `stage`, to the stage after it
    receive_activation,  // the input of `stage`
    send_gradient,       // the gradient of the input of `stage`, to the stage before it
    receive_gradient     // the gradient of the output of `stage`
};

inline bool is_compute(PipelineWork work) { return work <= PipelineWork::backward_weights; }
inline bool is_send(PipelineWork work) {
    return work == PipelineWork::send_activation || work == PipelineWork::send_gradient;
}

/// Numbers count from 0; −1: there is none. The first action with a slot's or a buffer's number
/// takes it. It is free again when the last action with this number has finished.
struct PipelineAction {
    PipelineWork work = PipelineWork::forward;
    int micro_batch = 0, stage = 0;
    /// The stage's activations of this micro-batch, from its forward to the end of its backward.
    int slot = -1;
    /// Where the message arrives, from its receive to the compute that reads it. Activations and
    /// gradients have buffers of their own.
    int buffer = -1;

    bool operator==(const PipelineAction&) const = default;
};

struct PipelineRank {
    std::vector<PipelineAction> actions;
    int activation_buffers = 0, gradient_buffers = 0;
};

struct PipelineSchedule {
    PipelineShape shape;
    int stages = 1;
    bool halves_apart = false;  // backward_inputs and backward_weights instead of backward
    std::vector<PipelineRank> ranks;
    std::vector<int> slots;  // of each stage: the most that are taken at a time

    int rank_of(int stage) const { return rank_of_stage(stage, shape.ranks); }
    /// Which of its rank's stages a stage is, from 0.
    int index_of(int stage) const { return stage / shape.ranks; }
    /// The stages of a rank, in the order of the model.
    std::vector<int> stages_of(int rank) const;
    /// The rank at the other end of a send or receive.
    int peer_of(const PipelineAction& action) const;
};

/// The schedule of a step. With one rank there is no pipeline: the schedule has one stage, which
/// computes forward and backward of one micro-batch after the other, whatever the kind.
///
/// Every stage computes forwards, backwards and weight gradients in the order of micro-batches, so
/// that the sums of gradients have the same order in all schedules. A shape with fewer
/// micro-batches never needs more slots or buffers.
///
/// The ranks' lists are parts of one sequence of all computes and messages. In this sequence each
/// message comes as early as if every forward, and every half of backward, took the same time.
/// Therefore:
/// - Ranks that execute their actions one after another never deadlock. This holds whether a send
///   returns at once or waits for its receive, and for any number of buffers for sends. It also
///   holds for messages in a stream of their own, if this stream waits for the compute before each
///   send, and for the last reader of a buffer before each receive.
/// - If a rank sends several messages to another rank, the other rank receives them in this order:
///   messages need no tags.
/// - An output is sent before the rank computes again. So one buffer for each direction is enough
///   if sends wait.
///
/// An interpreter should post a receive at its place in the list, and wait for the message only
/// before the compute that reads it. Waiting earlier is correct, but slower if times are uneven. A
/// receive may be postponed to the compute that reads it only if sends return at once, however many
/// are under way.
///
/// Throws Error if a number is below 1. Throws Error if stages_per_rank is not 1 with a kind other
/// than `interleaved`. With `interleaved`, throws Error if stages_per_rank is below 2, or if
/// micro_batches is not a multiple of the ranks.
PipelineSchedule pipeline_schedule(const PipelineShape& shape);

}  // namespace train_gpt
