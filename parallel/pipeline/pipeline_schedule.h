// Pipeline schedules as data: for each pipeline rank, the list of what it computes, sends and
// receives in a step. One interpreter executes the lists; parallel/pipeline/pipeline_simulation.h times them.
#pragma once
#include <cstdint>
#include <vector>

namespace train_gpt {

/// The order in which the micro-batches of a step pass through the stages, there and back:
///
///   gpipe               all forwards, then all backwards; Huang et al. 2018, arXiv 1811.06965
///   one_f_one_b         rank r is p − r − 1 forwards ahead, then alternates: 1F1B;
///                       Narayanan et al. 2021, arXiv 2104.04473
///   interleaved         the same with v stages on each rank: stage s is on rank s mod p
///   zero_bubble         1F1B with halves of backward apart, those of the weights later: ZB-H1;
///                       Qi et al. 2024, arXiv 2401.10241
///
/// Idle time of each rank, and most micro-batches in flight on rank r, with p ranks, v stages on
/// each, m micro-batches, and F, I, W the times of a rank's forward and of both halves of its
/// backward for one micro-batch (B = I + W), where transfers take no time:
///
///   gpipe               (p − 1)(F + B)          m
///   one_f_one_b         (p − 1)(F + B)          p − r
///   interleaved         (p − 1)(F + B)/v        p + (p − 1 − 2r)/v, in whole stages
///   zero_bubble         (p − 1)(F + I − W)      p, of which r + 1 wait for W
///
/// That of zero_bubble needs m ≥ p; where W is not the least of F, I and W, that least takes its place.
enum class PipelineKind : uint8_t { gpipe, one_f_one_b, interleaved, zero_bubble };

/// The word for it in configurations: "gpipe", "1f1b", "interleaved", "zero_bubble".
const char* name_of(PipelineKind kind);

struct PipelineShape {
    PipelineKind kind = PipelineKind::one_f_one_b;
    int ranks = 1;            // p
    int stages_per_rank = 1;  // v; more than 1 only if interleaved
    int micro_batches = 1;    // m: of this pipeline; others along the data axis may have more

    bool operator==(const PipelineShape&) const = default;
};

enum class PipelineWork : uint8_t {
    forward,
    backward,            // both halves
    backward_inputs,     // the half that the stage before waits for
    backward_weights,    // the other
    send_activation,     // the output of `stage`, to the stage after it
    receive_activation,  // the input of `stage`
    send_gradient,       // of the input of `stage`, to the stage before it
    receive_gradient     // of the output of `stage`
};

inline bool is_compute(PipelineWork work) { return work <= PipelineWork::backward_weights; }
inline bool is_send(PipelineWork work) {
    return work == PipelineWork::send_activation || work == PipelineWork::send_gradient;
}

/// Numbers count from 0; −1: there is none. A slot or buffer is taken by the first action that has
/// its number, and free when the last one has finished.
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

    int rank_of(int stage) const { return stage % shape.ranks; }
    /// The rank at the other end of a send or receive.
    int peer_of(const PipelineAction& action) const;
};

/// The schedule of a step. With one rank there is no pipeline: it has one stage, and computes
/// forward and backward of one micro-batch after the other, whatever the kind.
///
/// Every stage computes forwards, backwards and weight gradients in the order of micro-batches, so
/// that the sums of gradients have the same order in all schedules. A shape with fewer
/// micro-batches never needs more slots or buffers.
///
/// All lists are parts of one sequence of all computes and messages, in which each message comes as
/// early as if every forward, and every half of backward, took the same time. Therefore:
/// - Actions executed one after another never deadlock, whether a send returns at once or waits for
///   its receive, and with any number of buffers for sends. This also holds for the messages alone,
///   on a stream that waits only for the compute before each send, and for the last reader of a
///   buffer before each receive.
/// - A rank sends to another in the order in which that one receives: messages need no tags.
/// - An output is sent before the rank computes again: one buffer for each direction is enough where
///   sends wait.
/// An interpreter should post a receive where the list has it, and wait for the message only before
/// the compute that reads it. Waiting earlier is correct, but slower where times are uneven. A
/// receive may be postponed to that compute only if sends return at once, however many are under way.
///
/// Throws Error for extents below 1; stages_per_rank other than 1 without, or below 2 with,
/// `interleaved`; and there for micro_batches that are not a multiple of the ranks.
PipelineSchedule pipeline_schedule(const PipelineShape& shape);

}  // namespace train_gpt
