// How long a step of a pipeline takes, computed without running it: from its schedule and the times
// of its parts.
#pragma once
#include <vector>

#include "parallel/pipeline/pipeline_schedule.h"

namespace train_gpt {

/// Seconds, or any other unit, for one micro-batch. backward takes the sum of its halves.
struct StageTimes {
    double forward = 0, backward_inputs = 0, backward_weights = 0;
};

struct PipelineTimes {
    std::vector<StageTimes> stages;
    double send = 0;  // of one message from one rank to another
};

/// What a send does to the rank that sends.
enum class PipelineTransport : uint8_t {
    /// Nothing: the message is on its way while the rank computes, and on each link from one rank
    /// to another one message follows the other. Only the compute that reads it waits.
    buffered,
    /// It waits for the receive, and the receive for it; then both ranks are busy with the transfer.
    blocking
};

struct TimedAction {
    PipelineAction action;
    double start = 0, end = 0;
};

/// What happens when: the computes of each rank, in order of time.
struct PipelineTimeline {
    double makespan = 0;  // from the start of the first compute to the end of the last
    std::vector<std::vector<TimedAction>> computes;  // of each rank
    std::vector<double> idle;     // of each rank: the time in which it computes nothing
    std::vector<int> peak_slots;  // of each stage: the most micro-batches in flight

    /// The share of all ranks' time in which they are idle, 0 … 1.
    double idle_share() const;
};

/// Executes the lists of a schedule. Throws Error that names the ranks and actions if they deadlock,
/// and if a rank receives another message than the one that its peer sends next.
/// times.stages has an element for each stage.
PipelineTimeline simulate(const PipelineSchedule& schedule, const PipelineTimes& times,
                          PipelineTransport transport = PipelineTransport::buffered);

}  // namespace train_gpt
